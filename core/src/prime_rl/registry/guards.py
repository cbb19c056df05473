"""What a scoring hook must leave as it was: the members of a group, and whose sample is whose.

``Guard`` looks before the first implementation of a hook and after each, so that what is wrong is
named with the plugin that did it. It costs microseconds for each rollout, and nothing for each
token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from prime_rl.errors import PluginError
from prime_rl.rollout import Rollout


class Members(list[Rollout]):
    """A group as hooks, samplers and observers get it. Its members stay: one that left the list
    would vanish without a reason that a report could show."""

    def _refuse(self, *arguments: Any, **more: Any) -> Any:
        where = f"env {self[0].env!r}, group {self[0].group_id}: " if self else ""
        raise PluginError(
            f"{where}the list of a group's members is read only. Work on a copy (sorted(group), "
            "[*group]). To leave a rollout out, assign weights of 0.0 "
            "(rollout.assign_weights) or drop it in a filter (filter_rollout), which has a reason."
        )

    append = extend = insert = pop = remove = clear = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


def members(group: Sequence[Rollout]) -> Sequence[Rollout]:
    """A group for plugins: a list that is read only."""
    return group if isinstance(group, Members) else Members(group)


class Guard:
    """The rollouts of one call of a scoring hook."""

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        # The lists are copied, because a hook may remove samples from them.
        self._before = [(rollout, [*rollout.samples]) for rollout in rollouts]

    def check(self) -> None:
        """Raise ``PluginError`` for a sample of two rollouts, one that is gone, and for a metric or
        reward that is no number."""
        for rollout, before in self._before:
            if not is_number(rollout.reward):
                raise PluginError(
                    f"{_place(rollout)}: rollout.reward is {rollout.reward!r}, expected a number"
                )

            self._check_samples(rollout, before)
            for name, value in rollout.metrics.items():
                if not is_number(value):
                    raise PluginError(
                        f"{_place(rollout)}: rollout.metrics[{name!r}] is {value!r}, expected a "
                        "number: each step reports its mean. Put anything else in rollout.info."
                    )

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Look when the code inside has returned: also for a reward that was finite before, and is
        not any more. The metrics of the batch would not be, either."""
        finite = [rollout for rollout, _ in self._before if _is_finite(rollout.reward)]
        yield
        self.check()
        for rollout in finite:
            if not _is_finite(rollout.reward):
                raise PluginError(
                    f"{_place(rollout)}: rollout.reward is {rollout.reward!r}, expected a finite "
                    "number"
                )

    def _check_samples(self, rollout: Rollout, before: Sequence[Any]) -> None:
        owner = id(rollout)
        seen = set()

        for index, sample in enumerate(rollout.samples):
            if sample.owner not in (None, owner) or id(sample) in seen:
                other = "twice" if id(sample) in seen else "and in another rollout"
                raise PluginError(
                    f"{_place(rollout)}: sample {index} is in this rollout {other}. It would train "
                    "twice, under the credit that was written last. Give each rollout a Sample of "
                    "its own: dataclasses.replace(sample, streams={})."
                )

            seen.add(id(sample))
            sample.owner = owner  # another rollout with this sample is seen, also in a later call

        gone = [index for index, sample in enumerate(before) if id(sample) not in seen]
        if gone:
            raise PluginError(
                f"{_place(rollout)}: sample {gone[0]} was removed from rollout.samples, and its "
                "tokens would vanish. Leave it, and assign weights of 0.0 to its tokens "
                "(rollout.assign_weights)."
            )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is larger than any float
        return False


def is_number(value: object) -> bool:
    """Whether a metric can be this: a real number, bool included, or what converts to one."""
    return isinstance(value, Real) or (
        hasattr(value, "__float__") and not isinstance(value, str | bytes)
    )


def _place(rollout: Rollout) -> str:
    return f"env {rollout.env!r}, group {rollout.group_id}"
