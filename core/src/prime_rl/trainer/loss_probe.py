"""Is a loss what it declares? Six tokens tell: a sum, and terms that depend on their own token.

The trainer asks before a loss trains its first token, and ``prime-rl plugins check`` asks too. A
loss that is a mean, or that looks at its neighbors, trains without an error: the trainer divides it
by a count of tokens, and calls a loss of scope ``token`` for a whole row, whose tokens belong to
several rollouts and envs.

Shapes: T = 6 tokens for each copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from prime_rl.errors import PluginError
from prime_rl.plugins.loss import Loss, LossInputs
from prime_rl.registry.calls import logged_metrics, running
from prime_rl.registry.components import Component
from prime_rl.streams import STREAMS, TOP_IDS

logger = logging.getLogger("prime_rl.trainer.loss_probe")

WITH_GRADIENT = ("trainer_logprobs", "entropies", "top_logprobs")
"""The columns of a loss that carry one."""

ALLOWED = 1e-6
"""What rounding may change of a gradient."""

FACTORS = (0.96, 1.05)
"""What a column of a token is multiplied by: a largest value shows only if it grows."""

MOST_UNKNOWN = 3
"""Streams of unknown shape of which every combination is tried."""

LossFunction = Callable[[LossInputs], Any]


def check_declared(component: Component) -> None:
    """Raise ``PluginError`` for a loss that is no sum, or sees more than its scope. Once for each
    component. A loss that cannot be called with six tokens is not judged."""
    # A plan steps with tensors without values. It must not count as the one judgement.
    if _tensors_have_values():
        _judge(component)


def _tensors_have_values() -> bool:
    try:
        return torch.full((), 2.0).item() == 2.0
    except Exception as error:
        logger.debug("tensors have no values here: %s", error)
        return False


@cache
def _judge(component: Component) -> None:
    loss = component.loss
    with (
        running(loss.name, hook=f"loss {loss.name!r}", owner=loss),
        logged_metrics(loss.name),
        # Random numbers of the probe must not shift those of the run.
        torch.random.fork_rng(devices=[]),
    ):
        if component.cls.__call__ is Loss.__call__:
            raise PluginError(
                f"{component.cls.__qualname__} has no __call__. Implement it: def __call__(self, "
                "inputs) -> LossOutputs."
            )
        try:
            copy = deepcopy(loss)  # it may keep state
            problem = mean_of(component.cls, copy) or leak_of(component.cls, copy)
        except Exception as error:
            logger.debug("loss %r is not judged: %s", loss.name, error)
            return
        if problem:
            raise PluginError(problem)


def mean_of(cls: type[Loss], loss: LossFunction) -> str:
    """Why the loss is no sum over tokens, or empty. With a scope beyond ``token``, only that twice
    the tokens give another loss."""
    if cls.normalize_by != "tokens":
        return ""
    return _in_every_shape(cls, lambda vectors: _mean_of(cls, loss, vectors))


def _mean_of(cls: type[Loss], loss: LossFunction, vectors: frozenset[str]) -> str:
    def value(copies: int) -> float:
        return float(loss(probe_inputs(cls, copies, vectors)).loss.detach())

    once = value(copies=1)
    twice = value(copies=2)
    if Component(cls.name, cls).scope != "token":
        # A loss of 0 may be a sum or a mean.
        if abs(once) > 1e-6 and abs(twice - once) < 1e-4 * abs(once):
            return (
                f"6 tokens give {once:.6g}, and so do the same ones twice: it is a mean. Return "
                "the sum; the trainer divides by the global count of member tokens. For a term per "
                'sequence declare normalize_by = "sequences".'
            )
    elif abs(twice - 2 * once) > 1e-4 * max(1.0, abs(once)):
        return (
            f"one copy gives {once:.6g}, two give {twice:.6g}, expected {2 * once:.6g}: it is no "
            "sum. Return the sum; the trainer divides by the global count of member tokens."
        )
    return ""


def leak_of(cls: type[Loss], loss: LossFunction) -> str:
    """How a term of a loss of scope ``token`` depends on other tokens. Empty: it does not."""
    if Component(cls.name, cls).scope != "token":
        return ""
    return _in_every_shape(cls, lambda vectors: _leak_of(cls, loss, vectors))


def _leak_of(cls: type[Loss], loss: LossFunction, vectors: frozenset[str]) -> str:
    before = probe_inputs(cls, vectors=vectors)
    expected = _gradients(loss, before)
    columns = _float_columns(before)

    for place in range(len(before.loss_mask)):
        for factor in FACTORS:
            # All columns together first, for speed. Single columns then name the one that leaks.
            moved = _moved(before, columns, place=place, factor=factor)
            if not _differs(expected, _gradients(loss, moved), place):
                continue

            for name in columns:
                moved = _moved(before, [name], place=place, factor=factor)
                change = _differs(expected, _gradients(loss, moved), place)
                if change:
                    shown = "log π" if name == "trainer_logprobs" else name
                    return (
                        f"{shown} of token {place} changed the gradient of other tokens by "
                        f'{change:.3g}. One call of a loss with the scope "token" sees the tokens '
                        "of several rollouts and envs. Declare the scope that one call has to see "
                        "whole: 'sequence', 'rollout' or 'group'."
                    )
    return ""


def _in_every_shape(cls: type[Loss], judge: Callable[[frozenset[str]], str]) -> str:
    """What ``judge`` says, if it says so whichever streams have several numbers for each token:
    which they are, nothing declares. Raises the first error if it can be asked in no shape."""
    first_problem = ""
    first_error: Exception | None = None

    for vectors in shapes_of(cls):
        try:
            problem = judge(vectors)
        except Exception as error:
            first_error = first_error or error
            continue
        if not problem:
            return ""
        first_problem = first_problem or problem

    if not first_problem and first_error is not None:
        raise first_error
    return first_problem


def shapes_of(cls: type[Loss]) -> list[frozenset[str]]:
    """Sets of streams that may have several numbers for each token, the likeliest first."""
    component = Component(cls.name, cls)
    unknown = [n for n in component.streams if n not in STREAMS and not n.startswith("top_")]
    if len(unknown) > MOST_UNKNOWN:
        return [frozenset(), frozenset(unknown)]
    sizes = range(len(unknown) + 1)
    return [frozenset(names) for size in sizes for names in combinations(unknown, size)]


def fitting_shape(cls: type[Loss], loss: LossFunction) -> frozenset[str]:
    """The first of ``shapes_of`` in which the loss can be called and is what it declares, else in
    which it can be called."""
    callable_in = []
    for vectors in shapes_of(cls):
        try:
            is_sound = not (_mean_of(cls, loss, vectors) or _leak_of(cls, loss, vectors))
        except Exception:  # it reads the stream in another shape
            continue
        callable_in.append(vectors)
        if is_sound:
            return vectors
    return callable_in[0] if callable_in else frozenset()


def _float_columns(inputs: LossInputs) -> list[str]:
    names = [each.name for each in fields(inputs) if each.name != "streams"]
    columns = {name: getattr(inputs, name) for name in names} | {**inputs.streams}
    return [name for name, column in columns.items() if _is_float(column)]


def _is_float(column: Tensor | None) -> bool:
    return isinstance(column, Tensor) and column.is_floating_point()


def _moved(inputs: LossInputs, names: list[str], place: int, factor: float) -> LossInputs:
    """The inputs with other values of one token in some columns."""

    def moved(column: Tensor) -> Tensor:
        other = column.detach().clone()
        other[place] = other[place] * factor
        return other.requires_grad_(column.requires_grad)

    columns = {name: moved(getattr(inputs, name)) for name in names if hasattr(inputs, name)}
    streams = dict(inputs.streams)
    for name in streams.keys() & {*names}:
        column = streams[name]
        if column is not None:
            streams[name] = moved(column)
    return replace(inputs, **columns, streams=streams)


def _gradients(loss: LossFunction, inputs: LossInputs) -> list[Tensor]:
    columns = [getattr(inputs, name) for name in WITH_GRADIENT]
    leaves = [column for column in columns if column is not None]

    value = loss(inputs).loss
    # The graph is kept for the second call below.
    gradients = torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)
    # It trains a head, whose output is a stream.
    if all(gradient is None for gradient in gradients):
        streams = inputs.streams.values()
        leaves = [each for each in streams if each is not None and each.requires_grad]
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)

    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]


def _differs(expected: list[Tensor], gradients: list[Tensor], place: int) -> float:
    """The largest change of a gradient at another token than ``place``; 0.0 for rounding."""
    largest = 0.0
    for one, two in zip(expected, gradients, strict=True):
        change = (one - two).abs()
        change[place] = 0.0
        largest = max(largest, float(change.max()))
    return largest if largest > ALLOWED else 0.0


def probe_inputs(
    cls: type[Loss], copies: int = 1, vectors: frozenset[str] = frozenset()
) -> LossInputs:
    """Six tokens, the last off the mask; on the policy, above and below it. Streams that the loss
    reads are 0.5; those that begin with ``top_`` have log(1/4) and log(1/8) for each token, and
    ``vectors`` three numbers."""
    known_columns: dict[str, Tensor] = {
        "trainer_logprobs": torch.tensor([0.9, 0.1, 0.5, 0.5, 0.3, 0.05]).log(),
        "inference_logprobs": torch.tensor([0.6, 0.4, 0.5, 0.2, 0.55, 0.06]).log(),
        "ref_logprobs": torch.tensor([0.8, 0.2, 0.7, 0.4, 0.3, 0.9]).log(),
        "advantages": torch.tensor([1.0, -0.75, 0.5, -0.5, 0.25, 2.0]),
        "loss_mask": torch.tensor([True, True, True, True, True, False]),
        "loss_weights": torch.tensor([1.0, 1.0, 0.5, 0.5, 2.0, 1.0]),
    }
    component = Component(cls.name, cls)
    if "advantages" not in component.streams:
        known_columns["advantages"] = torch.full((6,), torch.nan)
    known_columns |= {name: torch.full((6,), 0.5) for name in component.computed}
    known_columns |= {
        name: known_columns[name].long() for name in component.computed if name.endswith("_ids")
    }

    if "top_logprobs" in known_columns:
        known_columns["top_logprobs"] = torch.tensor([[0.5, 0.25]] * 6).log()
    read = {
        name: torch.tensor([[0.25, 0.125]] * 6).log()
        if name.startswith("top_")
        else known_columns.get(name, torch.full((6,), 0.5))
        for name in component.streams
    }
    read |= {name: torch.tensor([[0.5, 0.3, 0.2]] * 6) for name in vectors}
    if TOP_IDS in read:
        read[TOP_IDS] = torch.arange(12, dtype=torch.int32).view(6, 2)

    known = {name: torch.cat([column] * copies) for name, column in known_columns.items()}
    streams = {name: torch.cat([column] * copies) for name, column in read.items()}

    for name in known.keys() & set(WITH_GRADIENT):
        known[name].requires_grad_()
    for column in streams.values():
        if column.is_floating_point() and not column.requires_grad:
            column.requires_grad_()  # it may be the output of a head

    inputs = LossInputs(**known, streams=streams)
    return inputs if "ref_logprobs" in streams else replace(inputs, ref_logprobs=None)
