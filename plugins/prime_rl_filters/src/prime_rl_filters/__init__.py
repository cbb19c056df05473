"""Filters that drop rollouts: gibberish, repetition, zero_advantage."""

from prime_rl import Filter, hookimpl
from prime_rl_filters.gibberish import Gibberish as Gibberish
from prime_rl_filters.repetition import Repetition as Repetition
from prime_rl_filters.zero_advantage import ZeroAdvantage as ZeroAdvantage


@hookimpl
def register_filters() -> list[type[Filter]]:
    return [Gibberish, Repetition, ZeroAdvantage]
