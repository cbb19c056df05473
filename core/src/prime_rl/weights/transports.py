"""The weight transport that ``[weight_broadcast]`` selects, on either side of a run."""

from __future__ import annotations

from prime_rl.config.run import WeightBroadcastConfig
from prime_rl.plugins.manager import Hooks
from prime_rl.plugins.offers import WEIGHT_TRANSPORT, collect, select, settings_of
from prime_rl.plugins.weight_transports import WeightTransport


def make_transport(table: WeightBroadcastConfig, hooks: Hooks) -> WeightTransport | None:
    """The installed transport with its settings; None where weights go as files. Raises
    ``ConfigError``."""
    if table.as_files:
        return None
    cls = select(
        WEIGHT_TRANSPORT, table.type, collect(hooks, WEIGHT_TRANSPORT), "weight_broadcast.type"
    )
    return cls(settings_of(cls, WEIGHT_TRANSPORT, table.settings, "weight_broadcast"))
