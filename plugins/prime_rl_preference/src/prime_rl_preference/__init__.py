"""Learning from the best rollouts of a group: imitate them, or prefer them to the worst."""

from prime_rl import Algorithm, hookimpl
from prime_rl_preference.online_dpo import OnlineDPO as OnlineDPO
from prime_rl_preference.raft import RAFT as RAFT
from prime_rl_preference.raft import RAFTConfig as RAFTConfig


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [RAFT, OnlineDPO]
