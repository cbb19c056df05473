"""The choices of routers: which experts of a mixture compute a token, recorded and replayed.

A router scores the experts of its layer and takes the top k. Trainer and engine round differently,
so at a near tie they take different experts, and log π jumps. With replay the trainer takes the
experts that the engine took, with weights of its own: the scores of these experts carry the
gradient, as those of its own choice would (R3: Ma et al. 2025, arXiv:2510.11370).

A mixture is a module with a child ``experts``. While one runs, ``torch.topk`` over the scores of
all its experts is its choice, in whatever module of it the call stands: families differ in what
they do before (groups, biases) and after (normalization), and share this call.

Shapes: U = tokens of a call, L = layers of the routes, k = experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from prime_rl.config.trainer import EXPERT_KEYS
from prime_rl.errors import ConfigError, StreamError
from prime_rl.streams import ROUTES, is_absent
from prime_rl.wire.micro_batch import MicroBatch


class Chooser(Protocol):
    """Sees the choice of each router, and may change it."""

    def choose(self, mixture: Mixture, own: Tensor) -> Tensor:
        """[U, k] the experts to take, given those that the router has taken, [U, k]."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """One mixture of a model."""

    number: int
    """Its place among the model's mixtures, which run in this order."""
    layer: int
    """Its place among all decoder layers."""
    name: str
    num_experts: int
    top_k: int


class Watcher(Protocol):
    """Sees the choices, and may change their gradient."""

    def watch(
        self,
        mixture: Mixture,
        scores: Tensor,
        chosen: Tensor,
        values: Tensor,
        num_owners: Tensor | None,
        again: bool,
    ) -> Tensor:
        """``values`` [U, k], the scores of the experts ``chosen`` [U, k] among ``scores`` [U, E].
        ``num_owners`` [U]: how often a token counts, 0 for padding; None: once. ``again``: of a
        block that is computed a second time."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a router shows its choices to."""

    watcher: Watcher
    num_owners: Tensor | None = None
    """[U]: how many sequences a token of the call is of; 0: it is padding. None: one each."""
    again: bool = False
    """The watcher has seen the call already."""


# Between caller and router runs transformers' code, which would not pass an argument on.
_chooser: ContextVar[Chooser | None] = ContextVar("chooser", default=None)
_watched: ContextVar[Watched | None] = ContextVar("watched", default=None)


@contextmanager
def choosing(chooser: Chooser | None) -> Iterator[None]:
    """Within it, ``chooser`` sees every choice; None: the routers are alone."""
    token = _chooser.set(chooser)
    try:
        yield
    finally:
        _chooser.reset(token)


@contextmanager
def watching(watched: Watched | None) -> Iterator[None]:
    """Routers show their choices within it. None: to no one."""
    token = _watched.set(watched)
    try:
        yield
    finally:
        _watched.reset(token)


def counted(num_owners: Tensor | None) -> AbstractContextManager[None]:
    """Within it, a watcher knows how often a token of a call counts: ``num_owners`` [U], 0 for
    padding. None: each once."""
    watched = _watched.get()
    return watching(replace(watched, num_owners=num_owners) if watched is not None else None)


def padded_routes(routes: Tensor) -> AbstractContextManager[None]:
    """Within it, a replay takes ``routes``, those of one call with its padding: [U, L, k], -1 at
    tokens that its own routers decide."""
    chooser = _chooser.get()
    return choosing(chooser.part(routes) if isinstance(chooser, Replay) else chooser)


def same_choices() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of a checkpointed block: it is computed again with the chooser and the watcher
    of its first pass, in whatever thread and however much later."""
    watched = _watched.get()
    again = replace(watched, again=True) if watched is not None else None
    return nullcontext(), _again(_chooser.get(), again)


@contextmanager
def _again(chooser: Chooser | None, watched: Watched | None) -> Iterator[None]:
    with choosing(chooser), watching(watched):
        yield


def observe_routers(model: Any) -> list[Mixture]:
    """Have the mixtures of a transformers model ask the chooser, in place; none of a dense model.
    A call of it without a chooser computes what it did before."""
    config = model.config.get_text_config()
    sizes = [getattr(config, key, None) for key in EXPERT_KEYS]
    num_experts = next((size for size in sizes if size), 0)
    top_k = getattr(config, "num_experts_per_tok", None) or 0

    mixtures: list[Mixture] = []
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "experts", None), nn.Module) or not top_k:
            continue

        # In a name such as `model.layers.3.mlp` the first number is that of the layer.
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        mixture = Mixture(
            number=len(mixtures),
            layer=numbers[0] if numbers else len(mixtures),
            name=name,
            num_experts=num_experts,
            top_k=top_k,
        )
        mixtures.append(mixture)
        vars(module).pop("forward", None)  # of an earlier call
        vars(module)["forward"] = partial(_forward, mixture, module.forward)

    return mixtures


def experts_of(model: nn.Module) -> dict[nn.Module, int]:
    """The modules whose weights have rows per expert, as transformers computes them at once, with
    the number of experts. Adapters of the experts are in the same module."""
    children = [getattr(module, "experts", None) for module in model.modules()]
    modules = [child for child in children if isinstance(child, nn.Module)]
    found: dict[nn.Module, int] = {}
    for module in modules:
        # An adapter wraps the module that transformers has made.
        for inner in module.modules():
            if getattr(inner, "has_gate", None) is not None and [*inner.parameters(recurse=False)]:
                found[module] = int(cast(Any, inner).num_experts)

    return found


def _forward(mixture: Mixture, forward: Any, *inputs: Any, **named: Any) -> Any:
    """A mixture's forward pass. Raises ``ConfigError`` if its router makes no choice that is known
    as one."""
    chooser = _chooser.get()
    watched = _watched.get()
    if chooser is None and watched is None:
        return forward(*inputs, **named)

    with _Choices(mixture, chooser, watched) as choices:
        output = forward(*inputs, **named)

    if not choices.num_seen:
        raise ConfigError(
            f"model: the router of {mixture.name} does not take {mixture.top_k} of "
            f"{mixture.num_experts} experts by torch.topk, so its choices cannot be recorded, "
            "replayed or balanced. Leave trainer.router_replay, expert_load, balance_loss and "
            "balance_bias out."
        )
    return output


class _Choices(TorchFunctionMode):
    """Shows a router's choice to the chooser and the watcher."""

    def __init__(self, mixture: Mixture, chooser: Chooser | None, watched: Watched | None) -> None:
        super().__init__()
        self.mixture = mixture
        self.chooser = chooser
        self.watched = watched
        self.num_seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result

        scores = args[0] if args else kwargs["input"]
        choice = result[1]
        # A router of groups also ranks within them, on scores of another shape.
        wanted = (len(scores), self.mixture.num_experts), (len(scores), self.mixture.top_k)
        if (tuple(scores.shape), tuple(choice.shape)) != wanted:
            return result

        self.num_seen += 1
        chosen = choice if self.chooser is None else self.chooser.choose(self.mixture, choice)
        values = result[0] if chosen is choice else scores.gather(1, chosen)
        watched = self.watched
        if watched is not None:
            values = watched.watcher.watch(
                self.mixture,
                scores,
                chosen=chosen,
                values=values,
                num_owners=watched.num_owners,
                again=watched.again,
            )

        # Nothing was changed: the call's own result has the right graph.
        if chosen is choice and values is result[0]:
            return result
        topk: Any = torch.return_types.topk
        return topk((values, chosen))


