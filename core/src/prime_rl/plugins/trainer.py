"""What a plugin brings to the trainer besides losses and heads: an optimizer, a tuning, a kernel,
observers. Entry-point group ``prime_rl.trainer``.

Shapes: N = targets of a row, D = hidden size, V = vocabulary, L = labels of a target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field, PositiveFloat

from prime_rl.errors import ConfigError
from prime_rl.plugins.base import Offer, PluginConfig
from prime_rl.plugins.observer import RunObserver

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from prime_rl.plugins.loss import LossOutputs


class OptimizerMaker(Offer):
    """Makes the policy's optimizer. ``trainer.optim.type`` selects it by name. Keep ``import
    torch`` inside the methods.

    The optimizer only steps. Core clips the gradient's norm before (``trainer.optim.max_norm``),
    omits the step where loss or gradient is not finite, and zeroes the gradient after."""

    def make(self, model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
        """The optimizer of the parameters that require a gradient, which may be shards
        (``DTensor``). Core sets the ``lr`` of its groups before each step. The decay is decoupled:
        a step subtracts ``lr * weight_decay * weights``."""
        raise NotImplementedError

    weighs_envs: ClassVar[bool] = False
    """It weighs the gradients of the envs (``env_weights``). Each row of a batch then has one env,
    and the trainer keeps one gradient per env during a step. False: neither costs anything."""

    def env_weights(self, step: int, envs: Sequence[str], products: np.ndarray) -> Sequence[float]:
        """The weight of each env's gradient in the sum that is clipped and stepped; 1.0 for all is
        the plain step.

        ``envs``: E of them, those in this optimizer step, in order of their names. ``products``:
        [E, E] float64, the inner products of their gradients over all weights and ranks. Every rank
        calls this with the same numbers: decide by them alone. Gradients that are not finite skip
        the step, without a call. By default: 1.0 for each.
        """
        return [1.0] * len(envs)

    def resumes(self, before: Mapping[str, Any]) -> bool:
        """Whether it can continue from a checkpoint whose table ``[trainer.optim]`` was
        ``before``."""
        return bool(before["type"] == self.name)


class AdamWConfig(PluginConfig):
    """AdamW's keys of ``[trainer.optim]``."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""


class AdamWMaker(OptimizerMaker):
    """``[trainer.optim] type = "adamw"``: core's own, made by ``trainer/optim.py``."""

    name = "adamw"
    config_class = AdamWConfig


