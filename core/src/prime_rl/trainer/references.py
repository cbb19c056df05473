"""Earlier weights of the policy, for losses that compare with them.

    initial_logprobs   under w_k: w_0, the weights of ``model.name``; with ``reference_reset`` of
                       the last batch k that its interval divides
    ema_logprobs       under e_n = decay * e_(n-1) + (1 - decay) * w_n after batch n; e_0 = w_0

For a forward pass the kept weights change places with the policy's, one tensor at a time. So the
pass has the policy's shards, precision and attention, and one kept copy is all it costs. Only
weights that train are kept; of an adapter's first weights none are, because it can be switched off
(``Tuning.initial``). After a reset they are kept, and are a part of checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.trainer import parallel
from prime_rl.trainer.device import HOST
from prime_rl.trainer.expert_balance import is_router_bias
from prime_rl.trainer.model import load_model

REFERENCES = ("initial_logprobs", "ema_logprobs")
"""The computed columns."""


class References:
    """The kept weights by name, sharded like the policy's."""

    def __init__(
        self, model: PreTrainedModel, config: TrainerConfig, folder: Path | None, on_host: bool
    ) -> None:
        """``model``: the policy. ``folder``: the model with its first weights. ``on_host``: keep
        weights off the device."""
        self._model = model
        self._config = config
        self._folder = folder
        self._on_host = on_host
        self._initial: dict[str, Tensor] = {}
        self.average = {} if config.ema_decay is None else self._copies(self._trained())
        """Part of a checkpoint. Empty without ``trainer.ema_decay``."""
        self.version = 0
        """Version of the weights that ``initial_logprobs`` are of."""

    def _trained(self) -> dict[str, Tensor]:
        """What batches change, by name: the weights that train, and the biases of routers
        (``trainer.balance_bias``). A buffer that moves to another device is another tensor."""
        weights = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        biases = {n: b for n, b in self._model.named_buffers() if is_router_bias(n)}
        return weights | biases

    @property
    def replaced(self) -> dict[str, Tensor]:
        """The weights of the last reset. Part of a checkpoint. Empty without one."""
        return self._initial if self.version else {}

    @torch.no_grad()
    def reset(self, version: int) -> None:
        """From now on ``initial_logprobs`` are of the present weights, those of ``version``."""
        trained = self._trained()
        if not self._initial:
            self._initial = self._copies(trained)
        for name, kept in self._initial.items():
            _local(kept).copy_(_local(trained[name]))
        self.version = version

    @torch.no_grad()
    def batch_trained(self) -> None:
        """Move the average towards the weights."""
        trained = self._trained() if self.average else {}
        for name, kept in self.average.items():
            # Colocated, the average lies on the host, and the weights on the device.
            weights = _local(trained[name]).to(kept.device)
            # e + (1 - d)(w - e), which is d e + (1 - d) w.
            _local(kept).lerp_(weights, 1 - (self._config.ema_decay or 0.0))

    @contextmanager
    def within(self, column: str) -> Iterator[None]:
        """The policy has the weights of a column of ``REFERENCES``; its own, bit for bit, after it.
        No gathered weights or graph may exist before or after. Raises ``ConfigError`` for weights
        that the run does not have."""
        of_first = column == "initial_logprobs"
        tuning = getattr(self._model, "prime_rl_tuning", None)
        # Before a reset, switching the adapter off gives the first policy: no copy is needed.
        of_model = of_first and not self.version
        switched_off = tuning.initial(self._model) if of_model and tuning else None
        if switched_off:
            with switched_off:
                yield
            return

        if of_first and not self._initial:
            self._initial = self._load()
        kept = self._initial if of_first else self.average
        if not kept:
            raise ConfigError("a loss reads ema_logprobs, and trainer.ema_decay is not set")

        self._exchange(kept)
        try:
            yield
        finally:
            self._exchange(kept)

    @torch.no_grad()
    def _exchange(self, kept: dict[str, Tensor]) -> None:
        trained = self._trained()
        # Values move, not tensors: FSDP and checkpoints keep references to these tensors.
        for name, each in kept.items():
            weights = _local(trained[name])
            other = _local(each)
            current = weights.clone()
            weights.copy_(other)
            other.copy_(current)

    def _load(self) -> dict[str, Tensor]:
        """The first weights; every rank reads them and keeps its shards."""
        folder = self._folder
        loaded: dict[str, Tensor] = {}
        if folder is not None:
            model = load_model(folder, self._config, on_host=True)
            loaded = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        lacks = [name for name in self._trained() if name not in loaded]
        if lacks:
            raise ConfigError(
                f"a loss reads initial_logprobs, and {folder} lacks {len(lacks)} of the weights "
                f"that train, first {lacks[0]!r}. Their tuning must implement initial."
            )

        return self._copies(loaded)

    def _copies(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the trained weights, sharded as these are; ``values`` may be whole."""
        copies = {}
        for name, like in self._trained().items():
            copies[name] = torch.empty_like(like, device=HOST if self._on_host else like.device)
            parallel.fill(copies[name], values[name])
        return copies


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