def check_routes(micro_batch: MicroBatch, num_experts: int) -> None:
    """Raises ``StreamError`` for an expert that the model does not have: on a GPU it would end the
    process without a reason."""
    routes = micro_batch.streams.get(ROUTES)
    if routes is None:
        return

    present = routes[~is_absent(routes)]
    if present.size and int(present.max()) >= num_experts:
        raise StreamError(
            f"micro batch (envs: {', '.join(micro_batch.envs)}): routed_experts has the expert "
            f"{int(present.max())}, expected 0 to {num_experts - 1}. The engine serves another "
            "model than the trainer trains."
        )


class Recorder:
    """Keeps the routers' choices of one call."""

    def __init__(self, mixtures: Sequence[Mixture]) -> None:
        self._chosen: list[Tensor | None] = [None] * len(mixtures)

    def choose(self, mixture: Mixture, own: Tensor) -> Tensor:
        self._chosen[mixture.number] = own
        return own

    @property
    def routes(self) -> Tensor:
        """[U, L, k] int64, one layer per mixture."""
        return torch.stack([cast(Tensor, chosen) for chosen in self._chosen], dim=1)


class Replay:
    """Takes the experts of the sampler where they are known.

    ``routes``: [U, L, k] int64, -1 at tokens without; L counts the mixtures, or all decoder layers.
    Raises ``StreamError`` if they do not fit the model.
    """

    def __init__(self, routes: Tensor, mixtures: Sequence[Mixture], num_layers: int) -> None:
        self.routes = routes
        self.parts = [self]
        self.flipped: dict[int, Tensor] = {}
        """By mixture: how many of the replayed experts its own router would not have taken. Equal
        in each pass, so a block that is computed again changes nothing."""

        self._mixtures = mixtures
        self._num_layers = num_layers

        top_k = mixtures[0].top_k
        _, found_layers, found_k = routes.shape
        if found_k != top_k or found_layers not in (len(mixtures), num_layers):
            raise StreamError(
                f"routed_experts: got {found_layers} layers of {found_k} experts per token, "
                f"expected {len(mixtures)} layers with a mixture, or all {num_layers}, of {top_k}. "
                "The engine serves another model than the trainer trains."
            )

        self._by_layer = found_layers != len(mixtures)
        self.present = routes[:, -1, :1] >= 0  # [U, 1]

    def part(self, routes: Tensor) -> Replay:
        """The replay of one of several calls for a row."""
        part = Replay(routes, self._mixtures, self._num_layers)
        self.parts.append(part)
        return part

    def choose(self, mixture: Mixture, own: Tensor) -> Tensor:
        chosen = self.routes[:, mixture.layer if self._by_layer else mixture.number]
        if len(chosen) != len(own):
            raise StreamError(
                f"{mixture.name} computes {len(own)} tokens, and there are routed_experts of "
                f"{len(chosen)}: the kernel lays the row out in a way that trainer.router_replay "
                "does not know. Set trainer.attention to another kernel."
            )

        is_own = (chosen[:, :, None] == own[:, None, :]).any(-1)
        self.flipped[mixture.number] = (~is_own & self.present).sum()
        return torch.where(self.present, chosen, own)

    @property
    def flips(self) -> tuple[Tensor, Tensor]:
        """How many choices are not the routers' own, and how many were replayed: over all calls and
        mixtures, 0-dim."""
        used = [part for part in self.parts if part.flipped]
        zero = self.routes.new_zeros(())
        flipped = sum((each for part in used for each in part.flipped.values()), zero)
        k = self.routes.shape[2]
        replayed = sum((part.present.sum() * len(part.flipped) * k for part in used), zero)
        return flipped, replayed