class Tuning(Offer):
    """Chooses the weights of the policy that train, and publishes them as files: an adapter beside
    the model, or the model. The table ``[trainer.<name>]`` selects it; without one all weights
    train. Keep ``import torch`` inside the methods."""

    weights_file: ClassVar[str]
    """The safetensors file of a published version. ``model.safetensors`` is a whole model, which a
    resumed run loads as such; any other name an adapter."""

    def check(self, model_dir: Path) -> None:
        """Before any process starts: raises ``ConfigError`` if the settings do not fit the model,
        whose folder may not be there yet; or warns with ``ConfigWarning``."""

    def prepare(self, model: nn.Module, model_dir: Path, adapter: Path | None) -> None:
        """Freeze weights, and add an adapter, in place: a new one, or that of the folder
        ``adapter`` where a run resumes. ``model`` is a transformers model, not sharded yet. Raises
        ``ConfigError``."""
        raise NotImplementedError

    def initial(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """Within it the prepared ``model`` computes as before any training. None: the trainer has
        to keep a copy of the first weights, which the model's folder has under the same names."""

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors to publish, by name, as this rank holds them. Every rank calls this."""
        raise NotImplementedError

    def metadata(self) -> Mapping[str, str]:
        """Metadata for the header of ``weights_file``."""
        return {}

    def write_config(self, directory: Path) -> None:
        """Write the files of a published version besides its tensors. Rank 0 calls this."""

    def merge(self, model_dir: Path, adapter: Path, directory: Path) -> None:
        """Write the weights of the export into ``directory``: the model of ``model_dir`` with the
        published ``adapter``, in float32. Rank 0 calls this. Raises ``WeightsError``."""
        raise NotImplementedError


class Kernel(Offer):
    """Ways of a packed row through the model. Without one the trainer computes each sequence of a
    row by itself, with the attention and the LM head of transformers; a kernel gives the same
    numbers in less time or memory.

    ``trainer.attention`` selects it by name, and its settings are those of ``fused_lm_head``,
    ``share_prompts``, ``triton_kernels``, ``keep_attention`` and ``offload_activations`` that the
    run sets. Keep ``import torch`` inside the methods.
    """

    computes_tokens_of_others: ClassVar[bool] = False
    """It computes a mixture whose weights are ``DTensor`` in shards of whole experts: it sends each
    token to the ranks of its experts, and the results back (``trainer.expert_parallel``,
    by ``prime_rl.trainer.token_exchange``)."""

    block_logits: int | None = None
    """For a kernel that computes logits in blocks: how many at once. None: the best number for the
    device. Set where a device is only imitated."""

    def prepare(self, compiled: bool) -> None:
        """Once, before any row: register attention with transformers. ``compiled``: the decoder
        blocks are compiled, and must call attention outside of their graphs."""

    def prepare_blocks(
        self, model: nn.Module, recomputed: int, compiled: bool, device: torch.device
    ) -> None:
        """Recompute every n-th decoder block of a transformers model that will train on ``device``
        (0: none), and compile all, in place. Raises ``ConfigError``."""
        if recomputed or compiled:
            keys = "trainer.activation_checkpointing and trainer.compile"
            raise ConfigError(f"{keys} need a kernel that has them. pip install prime-rl-kernels")

    def packings(self, device: torch.device) -> Sequence[Any]:
        """The ways, the fastest first, as objects of core's class ``Packing``
        (``prime_rl/trainer/packing.py``), which the contract cannot import. The
        trainer takes the first one whose log π is that of transformers, or its own implementation
        if no kernel agrees."""
        return ()

    def logprobs(
        self,
        head: nn.Linear,
        hidden: Tensor,
        temperatures: Tensor | None,
        labels: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """log softmax(logits / temperature)[label], in the shape of ``labels`` [N] or [N, L], and
        the entropies [N], which have a gradient only with ``entropy_gradient``. Both are float32,
        or float64 if ``hidden`` [N, D] is. None: compute all logits [N, V] at once."""
        return None


class LossCall(Protocol):
    """One call of a loss function."""

    @property
    def outputs(self) -> LossOutputs:
        """What it returned."""

    @property
    def tokens(self) -> Any:
        """Where in the row the tokens lie that it saw: a ``slice``, or int64 indices [n]. Indexes
        any [T] column of the row."""

    @property
    def sequence(self) -> int | None:
        """The sequence it saw, or the first of several; None: the whole row."""


class RowView(Protocol):
    """One packed row on the device. Shapes: T = its tokens, S = its sequences, N = its targets."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """[S] tokens of each sequence."""

    @property
    def token_ids(self) -> Tensor:
        """[T] int64"""

    @property
    def sequence_ids(self) -> Tensor:
        """[T] int64: the sequence of each token."""

    @property
    def targets(self) -> Tensor:
        """[N] int64: the tokens that train, in any component."""

    @property
    def inference_logprobs(self) -> Tensor:
        """[T]"""

    @property
    def streams(self) -> Mapping[str, Tensor]:
        """[T] or [T, k]: every stream but the weights of components."""

    @property
    def origins(self) -> Any:
        """[T] int64 numpy array on the host: position of each token in the micro batch, whose
        sequences the row has sorted by length."""


class TrainerView(Protocol):
    """The trainer, as an observer sees it."""

    @property
    def model(self) -> Any:
        """The policy: a transformers ``PreTrainedModel``, whose parameters may be shards
        (``DTensor``)."""

    @property
    def config(self) -> Any:
        """The resolved table ``[trainer]``, frozen: keys are attributes. ``docs/config.md``."""

    @property
    def device(self) -> torch.device:
        """The device that computes the steps."""

    @property
    def dtype(self) -> str:
        """The dtype of the computation: ``float32`` or ``bfloat16``."""

    @property
    def max_steps(self) -> int:
        """Number of steps of the run."""


class TrainerObserver(RunObserver):
    """Watches the trainer and changes nothing. Keep ``import torch`` inside the methods.

    Every installed observer is active; ``[trainer.<name>]`` has its settings. All ranks make the
    same calls, in the same order, so that a method may use collectives. Log to a child of
    ``prime_rl.trainer``: then only rank 0 shows it. What the protocols above do not name of the
    trainer, a row or a call may change without notice.
    """

    def started(self, trainer: Any, run_dir: Path) -> None:
        """Before the first step. ``trainer``: see ``TrainerView``."""

    def waiting(self, step: int, seconds: float) -> None:
        """The batch of ``step`` is not there yet; called about once per second."""

    def row_trained(
        self,
        step: int,
        *,
        micro_batch: Any,
        row: Any,
        logprobs: Tensor,
        entropies: Tensor,
        calls: Sequence[Any],
    ) -> None:
        """A micro batch went forward and backward. ``micro_batch``: the row as the orchestrator
        packed it, with numpy columns [T] by name (core's ``wire/micro_batch.py``). ``row``: the
        same on the device, see ``RowView``. ``logprobs``, ``entropies``: [T], tokens of ``row``,
        without gradient. ``calls``: the calls of loss functions, see ``LossCall``. With
        ``trainer.epochs`` each epoch calls this again, with the same ``micro_batch`` object."""

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """All rows of the batch are done; its last optimizer step follows. Gradients are clipped
        already. Returns further metrics: rank 0's are recorded."""
        return {}

    def bad_step(self, step: int, micro_batches: Sequence[Any]) -> str:
        """An optimizer step is skipped, because its loss or gradient is not finite.
        ``micro_batches``: this rank's rows of that minibatch, to which heads may have added
        streams. Returns sentences for the log, the same on every rank."""
        return ""

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """The version is published, and the checkpoint saved if one is due. ``metrics`` are all of
        the step's; ``time/save_ckpt`` is of its own checkpoint."""
