"""The trainer's part of a checkpoint: written in the background while the next step trains.

The optimizer's state is copied at once, which takes as long as copying twice the weights; a thread
writes it. The weights have just been published: the checkpoint links those files (an adapter's
where a tuning trains one). The learning rate is a function of the step and needs no state.

Each rank writes its shards, and reads its own from a checkpoint of any number of ranks. Rank 0
writes the rest: folders, the weights, the mark of a complete checkpoint.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
import warnings
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from prime_rl.config.run import CkptConfig
from prime_rl.errors import ConfigError, WeightsError
from prime_rl.registry.calls import running
from prime_rl.rundir.checkpoints import (
    PROGRESS,
    Checkpoint,
    complete,
    flush,
    link_or_copy,
    retain,
    unfinished,
)
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.status import Status, names_in
from prime_rl.trainer import parallel
from prime_rl.trainer.expert_balance import is_router_bias
from prime_rl.trainer.publish import copy_model_files
from prime_rl.trainer.published import retry
from prime_rl.trainer.state import TrainerState
from prime_rl.trainer.tensor_file import write_stream
from prime_rl.weights.versions import MEETING, MEMORY, POLL_SECONDS, STABLE

logger = logging.getLogger(__name__)

PUBLISHED = ".published"
"""The folder of an unfinished checkpoint that keeps the weights until they are laid out."""
RESCUE_SECONDS = 1800.0
"""How long a trainer that fails waits for a checkpoint that is being written: a large one on a slow
disk is worth it, and the thread that writes it ends by itself if the disk refuses."""

FAILED = (Exception, CheckpointException)
"""What torch.distributed.checkpoint raises: the second is not an ``Exception``."""


class Checkpointer:
    """Completes the checkpoints of a run."""

    def __init__(
        self, run_dir: Path, config: CkptConfig, model_path: Path, resumed: int | None
    ) -> None:
        """``resumed``: the step of the checkpoint that this process has resumed; it is kept."""
        self._run_dir = run_dir
        self._config = config
        self._model_path = model_path
        self._in_use = () if resumed is None else (resumed,)
        # The thread's own group: the main thread's collectives run at the same time.
        self._group = parallel.host_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint follows ``step``; the orchestrator has begun one that time asks."""
        if not self._config.enabled or self._config.interval or step == last_step:
            return self._config.is_due(step, last_step)
        # Rank 0 decides for all: the file may appear between the looks of two ranks.
        is_begun = parallel.rank() == 0 and self._has_orchestrators_part(step)
        return bool(parallel.gather(is_begun)[0])

    def _has_orchestrators_part(self, step: int) -> bool:
        """Waits while the disk refuses to say: a checkpoint that the orchestrator has begun and
        that is left out here would never be complete."""
        folder = unfinished(self._run_dir, step).orchestrator
        while True:
            try:
                names = names_in(folder)
            except OSError as error:
                poll_failed(folder, error)
                time.sleep(POLL_SECONDS)
                continue
            poll_succeeded(folder)
            return PROGRESS in names

    def save(self, trainer: TrainerState, step: int, published: Path, status: Status) -> None:
        """After step ``step``: copy the state and write it in the background.

        ``published`` is the folder with the weights of the step. Waits for the checkpoint before.
        """
        self.wait(status)
        keep = partial(self._keep, trainer, step, published=published)
        try:
            # The trainer's part alone could never become a complete checkpoint.
            parallel.on_main(partial(self._check_orchestrators_part, step))
            retry(partial(parallel.on_main, keep), f"begin the checkpoint of step {step}", status)
        except (OSError, WeightsError) as error:
            self._give_up(step, error)
            return

        self._pending = self._thread.submit(
            self._write,
            step,
            state=snapshot(trainer, step),
            config=trainer.model.config,
            reference=trainer.references.version,
        )

    def _check_orchestrators_part(self, step: int) -> None:
        if not self._has_orchestrators_part(step):
            folder = unfinished(self._run_dir, step).orchestrator
            raise FileNotFoundError(
                f"the orchestrator's part is not in {folder} (its log says why)"
            )

    def _keep(self, trainer: TrainerState, step: int, published: Path) -> None:
        """Link the weights before their broadcast is deleted, and write what losses and heads keep
        before the next batch changes it. Raises ``OSError``."""
        target = unfinished(self._run_dir, step)
        save_states(trainer, target.states)

        kept = target.directory / PUBLISHED
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()

        for file in published.iterdir():
            # These markers describe the broadcast, not the checkpoint.
            if file.name not in (STABLE, MEMORY, MEETING):
                link_or_copy(file, kept / file.name)

    def wait(self, status: Status) -> None:
        """Until the checkpoint that is being written is complete, or given up."""
        if self._pending is not None:
            if not self._pending.done():
                status.report("waiting", waiting_for="disk (a checkpoint)")
            self._pending.result()
            self._pending = None

    def rescue(self, error: Exception) -> None:
        """Before the trainer ends because of ``error``: let the checkpoint that is being written
        become complete. Its collectives do not need the main threads, where the error is."""
        if self._pending is not None and not self._pending.done():
            logger.error(
                "the trainer fails, and waits up to %.0f s for the checkpoint that is being "
                "written: %s",
                RESCUE_SECONDS,
                error,
            )
            wait([self._pending], RESCUE_SECONDS)

    def _write(self, step: int, state: dict[str, Any], config: Any, reference: int) -> None:
        """``reference``: version of the weights that became it; 0: the first ones."""
        try:
            attempt = partial(self._attempt, step, state, config=config, reference=reference)
            retry(attempt, f"write the checkpoint of step {step}")
        except Exception as error:  # the run goes on; the checkpoint before is as it was
            self._give_up(step, error)
            return

        try:
            # Old checkpoints go only now: a crash before the new one is complete must leave them.
            if parallel.rank() == 0:
                retain(self._run_dir, self._config, self._in_use)
        except OSError as error:
            logger.error("cannot delete old checkpoints: %s", error)

    def _give_up(self, step: int, error: Exception) -> None:
        # An error that the disk has not caused is our fault: its traceback is logged.
        trace = None if isinstance(error, OSError | WeightsError) else error
        logger.error("step %d: no checkpoint: %s", step, error, exc_info=trace)
        if parallel.rank() == 0:
            shutil.rmtree(unfinished(self._run_dir, step).directory, ignore_errors=True)

    def _attempt(self, step: int, state: dict[str, Any], config: Any, reference: int) -> None:
        """Every rank at the same time; all raise if one fails."""
        parallel.on_main(partial(self._lay_out, step, config), self._group)
        if reference:
            write = unfinished(self._run_dir, step).write_reference
            parallel.on_main(partial(write, reference), self._group)

        folder = unfinished(self._run_dir, step).trainer
        parallel.on_all(lambda: write_shard(folder, state), self._group)
        parallel.on_main(partial(self._complete, step), self._group)

    def _lay_out(self, step: int, config: Any) -> None:
        """Folders, and all files but the ranks' shards."""
        target = unfinished(self._run_dir, step)
        kept = target.directory / PUBLISHED
        # The folder is gone if the first attempt failed after it: then the weights are in place.
        for folder in (target.trainer, target.weights) if kept.exists() else (target.trainer,):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

        if kept.exists():
            copy_model_files(
                config, self._model_path, directory=target.weights, run_dir=self._run_dir
            )
            for file in kept.iterdir():
                link_or_copy(file, target.weights / file.name)

    def _complete(self, step: int) -> None:
        shutil.rmtree(unfinished(self._run_dir, step).directory / PUBLISHED, ignore_errors=True)
        logger.info("step %d: checkpoint %s", step, complete(self._run_dir, step).directory)


