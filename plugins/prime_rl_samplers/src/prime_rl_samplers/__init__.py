"""The sampler ``difficulty_pools`` and the sources ``dataset`` and ``replay``."""

from prime_rl import Sampler, Source, hookimpl
from prime_rl_samplers.dataset import Dataset as Dataset
from prime_rl_samplers.pools import DifficultyPools as DifficultyPools
from prime_rl_samplers.replay import Replay as Replay


@hookimpl
def register_samplers() -> list[type[Sampler]]:
    return [DifficultyPools]


@hookimpl
def register_sources() -> list[type[Source]]:
    return [Dataset, Replay]
