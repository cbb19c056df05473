"""Filter slots: every filter sees every rollout and every objection is counted, so that a filter
that only monitors hides no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prime_rl.errors import PluginError
from prime_rl.plugins.algorithm import Filter
from prime_rl.plugins.manager import Hooks, scope
from prime_rl.rollout import Rollout


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
        self._calls = [
            (
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
        enforcing = []
        for name, is_enforcing, call in self._calls:
            reasons = call(rollout=rollout)
            if wrong := [reason for reason in reasons if not isinstance(reason, str)]:
                raise PluginError(
                    f"filter {name!r}: filter_rollout gave {wrong[0]!r}, expected the reason to "
                    "drop the rollout, or None to keep it"
                )
            self.objections[name] += bool(reasons)
            if reasons and is_enforcing:
                enforcing.append(name)
        self.dropped += bool(enforcing)
        return enforcing

    def take_metrics(self) -> dict[str, float]:
        """Shares since the last call: ``filters/<slot>/<name>`` and ``.../dropped``."""
        seen = max(self.seen, 1)
        metrics = {
            f"filters/{self.label}/{name}": self.objections[name] / seen
            for name, _, _ in self._calls
        }
        metrics[f"filters/{self.label}/dropped"] = self.dropped / seen
        self.seen, self.dropped = 0, 0
        self.objections.clear()
        return metrics
