"""Conformance checks by kind. Those of filters, heads and samplers are here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from prime_rl import (
    Filter,
    Head,
    HeadInputs,
    Monitor,
    Observer,
    PluginConfig,
    SampledEnv,
    Sampler,
)
from prime_rl.plugins.base import Offer
from prime_rl.registry.guards import is_number
from prime_rl.registry.manager import Hooks, scope
from prime_rl.registry.members import missing, misspelt_attribute
from prime_rl.registry.offers import KINDS
from prime_rl.testing import conformance_group, logged_metrics
from prime_rl.testing.conformance import Outcome, Report
from prime_rl_devkit import losses, services
from prime_rl_devkit.algorithms.subject import MIXED
from prime_rl_devkit.hooks import check_filtering
from prime_rl_devkit.losses import need_torch
from prime_rl_devkit.verdicts import Broken, NotApplicable, run

Check = Callable[[type[Any], PluginConfig], None]


def builds(kind: str, cls: type[Any], config: PluginConfig) -> None:
    """Core can build it, and finds its settings: ``__init__`` calls ``super().__init__``."""
    with TemporaryDirectory() as folder:
        more: dict[str, tuple[Any, ...]] = {
            "monitor": (Path(folder),),
            "sampler": (ENVS, 0),
            "view": (Path(folder), 3),
            "observer": (object(),),
        }
        try:
            built = cls(config, *more.get(kind, ()))
        except TypeError as error:
            signature = inspect.signature(cls.__init__)
            raise Broken(
                f"{error}. Core passes what {kind} classes of prime_rl take; its __init__ takes "
                f"{signature}."
            ) from error

        if getattr(built, "config", None) is not config:
            raise Broken("self.config is not its settings. Call super().__init__ in __init__.")
        if isinstance(built, Monitor):
            built.close()
        problem = missing(cls, BASES[kind]) or misspelt_attribute(built, BASES[kind])
        if problem:
            raise Broken(problem)
        if isinstance(built, Observer):
            _check_observed(built)


def _check_observed(observer: Observer) -> None:
    """What it measured before anything happened is numbers."""
    try:
        metrics = observer.take_metrics()
    except Exception:  # it reads its host, which a run gives
        return
    check_numbers("take_metrics", metrics)


def check_numbers(method: str, metrics: Mapping[Any, Any]) -> None:
    """Raise ``Broken`` for a metric that is no number by its name."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_number(value):
            raise Broken(f"{method} gave {name!r}: {value!r}, expected a number by its name")


BASES = {kind.name: kind.base for kind in KINDS}


def filter_answers(cls: type[Filter], config: PluginConfig) -> None:
    """It gives a reason or None, and the same one when asked again."""
    check_filtering(scope("slot", Hooks(), [cls(config)]))


def head_gives_an_output_each(cls: type[Head], config: PluginConfig) -> None:
    """``build`` gives a module from hidden states [N, D] to outputs [N], with weights to train."""
    need_torch()
    import torch

    if cls.gives_logprobs:
        return  # its module is a copy of the policy
    module = cls(config).build(8)
    outputs = module(torch.randn(5, 8))
    shape = getattr(outputs, "shape", type(outputs).__name__)
    is_tensor = isinstance(outputs, torch.Tensor) and outputs.shape[:1] == (5,)
    if not is_tensor or outputs.dim() != 1 + cls.gives_vectors:
        expected = "(5, k)" if cls.gives_vectors else "(5,)"
        raise Broken(
            f"5 hidden states of size 8 gave {shape}, expected a tensor of shape {expected}"
        )

    if not outputs.requires_grad:
        raise Broken("the output has no gradient: nothing could train the module")


