"""Policy-gradient baselines: what is subtracted from a reward, and the loss that belongs to it."""

from prime_rl import Algorithm, hookimpl
from prime_rl_baselines.base import AdaptiveEntropy as AdaptiveEntropy
from prime_rl_baselines.base import Baseline as Baseline
from prime_rl_baselines.base import BaselineConfig as BaselineConfig
from prime_rl_baselines.dapo import DAPO as DAPO
from prime_rl_baselines.dapo import DAPOConfig as DAPOConfig
from prime_rl_baselines.group import OPO as OPO
from prime_rl_baselines.group import RLOO as RLOO
from prime_rl_baselines.group import DrGRPO as DrGRPO
from prime_rl_baselines.group import GRPOStd as GRPOStd
from prime_rl_baselines.reinforce import Reinforce as Reinforce
from prime_rl_baselines.reinforce import ReinforceConfig as ReinforceConfig
from prime_rl_baselines.reinforce_ada import ReinforceAda as ReinforceAda
from prime_rl_baselines.reinforce_ada import ReinforceAdaConfig as ReinforceAdaConfig
from prime_rl_baselines.reinforce_pp_global import ReinforcePPGlobal as ReinforcePPGlobal


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [Reinforce, RLOO, OPO, GRPOStd, DrGRPO, DAPO, ReinforceAda, ReinforcePPGlobal]
