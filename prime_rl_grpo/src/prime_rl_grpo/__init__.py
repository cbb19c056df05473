"""Credit by comparison with other rewards: grpo, max_rl, hierarchical_grpo, rae, reinforce_pp."""

from prime_rl import Algorithm, hookimpl
from prime_rl_grpo.center import centered as centered
from prime_rl_grpo.grpo import GRPO as GRPO
from prime_rl_grpo.grpo import GRPOConfig as GRPOConfig
from prime_rl_grpo.hierarchical import HierarchicalGRPO as HierarchicalGRPO
from prime_rl_grpo.hierarchical import HierarchicalGRPOConfig as HierarchicalGRPOConfig
from prime_rl_grpo.max_rl import MaxRL as MaxRL
from prime_rl_grpo.rae import RAE as RAE
from prime_rl_grpo.rae import RAEConfig as RAEConfig
from prime_rl_grpo.reinforce_pp import ReinforcePP as ReinforcePP
from prime_rl_grpo.reinforce_pp import ReinforcePPBaseline as ReinforcePPBaseline
from prime_rl_grpo.reinforce_pp import whiten as whiten
from prime_rl_grpo.shaping import efficiency_shaped as efficiency_shaped
from prime_rl_grpo.shaping import linear_shaped as linear_shaped

centred = centered
"""Another name of ``centered``, kept for plugins."""


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [GRPO, MaxRL, HierarchicalGRPO, RAE, ReinforcePP, ReinforcePPBaseline]
