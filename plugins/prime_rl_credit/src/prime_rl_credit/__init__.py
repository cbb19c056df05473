"""Credit inside a rollout: by turns (mt_grpo, gigpo), by branches (vineppo, vineppo_turns) or by a
second model (prime)."""

from prime_rl import Algorithm, hookimpl
from prime_rl_credit.gigpo import GiGPO as GiGPO
from prime_rl_credit.gigpo import GiGPOConfig as GiGPOConfig
from prime_rl_credit.implicit_reward import Prime as Prime
from prime_rl_credit.mt_grpo import MTGRPO as MTGRPO
from prime_rl_credit.mt_grpo import MTGRPOConfig as MTGRPOConfig
from prime_rl_credit.vineppo import VinePPO as VinePPO
from prime_rl_credit.vineppo import VinePPOConfig as VinePPOConfig
from prime_rl_credit.vineppo_turns import TurnVinePPO as TurnVinePPO
from prime_rl_credit.vineppo_turns import TurnVinePPOConfig as TurnVinePPOConfig


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [MTGRPO, GiGPO, VinePPO, TurnVinePPO, Prime]
