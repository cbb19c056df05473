"""The samplers ``standard`` and ``difficulty_pools``; the sources ``dataset`` and ``replay``."""

from prime_rl import Sampler, Source, hookimpl
from prime_rl_samplers.dataset import Dataset as Dataset
from prime_rl_samplers.pools import DifficultyPools as DifficultyPools
from prime_rl_samplers.replay import Replay as Replay
from prime_rl_samplers.standard import StandardSampler as StandardSampler


@hookimpl
def register_samplers() -> list[type[Sampler]]:
    return [DifficultyPools, StandardSampler]


@hookimpl
def register_sources() -> list[type[Source]]:
    return [Dataset, Replay]
