"""The distillation family: opd learns from a teacher, opsd from itself shown a demonstration, sft
from whoever samples."""

from prime_rl import Algorithm, hookimpl
from prime_rl_distill.opd import OPD as OPD
from prime_rl_distill.opsd import OPSD as OPSD
from prime_rl_distill.sft import SFT as SFT


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    """Offer the family."""
    return [OPD, OPSD, SFT]
