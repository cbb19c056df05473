"""Distillation: opd learns from a teacher, opsd from the policy conditioned on a demonstration, sft
from given samples."""

from prime_rl import Algorithm, hookimpl
from prime_rl_distill.opd import OPD as OPD
from prime_rl_distill.opsd import OPSD as OPSD
from prime_rl_distill.sft import SFT as SFT


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [OPD, OPSD, SFT]
