"""Upstream's package of settings. It has no counterpart, and its import says what to write."""

from prime_rl.upstream import missing

raise missing(
    __name__,
    "The settings of an algorithm, a loss or another plugin are a class in its own package: "
    "from prime_rl import PluginConfig. docs/config.md has the keys of a run.",
)
