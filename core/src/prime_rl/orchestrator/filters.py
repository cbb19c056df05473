"""Filter slots: every filter sees every rollout and every objection is counted, so that a filter
that only monitors hides no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.errors import PluginError
from prime_rl.plugins.base import Filter
from prime_rl.plugins.manager import Hooks, scope
from prime_rl.rollout import Rollout


@dataclass(frozen=True)
class _Asked:
    """A filter of the slot, or an installed plugin that implements ``filter_rollout``."""

    name: str
    enforce: bool
    call: Any


class FilterSlot:
    """The filters of one slot, each with every installed plugin's wrappers around it."""

    def __init__(self, label: str, shared: Hooks, filters: Sequence[tuple[Filter, bool]]) -> None:
        self.label = label
        self.seen = 0
        self.dropped = 0
        self.objections: Counter[str] = Counter()
        enforce = {id(filter): flag for filter, flag in filters}
        hooks = scope(label, shared, [filter for filter, _ in filters])
        impls = [
            i for i in hooks.hook.filter_rollout.get_hookimpls() if not (i.wrapper or i.hookwrapper)
        ]
        plugins = [impl.plugin for impl in impls]
        self._asked = [
            _Asked(
                getattr(impl.plugin, "name", impl.plugin_name),
                enforce.get(id(impl.plugin), True),
                hooks.subset_hook_caller(
                    "filter_rollout", [other for other in plugins if other is not impl.plugin]
                ),
            )
            for impl in impls
        ]

    def objectors(self, rollout: Rollout) -> list[str]:
        """Call every filter. Returns the enforcing ones that object: none if it may train."""
        self.seen += 1
        fired = [asked for asked in self._asked if _reasons(asked, rollout)]
        self.objections.update(asked.name for asked in fired)
        enforcing = [asked.name for asked in fired if asked.enforce]
        self.dropped += bool(enforcing)
        return enforcing

    def take_metrics(self) -> dict[str, float]:
        """Shares since the last call: ``filters/<slot>/<name>`` and ``.../dropped``."""
        seen = max(self.seen, 1)
        metrics = {
            f"filters/{self.label}/{asked.name}": self.objections[asked.name] / seen
            for asked in self._asked
        }
        metrics[f"filters/{self.label}/dropped"] = self.dropped / seen
        self.seen, self.dropped = 0, 0
        self.objections.clear()
        return metrics


def _reasons(asked: _Asked, rollout: Rollout) -> list[str]:
    reasons: list[str] = asked.call(rollout=rollout)
    for reason in reasons:
        if not isinstance(reason, str):
            raise PluginError(
                f"filter {asked.name!r}: filter_rollout gave {reason!r}, expected the reason to "
                "drop the rollout, or None to keep it"
            )
    return reasons
