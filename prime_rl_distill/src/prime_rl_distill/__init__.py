"""Distillation: opd learns from a teacher; opsd from the policy that has seen a demonstration, sdft
and sdpo from a slow copy of it; sft from given samples."""

from prime_rl import Algorithm, hookimpl
from prime_rl_distill.opd import OPD as OPD
from prime_rl_distill.opsd import OPSD as OPSD
from prime_rl_distill.sdft import SDFT as SDFT
from prime_rl_distill.sdpo import SDPO as SDPO
from prime_rl_distill.sft import SFT as SFT


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [OPD, OPSD, SDFT, SDPO, SFT]
