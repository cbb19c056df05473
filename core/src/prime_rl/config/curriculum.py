"""The shares of training envs over the steps: ``weight`` and ``opens`` of an env."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Annotated, Any, Protocol, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveInt,
    Tag,
    model_validator,
)

from prime_rl.config.base import Settings

Points = tuple[tuple[int, float], ...]


def _rising(points: Points) -> Points:
    steps = [step for step, _ in points]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"expected [step, weight] points of rising steps, got the steps {steps}")
    if not any(weight for _, weight in points):
        raise ValueError("expected [step, weight] points, at least one with a weight above 0")
    return points


_FiniteWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Bound = Annotated[float, Field(allow_inf_nan=False)]

_Constant = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Points = Annotated[tuple[tuple[NonNegativeInt, _FiniteWeight], ...], AfterValidator(_rising)]


def _kind_of_weight(value: Any) -> str:
    """The tag for the form of a weight, so that an error speaks of one form only."""
    return "<points>" if isinstance(value, list | tuple) else "<number>"


Weight = Annotated[
    Annotated[_Constant, Tag("<number>")] | Annotated[_Points, Tag("<points>")],
    Discriminator(_kind_of_weight),
]
"""A number, or points ``[step, weight]``."""


class GateConfig(Settings):
    """``opens`` of a training env: it is not sampled before, and stays open from then on. Set
    ``from_step``, or ``metric`` and a bound."""

    metric: str | None = None
    """A metric that is logged with every batch, such as ``train/easy/all/reward/mean``, or of an
    evaluation, such as ``eval/held-out/all/reward/mean``: the env opens once the mean has reached
    the bound."""
    at_least: _Bound | None = None
    """The lower bound of the mean."""
    at_most: _Bound | None = None
    """The upper bound of the mean, in place of ``at_least``."""
    over: PositiveInt = 1
    """Batches of the mean, or evaluations: the last ones that reported the metric."""
    from_step: PositiveInt | None = None
    """The env opens for the batch of this step."""

    @model_validator(mode="after")
    def _opens_by_one_rule(self) -> Self:
        if (self.metric is None) == (self.from_step is None):
            raise ValueError("expected either metric or from_step: an env opens by one of them")
        bounds = 2 - [self.at_least, self.at_most].count(None)
        if self.metric is not None and bounds != 1:
            raise ValueError("expected one bound of the metric: at_least or at_most")
        if self.metric is None and (bounds or self.over != 1):
            raise ValueError("at_least, at_most and over are of a metric, and from_step has none")
        return self

    @property
    def reads_evaluation(self) -> bool:
        """Whether the metric is of an evaluation, and not of a batch."""
        return (self.metric or "").startswith("eval/")


class EvaluatedEnv(Protocol):
    """A table ``[[orchestrator.eval.env]]``."""

    @property
    def label(self) -> str: ...

    @property
    def interval(self) -> int | None: ...


class TrainingEnv(Protocol):
    """A table ``[[orchestrator.train.env]]``."""

    @property
    def label(self) -> str: ...

    @property
    def weight(self) -> float | Points | None: ...

    @property
    def opens(self) -> GateConfig | None: ...

    @property
    def measure_every(self) -> int | None: ...

    def weight_at(self, step: int) -> float: ...


def interpolate(points: Points, step: int) -> float:
    """The weight at a step: linear between two points, constant before and after them."""
    if step <= points[0][0]:
        return points[0][1]
    for (start, first), (end, last) in pairwise(points):
        if step < end:
            return first + (last - first) * ((step - start) / (end - start))
    return points[-1][1]


def env_of(metric: str, envs: Collection[str]) -> str | None:
    """The env whose name a metric has, such as ``easy`` for ``train/easy/all/reward/mean``."""
    family, _, rest = metric.partition("/")
    if family == "dispatcher":  # dispatcher/cancelled/ENV
        rest = rest.partition("/")[2]
    named = [env for env in envs if f"{rest}/".startswith(f"{env}/")]
    return max(named, key=len, default=None)


def check_gates(envs: Sequence[TrainingEnv]) -> None:
    """Raises ``ValueError`` unless each gate can open and each batch has an env to sample."""
    training = {env.label: env for env in envs if env.measure_every is None}
    gates = {
        label: env.opens.metric for label, env in training.items() if env.opens and env.opens.metric
    }
    for label, metric in gates.items():
        _check_metric(label, metric, training)

    waits_for = {
        label: env_of(metric, training)
        for label, metric in gates.items()
        if not metric.startswith("eval/")
    }

    for label in waits_for:
        # Each gate waits for at most one env, so following the chain finds every circle.
        chain = [label]
        before = waits_for.get(label)
        while before is not None:
            if before == label:
                raise ValueError(
                    f"env {label!r}: its gate never opens, since it reads a metric of "
                    + ("itself" if chain == [label] else " -> ".join([*chain[1:], label]))
                    + ". Read a metric of an env that is open before."
                )

            if before in chain:
                break  # a circle that others are in: its members raise

            chain.append(before)
            before = waits_for.get(before)

    _check_open(training, gates)


def _check_metric(label: str, metric: str, training: Collection[str]) -> None:
    where = f"env {label!r}: opens.metric = {metric!r}"
    if metric.startswith("validation/"):
        raise ValueError(
            f"{where}: gates read what is logged with a batch or by an evaluation, and a "
            "validation loss is neither. Read a metric such as train/ENV/all/reward/mean or "
            "eval/ENV/all/reward/mean."
        )

    names = sorted(training)
    if metric.startswith("train/") and env_of(metric, {*names, "agg"}) is None:
        raise ValueError(
            f"{where}: no training env has this name. Expected train/ENV/..., with ENV agg or one "
            f"of {', '.join(names)}."
        )


def check_evaluated(envs: Sequence[TrainingEnv], evaluated: Sequence[EvaluatedEnv]) -> None:
    """Raises ``ValueError`` unless each gate that reads an evaluation reads one that is repeated
    during training."""
    intervals = {env.label: env.interval for env in evaluated}
    for env in envs:
        if env.opens is None or env.opens.metric is None or not env.opens.reads_evaluation:
            continue

        where = f"env {env.label!r}: opens.metric = {env.opens.metric!r}"
        name = env_of(env.opens.metric, intervals)
        if name is None:
            known = ", ".join(sorted(intervals)) or "none"
            raise ValueError(
                f"{where}: no [[orchestrator.eval.env]] has this name. Expected eval/ENV/..., with "
                f"ENV one of: {known}."
            )
        if intervals[name] is None:
            raise ValueError(
                f"{where}: {name!r} is evaluated only before and after training, so the gate would "
                "never open. Give this eval env an interval."
            )


def _check_open(training: dict[str, TrainingEnv], gates: Collection[str]) -> None:
    """Weights are linear between these steps. So a batch in between has an env to sample, if the
    batches at these steps have one."""
    steps = {1}
    begins = {}
    for label, env in training.items():
        if label in gates:
            continue
        begins[label] = (env.opens and env.opens.from_step) or 1
        steps |= {begins[label], begins[label] - 1}
        if isinstance(env.weight, tuple):
            steps |= {step for step, _ in env.weight}

    for step in sorted(each for each in steps if each >= 1) if training else ():
        if any(step >= begins[label] and training[label].weight_at(step) for label in begins):
            continue
        raise ValueError(
            f"no env is sure to be sampled at step {step}: each has a gate that is or may be "
            "closed then, or the weight 0. Give one env without a metric gate a weight there."
        )
