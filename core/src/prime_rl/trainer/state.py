"""What a trainer holds: the policy, its heads, their optimizers, and the earlier weights that
losses read. ``update.py`` changes it, ``checkpoint.py`` saves and restores it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import StreamError
from prime_rl.plugins.loss import Head, Loss
from prime_rl.plugins.trainer import Kernel, OptimizerMaker, TrainerObserver
from prime_rl.registry.components import Components
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import make_optimizer
from prime_rl.trainer import parallel
from prime_rl.trainer.device import HOST, Offload, choose_device, compute_dtype
from prime_rl.trainer.heads import make_optimizers
from prime_rl.trainer.model import make_policy
from prime_rl.trainer.optim import build_optimizer, make_schedule
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl.trainer.rank import Rank
from prime_rl.trainer.references import References
from prime_rl.trainer.routes import Replay, check_routes
from prime_rl.trainer.self_check import find_compiled_fault, find_packing
from prime_rl.wire.micro_batch import MicroBatch

logger = logging.getLogger(__name__)


@dataclass
class TrainerState:
    """The policy and everything that updates it; ``Trainer`` takes the steps."""

    model: PreTrainedModel
    losses: Components
    config: TrainerConfig
    max_steps: int
    observers: Sequence[TrainerObserver] = ()
    colocated: bool = False
    """It holds the device only while it takes a step (``Offload``)."""
    initial: Path | None = None
    """The folder with the policy's first weights, for losses that read ``initial_logprobs``."""
    kernel: Kernel | None = None
    """None: core's own way of rows through the model."""
    maker: OptimizerMaker | None = None
    """Makes the optimizer. None: ``config.optim`` must select core's own."""
    publishes_average: bool = False
    """An engine serves the moving average of the weights."""
    publishes_reference: bool = False
    """An engine serves the weights of ``initial_logprobs``."""

    def __post_init__(self) -> None:
        self.device = self.model.device
        # The model may be on the host or still in its files, so its device is not the trainer's.
        if parallel.several_ranks() or self.colocated or self.device.type == "meta":
            self.device = choose_device(self.config.device, Rank.of_process())
        home = HOST if self.colocated else self.device
        heads = [self.losses.heads[name] for name in self.config.heads]
        self.policy = make_policy(
            self.model, self.device, config=self.config, heads=heads, kernel=self.kernel, home=home
        )

        self.dtype = compute_dtype(self.config.dtype, self.device)
        self.half = self.dtype == "bfloat16"
        self.num_bad_steps = 0
        """In a row."""

        self.replay: Replay | None = None
        """The replay of the last forward pass. None: the routers decided by themselves."""

        optim = self.config.optim
        maker = self.maker or make_optimizer(optim, Hooks())
        self.weighing = maker if maker.weighs_envs else None
        """The maker, if it weighs the gradients of the envs."""

        # After `make_policy`: sharding has put other parameters in the place of the model's.
        self.optimizer = build_optimizer(
            maker, self.model, lr=optim.lr, weight_decay=optim.weight_decay
        )

        self.heads = make_optimizers(self.policy.heads, optim, maker)
        """Each head's module and optimizer."""
        self.optimizers = [self.optimizer, *(optimizer for _, optimizer in self.heads.values())]

        scheduler = self.config.scheduler.fitted(self.max_steps)
        self.learning_rate = make_schedule(scheduler, optim.lr, self.max_steps)

        self.references = References(
            self.model, self.config, folder=self.initial, on_host=self.colocated
        )
        self.memory = Offload(
            self.policy, self.optimizers, device=self.device, enabled=self.colocated
        )
        self.checked = False
        if not self.colocated:  # otherwise it does not hold the device yet
            self.self_check()

    def self_check(self) -> None:
        """Once: choose how rows go through this model. Raises ``ConfigError`` if the trainer cannot
        train it."""
        if not self.checked:
            # Blocks are compiled for the rows of the run, not for those of the check.
            plain = torch.compiler.set_stance("force_eager") if self.policy.compiled else None
            with plain or nullcontext():
                packings = self.policy.packings(self.device)
                find_packing(self.policy, packings, self.device, half=self.half)
            if self.policy.compiled and self.config.compile == "auto":
                self._check_compiled()
            self.checked = True

    def stateful(self) -> dict[str, Loss | Head]:
        """The losses and heads of the run, whose state a checkpoint keeps, by component or head. A
        loss is one of them as soon as a batch has read it, on every rank."""
        owners: dict[str, Loss | Head] = {}
        for name, component in self.losses.made.items():
            # The key has the loss's name: after a resume another loss may be `rl`.
            key = f"rl.{component.cls.name}" if name == "rl" else name
            owners[key] = component.loss
        for name, head in self.losses.heads.items():
            owners[f"heads.{name}"] = head
        return owners

    def _check_compiled(self) -> None:
        """Compute blocks as they are if the compiler changes or refuses them."""
        fault = find_compiled_fault(self.policy, self.device, half=self.half)
        if fault:
            logger.warning(
                "trainer.compile = 'auto': blocks are not compiled, which is slower: %s", fault
            )
            self.policy.prepare_blocks(self.config, self.device, compiled=False)
        else:
            logger.info("decoder blocks are compiled (trainer.compile)")

    def row(self, micro_batch: MicroBatch) -> PackedRow:
        """The micro batch on the device. Raises ``StreamError`` for tokens that the model does not
        have: on a GPU they would end the process without a reason."""
        ids = micro_batch.token_ids
        size = self.model.config.vocab_size
        wrong = ids[(ids < 0) | (ids >= size)]
        if len(wrong):
            raise StreamError(
                f"micro batch (envs: {', '.join(micro_batch.envs)}): token {wrong[0]}, expected 0 "
                f"to {size - 1}, the policy's vocabulary. Use the policy's tokenizer."
            )

        read = [head for name, head in self.losses.heads.items() if name in self.policy.read]
        with_ends = any(head.reads_ends for head in read)

        if self.policy.mixtures:
            check_routes(micro_batch, self.policy.mixtures[0].num_experts)

        return make_row(
            micro_batch,
            self.device,
            self.policy.packing,
            with_ends=with_ends,
            with_routes=self.config.router_replay,
        )

    def forward(
        self, micro_batch: MicroBatch, with_replay: bool = True
    ) -> tuple[PackedRow, Tensor, Tensor, dict[str, Tensor]]:
        """The row, and [T] of its tokens: logprobs and entropies in ``trainer.dtype``; and what
        losses of the batch read besides: the outputs of heads, and ``top_logprobs`` [T, k].
        ``with_replay``: by the experts of the sampler where the row has them
        (``trainer.router_replay``); ``self.replay`` then tells of the pass."""
        row = self.row(micro_batch)
        self.replay = self.policy.replay(row) if with_replay else None
        # Autocast's cache would keep a rounded copy of every weight until the forward pass ends,
        # other ranks' shards included.
        with torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False
        ):
            logprobs, entropies, computed = self.policy(row, self.replay)

        if logprobs.dim() == 2:
            computed["top_logprobs"] = logprobs[:, 1:]
            logprobs = logprobs[:, 0]

        return row, logprobs, entropies, computed