def save_states(trainer: TrainerState, folder: Path) -> None:
    """Let every loss and head write what it keeps into a folder of its name. Raises ``OSError``."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, owner in trainer.stateful().items():
        target = folder / name
        target.mkdir(parents=True)
        with running(owner.name, hook="save", owner=owner):
            owner.save(target)

        if not any(target.iterdir()):
            target.rmdir()
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def load_states(trainer: TrainerState, folder: Path) -> None:
    """Restore it. A state of a loss or head that the run has no more is left alone."""
    # A loss is made when it is first read, which may be in a later batch. Its state is loaded now.
    trainer.losses.make_all()

    owners = trainer.stateful()
    for path in sorted(folder.glob("*")):
        owner = owners.get(path.name)
        if owner is None:
            logger.warning(
                "%s: the run has no loss or head %r now. What it kept is left out.", path, path.name
            )
            continue
        with running(owner.name, hook="load", owner=owner):
            owner.load(path)


def snapshot(trainer: TrainerState, step: int) -> dict[str, Tensor]:
    """A copy of the state that continues exactly after step ``step``, without the weights."""
    state = _tensors(_state(trainer) | {"step": torch.tensor(step)})
    # Copied on the host too: the next step changes these tensors in place.
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}


def write_shard(folder: Path, state: dict[str, Tensor]) -> None:
    """Write this rank's parts of the tensors to a safetensors file, with their offsets as
    ``HuggingFaceStorageReader`` expects them. torch's other format is a pickle, which runs code
    when it is read. Raises ``OSError``."""
    parts = {}
    offsets = {}

    for name, tensor in state.items():
        part = tensor
        start = [0] * tensor.dim()
        is_ours = parallel.rank() == 0

        if isinstance(tensor, DTensor):
            places = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
            # Replicas have equal shards: the first of them writes.
            is_ours = not any(at for each, at in places if isinstance(each, Replicate))
            # The protocol of torch's checkpoints: the offsets of this shard in the whole tensor.
            (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            part = tensor.to_local()
            start = list(chunk.offsets)

        if is_ours:
            parts[name] = part
            offsets[name] = {"saved_offsets": start}

    path = folder / f"rank_{parallel.rank()}.safetensors"
    write_stream(
        path,
        parts,
        stream=iter(parts.values()),
        metadata={"DCP_SHARDING_INFO": json.dumps(offsets)},
    )
    # `complete` flushes for rank 0's machine; each other machine flushes its own bytes.
    flush(path)


def restore(trainer: TrainerState, checkpoint: Checkpoint) -> None:
    """Continue from a checkpoint; the model has been loaded from its ``weights`` already.

    A parameter that had no gradient before the checkpoint, and so has no state in it, begins with a
    new one. Raises ``ConfigError`` if the checkpoint is not of this model or optimizer.
    """
    reference = checkpoint.reference
    if reference:
        trainer.references.reset(reference)  # its tensors, which are loaded in place

    state = _state(trainer) | {"step": torch.tensor(-1)}  # overwritten by the load; checked below
    if (checkpoint.trainer / ".metadata").exists():
        raise ConfigError(
            f"--resume: {checkpoint.trainer} is of an earlier version: a pickle, which this one "
            f'does not read. Start a new run from model.name = "{checkpoint.weights}".'
        )

    try:
        reader = HuggingFaceStorageReader(str(checkpoint.trainer))
        saved = reader.read_metadata().state_dict_metadata.keys()
        if "cuda_rng" not in saved:
            state.pop("cuda_rng", None)  # it was written on CPU

        tensors = _tensors(state)
        for name in _never_stepped(state, saved):
            # A key that the checkpoint lacks would fail the whole load.
            del tensors[name]
        for name in _unsaved_biases(tensors, saved):
            del tensors[name]

        with warnings.catch_warnings():  # that one rank has no process group
            warnings.filterwarnings("ignore", message="torch.distributed is")
            state_dict_loader.load(  # into the state's own tensors
                tensors, storage_reader=reader, no_dist=not parallel.several_ranks()
            )
    except FAILED as error:  # a file is gone, a key, a shape
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:  # with traces in its text
            (cause, _), *_ = error.failures.values()

        raise ConfigError(
            f"--resume: {checkpoint.trainer} does not hold the state of this model and "
            f"optimizer: {type(cause).__name__}: {cause}"
        ) from error

    if int(state["step"]) != checkpoint.step:
        raise ConfigError(
            f"--resume: {checkpoint.trainer} is of step {int(state['step'])}, "
            f"expected {checkpoint.step}"
        )

    with torch.no_grad():
        set_optimizer_state_dict(trainer.model, trainer.optimizer, state["optimizer"])
        for name, (module, optimizer) in trainer.heads.items():  # weights were loaded in place
            set_optimizer_state_dict(module, optimizer, state["heads"][name]["optimizer"])

    load_states(trainer, checkpoint.states)
    # Restored after the plugins' states: a plugin's `load` may draw random numbers.
    torch.set_rng_state(state["rng"])
    if "cuda_rng" in state:
        torch.cuda.set_rng_state(state["cuda_rng"], trainer.device)
    # Learning rate, decay and betas are those of the config, not of the checkpoint.
    for optimizer in trainer.optimizers:
        fresh = optimizer.defaults
        for group in optimizer.param_groups:
            group.update({name: value for name, value in fresh.items() if name in group})


def _state(trainer: TrainerState) -> dict[str, Any]:
    """Sharded like the weights. The weights of heads and of the average are saved too, because they
    are published nowhere."""
    state: dict[str, Any] = {
        "optimizer": _optimizer_state(trainer.model, trainer.optimizer),
        "rng": torch.get_rng_state(),
        "heads": {},
    }
    for name, (module, optimizer) in trainer.heads.items():
        state["heads"][name] = {
            "weights": module.state_dict(),
            "optimizer": _optimizer_state(module, optimizer),
        }

    if trainer.references.average:
        state["ema"] = trainer.references.average  # restored in place
    if trainer.references.replaced:
        state["reference"] = trainer.references.replaced
    if trainer.device.type == "cuda":
        state["cuda_rng"] = torch.cuda.get_rng_state(trainer.device)
    return state


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    is_new = not optimizer.state
    state = get_optimizer_state_dict(module, optimizer)
    if is_new:  # torch has taken a step of nothing to make the state; the next is still the first
        for each in optimizer.state.values():
            if "step" in each:
                each["step"].zero_()
    return state


def _unsaved_biases(tensors: Collection[str], saved: Collection[str]) -> list[str]:
    """Router biases of the average and of the reference that a checkpoint of an earlier version
    lacks: those of the loaded weights stay."""
    kept = ("ema.", "reference.")
    return [
        name
        for name in tensors
        if name.startswith(kept) and is_router_bias(name) and name not in saved
    ]


def _never_stepped(state: dict[str, Any], saved: Collection[str]) -> list[str]:
    """The tensors of parameters without any state in a checkpoint, whose tensors are ``saved``.

    An optimizer has state only for parameters that it has stepped, and some never get a gradient:
    the LM head of a critic's own model, experts that no token has reached. If none of an
    optimizer's parameters has state, the checkpoint is of another optimizer: then there are none.
    """
    optimizers = {"optimizer": state["optimizer"]}
    for name, head in state["heads"].items():
        optimizers[f"heads.{name}.optimizer"] = head["optimizer"]

    parents: set[str] = set()
    for name in saved:
        parts = name.split(".")
        parents.update(".".join(parts[:end]) for end in range(1, len(parts)))

    never: list[str] = []

    for prefix, optimizer in optimizers.items():
        stepped = False
        missing: list[str] = []
        for parameter, tensors in optimizer["state"].items():
            beginning = f"{prefix}.state.{parameter}"
            if beginning in parents:
                stepped = True
            else:
                missing += _tensors(tensors, f"{beginning}.")

        if stepped and missing:
            never += missing
            logger.info(
                "%s: %d tensors of parameters that had no gradient yet begin anew, first %s",
                prefix,
                len(missing),
                missing[0],
            )

    return never


def _tensors(state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors in it, by dotted name. All other values of an optimizer come from the config."""
    tensors = {}
    for name, part in state.items():
        if isinstance(part, Tensor):
            tensors[prefix + name] = part
        elif isinstance(part, dict):
            tensors |= _tensors(part, f"{prefix}{name}.")
    return tensors
