"""Checks of what is not an algorithm: filters, losses, samplers. Other kinds need a server, a file
or a model, and are checked by their package's own tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prime_rl.plugins.algorithm import Filter
from prime_rl.plugins.base import Offer, PluginConfig
from prime_rl.plugins.manager import Hooks, scope
from prime_rl.plugins.sampler import SampledEnv, Sampler
from prime_rl.testing import losses
from prime_rl.testing.report import Broken, NotApplicable, Outcome, Report, promise_of
from prime_rl.testing.rollouts import conformance_group
from prime_rl.testing.scoring import MIXED

Check = Callable[[type[Any], PluginConfig], None]


def filter_answers(cls: type[Filter], config: PluginConfig) -> None:
    """It gives a reason or None, and the same one when asked again."""
    hooks = scope("slot", Hooks(), [cls(config)])
    for rollout in conformance_group(MIXED):
        for sample in rollout.samples:
            sample.freeze()
        first, again = (hooks.hook.filter_rollout(rollout=rollout) for _ in range(2))
        for reason in first:
            if not isinstance(reason, str):
                raise Broken(f"got {reason!r}, expected the reason to drop a rollout, or None")
        if first != again:
            raise Broken(f"asked twice about one rollout, it said {first} and {again}")


ENVS = (SampledEnv("small", 3, None), SampledEnv("endless", None, None))


def sampler_in_range(cls: type[Sampler], config: PluginConfig) -> None:
    """It names examples that exist, the same ones for the same seed."""
    first, again = ([*_drawn(cls(config, ENVS, 0), 20)] for _ in range(2))
    for env, example in first:
        if env not in (0, 1) or example < 0 or (env == 0 and example >= 3):
            raise Broken(
                f"gave (env {env}, example {example}) of {len(ENVS)} envs with 3 examples and "
                "without end"
            )
    if first != again:
        raise Broken(f"seed 0 gave {first[:5]} and then {again[:5]}. Draw from self.seed.")


def sampler_resumes(cls: type[Sampler], config: PluginConfig) -> None:
    """What it saves, it goes on from."""
    if cls.save is Sampler.save:
        raise NotApplicable("saves nothing: a resumed run starts its order anew")
    sampler = cls(config, ENVS, 0)
    _drawn(sampler, 5)
    with TemporaryDirectory() as folder:
        sampler.save(Path(folder))
        expected = _drawn(sampler, 10)
        resumed = cls(config, ENVS, 0)
        resumed.load(Path(folder))
        found = _drawn(resumed, 10)
    if found != expected:
        raise Broken(f"goes on with {found[:5]} after a resume, expected {expected[:5]}")


def _drawn(sampler: Sampler, number: int) -> list[tuple[int, int]]:
    return [sampler.next_example() for _ in range(number)]


BY_KIND: dict[str, tuple[Check, ...]] = {
    "filter": (filter_answers,),
    "loss": (losses.sums_over_the_mask, losses.is_a_sum),
    "sampler": (sampler_in_range, sampler_resumes),
}


def check_offer(kind: str, cls: type[Offer], config: PluginConfig) -> Report:
    """Run the checks of one kind. Whatever the class raises under one is a failure."""
    outcomes = tuple(_run(check, cls, config) for check in BY_KIND.get(kind, ()))
    nothing = Outcome(
        "conformance", "", "skipped", f"the kit has no checks of {kind}s: test it yourself"
    )
    return Report(kind, cls.name, outcomes or (nothing,))


def _run(check: Check, cls: type[Offer], config: PluginConfig) -> Outcome:
    name, promise = check.__name__, promise_of(check)
    try:
        check(cls, config)
    except NotApplicable as reason:
        return Outcome(name, promise, "skipped", str(reason))
    except Broken as error:
        return Outcome(name, promise, "failed", str(error), error)
    except Exception as error:
        return Outcome(name, promise, "failed", f"{type(error).__name__}: {error}", error)
    return Outcome(name, promise, "passed")
