"""Checks of the hooks that a plugin's module implements or wraps, around reference algorithms."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from prime_rl import Algorithm, Group, Host, PluginConfig, Rollout, RolloutPlan, hookimpl
from prime_rl.registry.calls import SWALLOWED
from prime_rl.registry.manager import Hooks, scope
from prime_rl.registry.offers import SCORING
from prime_rl.testing import conformance_group, logged_metrics
from prime_rl.testing.conformance import Report
from prime_rl.testing.host import conformance_host
from prime_rl.testing.scoring import score_async
from prime_rl_devkit.algorithms.behavior import INPUTS
from prime_rl_devkit.algorithms.streams import check_streams
from prime_rl_devkit.algorithms.subject import MIXED
from prime_rl_devkit.plans import check_plans
from prime_rl_devkit.verdicts import Broken, NotApplicable, raised, run

PREPARING = frozenset({"prepare_rollout"})
FILTERING = frozenset({"filter_rollout"})
OBSERVATION = frozenset({"batch_packed", "step_finished", "weights_published"})


class Credit(Algorithm):
    """Credit is the reward above the group's mean."""

    name = "credit"
    group_relative = True

    @hookimpl
    async def score_group(self, group: Group) -> None:
        """Score after another task has run."""
        await asyncio.sleep(0)
        mean = group[0].reward + np.mean([rollout.reward - group[0].reward for rollout in group])
        for rollout in group:
            rollout.assign_advantages(float(rollout.reward - mean))


class Imitation(Algorithm):
    """Moves towards a reference model, without advantages."""

    name = "imitation"
    action_loss = "ref_kl"

    async def setup(self, host: Host) -> None:
        """Keep the host."""
        self.host = host

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        """Ask the reference model."""
        columns = [await self.host.policy.logprobs(s.token_ids) for s in rollout.samples]
        rollout.assign_ref_logprobs(np.concatenate(columns))


class Fault(Exception):
    """What ``Failing`` raises."""


class Failing(Algorithm):
    """Raises in every hook."""

    name = "failing"

    @hookimpl
    async def prepare_rollout(self, plan: RolloutPlan) -> None:
        """Fail for a plan."""
        raise Fault

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        """Fail for a rollout."""
        if rollout.info.get("fails") == "score_rollout":
            raise Fault

    @hookimpl
    async def score_group(self, group: Group) -> None:
        """Fail for a group."""
        if group[0].info.get("fails") == "score_group":
            raise Fault

    @hookimpl
    async def score_batch(self, groups: Sequence[Group]) -> None:
        """Fail for a batch."""
        if groups[0][0].info.get("fails") == "score_batch":
            raise Fault

    @hookimpl
    async def score_envs(self, batches: Mapping[str, Sequence[Group]]) -> None:
        """Fail for the batch of several envs."""
        if any(groups[0][0].info.get("fails") == "score_envs" for groups in batches.values()):
            raise Fault


class Drops:
    """Another filter of the slot."""

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None:
        """Drop those without a reward."""
        return None if rollout.reward else "no reward"


def scores_beside_any_algorithm(plugin: object) -> None:
    """It works beside an algorithm with advantages and beside one without; tokens and masks stay as
    they were, and streams are aligned and finite."""
    _need(plugin, SCORING)
    for cls in (Credit, Imitation):
        has = "with" if cls is Credit else "without"
        where = f"beside an algorithm {has} advantages"
        group = conformance_group(MIXED)
        before = [_inputs(rollout) for rollout in group]
        try:
            _score(cls, group, plugin)
        except Exception as error:
            raise Broken(f"{where}: {raised(error)}") from error

        check_streams(group, MIXED)
        for rollout, columns in zip(group, before, strict=True):
            if _inputs(rollout) != columns:
                raise Broken(f"{where}: it changed tokens, masks or logprobs. Work on a copy.")