def head_prepares_what_it_writes(cls: type[Head], config: PluginConfig) -> None:
    """``prepare`` gives each stream of ``writes``: one finite value per token."""
    mask = np.array([False, True, True, False, True])
    head = cls(config)
    width: tuple[int, ...] = ()
    if cls.gives_vectors:
        import torch

        width = (head.build(8)(torch.zeros(1, 8)).shape[1],)
    outputs = np.full((5, *width), 0.5, np.float32)
    outputs[~mask] = 0.0
    names = [read if isinstance(read, str) else read[0] for read in cls.reads]
    inputs = HeadInputs(
        outputs=outputs,
        loss_mask=mask,
        streams={name: np.full(5, 0.25, np.float32) for name in names},
        lengths=(3, 2),
        ends=np.full((2, *width), 0.5, np.float32) if cls.reads_ends else None,
    )
    written = head.prepare(inputs)
    if set(written) != set(cls.writes):
        raise Broken(f"writes is {cls.writes}, and prepare gave {tuple(written)}")
    for name, column in written.items():
        if np.shape(column)[:1] != (5,) or not np.isfinite(column).all():
            raise Broken(f"{name}: got {column!r} for 5 tokens, expected 5 finite values")


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
    """It continues from what it saved."""
    if cls.save is Sampler.save:
        raise NotApplicable("saves nothing: a resumed run starts its order anew")
    sampler = cls(config, ENVS, 0)
    _drawn(sampler, 5)
    with TemporaryDirectory() as folder:
        sampler.save(Path(folder))
        expected = _drawn(sampler, 10)
        resumed = cls(config, ENVS, 0)
        resumed.load(Path(folder))
        drawn = _drawn(resumed, 10)

    if drawn != expected:
        raise Broken(f"goes on with {drawn[:5]} after a resume, expected {expected[:5]}")


def _drawn(sampler: Sampler, number: int) -> list[tuple[int, int]]:
    return [sampler.next_example() for _ in range(number)]


def sampler_takes_groups(cls: type[Sampler], config: PluginConfig) -> None:
    """It takes scored groups: ``reject`` gives a reason or None, ``metrics`` numbers by name."""
    sampler = cls(config, ENVS, 0)
    for env in ENVS:
        _drawn(sampler, 1)
        group = conformance_group(MIXED)
        for rollout in group:
            rollout.env = env.name
            rollout.assign_advantages(rollout.reward)
            rollout.freeze()
        sampler.observe(group)
        if not isinstance(reason := sampler.reject(group), str | None):
            raise Broken(f"reject gave {reason!r}, expected why no member may train, or None")

    check_numbers("metrics", sampler.metrics())


BY_KIND: dict[str, tuple[Check, ...]] = {
    "filter": (filter_answers,),
    "loss": losses.CHECKS,
    "head": (head_gives_an_output_each, head_prepares_what_it_writes),
    "sampler": (sampler_in_range, sampler_resumes, sampler_takes_groups),
    "source": services.SOURCE,
    "monitor": services.MONITOR,
    "launcher": services.LAUNCHER,
    "renderer": services.RENDERER,
    "model": services.MODEL,
}
"""By kind. Engines have a suite of their own (``prime_rl_devkit.engines``)."""

CONNECTS = frozenset({"monitor", "launcher", "model", "source"})
"""Kinds that may use the network or a minute: checked if the user names them."""

NEEDS = {
    "observer": "the loop of a run",
    "trainer_observer": "a trainer",
    "tuning": "a transformers model",
    "view": "the files of a run",
    "weight_transport": "a trainer and an engine",
}
"""What the other kinds need and the kit does not have."""


def check_offer(kind: str, cls: type[Offer], config: PluginConfig) -> Report:
    """Run the checks of one kind. Whatever the class raises in one is a failure."""
    with logged_metrics(cls.name):
        outcomes = tuple(run(check, cls, config) for check in BY_KIND.get(kind, ()))
    said = f"{kind}s need {NEEDS.get(kind, 'a run')}, which the kit lacks: test it in a short run"
    return Report(
        kind, cls.name, outcomes or (Outcome("conformance", "", status="skipped", message=said),)
    )