def passes_errors_on(plugin: object) -> None:
    """A wrapper lets the error of what it wraps through."""
    wrapped = [name for name, is_wrapper in _hooks(plugin).items() if is_wrapper]
    for hook in sorted((SCORING | PREPARING) & {*wrapped} - {"observation_weights"}):
        group = conformance_group(MIXED)
        for rollout in group:
            rollout.info["fails"] = hook
        try:
            if hook in PREPARING:
                hooks = scope("", Hooks(), [Failing(PluginConfig()), plugin])
                asyncio.run(hooks.prepare_rollout(RolloutPlan(prompt="2 + 2?")))
            else:
                _score(Failing, group, plugin)
        except Fault:
            continue
        except Exception as error:
            outcome = raised(error)
            if SWALLOWED in outcome:
                outcome = "no error: it was swallowed"
        else:
            outcome = "no error: it was swallowed"

        raise Broken(
            f"{hook}: the algorithm raised, and the run would get {outcome}. Put what must run "
            "into a finally, and catch nothing around the yield."
        )

    if not (SCORING | PREPARING) & {*wrapped}:
        raise NotApplicable("wraps no hook that may fail")


def prepares_rollouts(plugin: object) -> None:
    """``prepare_rollout`` takes a prompt of each form, and leaves a plan that a run can sample."""
    _need(plugin, PREPARING)
    asyncio.run(check_plans(scope("", Hooks(), [plugin])))


def filters_by_a_reason(plugin: object) -> None:
    """It gives a reason or None for each rollout, the same one when asked again; a wrapper gives
    the list of reasons."""
    _need(plugin, FILTERING)
    for own in ((), (Drops(),)):
        check_filtering(scope("slot", Hooks(), [*own, plugin]))


def check_filtering(hooks: Hooks) -> None:
    """Raise ``Broken`` if the filters of a slot give anything but reasons, the same ones twice."""
    group = conformance_group(MIXED)
    for rollout in group:
        for sample in rollout.samples:
            sample.freeze()
        first, again = (hooks.hook.filter_rollout(rollout=rollout, group=group) for _ in range(2))
        if not isinstance(first, list):
            raise Broken(f"the wrapper gave {first!r}, expected the list that its yield gives")
        for reason in first:
            if not isinstance(reason, str):
                raise Broken(f"got {reason!r}, expected the reason to drop a rollout, or None")

        if first != again:
            raise Broken(f"asked twice about one rollout, it said {first} and {again}")


def only_reads(plugin: object) -> None:
    """``batch_packed``, ``step_finished`` and ``weights_published`` change nothing."""
    _need(plugin, OBSERVATION)
    hooks = scope("", Hooks(), [plugin])
    (rollout,) = conformance_group(MIXED[:1])
    rollout.assign_advantages(1.0)
    rollout.freeze()
    hooks.batch_packed(0, rollout.samples)
    hooks.step_finished(0, MappingProxyType({"loss": 0.5, "reward/mean": 1.0}))
    hooks.weights_published(1)


CHECKS = (
    prepares_rollouts,
    scores_beside_any_algorithm,
    passes_errors_on,
    filters_by_a_reason,
    only_reads,
)


def check_hooks(name: str, plugin: object) -> Report | None:
    """The checks of a module's own hooks; None if it has none."""
    if not _hooks(plugin).keys() & (PREPARING | SCORING | FILTERING | OBSERVATION):
        return None
    with logged_metrics(name):
        return Report("hooks", name, tuple(run(check, plugin) for check in CHECKS))


def _hooks(plugin: object) -> dict[str, bool]:
    """The hooks that a plugin implements, and whether it wraps each."""
    hooks = Hooks()
    hooks.register(plugin)
    return {
        caller.name: any(impl.wrapper for impl in caller.get_hookimpls())
        for caller in hooks.get_hookcallers(plugin) or ()
    }


def _need(plugin: object, names: frozenset[str]) -> None:
    if not _hooks(plugin).keys() & names:
        raise NotApplicable(f"has none of {', '.join(sorted(names))}")


def _score(cls: type[Algorithm], group: Group, plugin: object) -> None:
    host = conformance_host()
    asyncio.run(score_async(cls(PluginConfig()), [group], plugins=(plugin,), host=host))


def _inputs(rollout: Rollout) -> list[bytes]:
    columns = [sample.columns for sample in rollout.samples]
    return [each[name].tobytes() for each in columns for name in INPUTS if name in each]
