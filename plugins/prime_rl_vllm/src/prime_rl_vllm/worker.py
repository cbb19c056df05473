"""The extension of vLLM's workers (``--worker-extension-cls``) that loads new weights.

vLLM's own ``reload_weights`` does the loading. By itself it silently accepts a checkpoint that
lacks a tensor, leaves the model half loaded after a failure, and on a CPU spoils a tied head and
the experts of a mixture. So the weights are checked before, and these are packed anew after.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from prime_rl import WeightsError
from prime_rl_broadcast.connection import Member
from prime_rl_broadcast.group import BroadcastGroup, Header
from prime_rl_engine_kit.model_files import ModelFiles
from prime_rl_vllm.checkpoint import Announced, Staged, check_layout


class WeightExtension:
    """Mixed into the worker's class: ``self`` is the worker. Results are sent to the server
    process, so they are plain values. A refusal is a string."""

    _prime_rl_base: ModelFiles
    _prime_rl_first: int
    _prime_rl_member: Member
    _prime_rl_thread: ThreadPoolExecutor
    _prime_rl_staging: Future[str | None]
    _prime_rl_weights: Staged | None = None

    @property
    def _prime_rl_number(self: Any) -> int:
        """Among the workers of all the server's engines: ``rank`` counts within one."""
        parallel = self.vllm_config.parallel_config
        within = parallel.data_parallel_index * parallel.world_size + self.rank
        return int(self._prime_rl_first + within)

    def prime_rl_remember(self: Any, base_dir: str, first: int, of_run: bool) -> str | None:
        """Read the model's tensor names and shapes. ``first``: the number of the engine's first
        worker. ``of_run``: new weights will come, so a model that cannot load them is refused now.
        Returns the reason, or a fault of the folder, or None."""
        self._prime_rl_first = first
        try:
            self._prime_rl_base = ModelFiles(Path(base_dir))
            self._prime_rl_member = Member()
            self._prime_rl_thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        except WeightsError as error:
            return str(error)
        return unloadable(self.model_runner.get_model()) if of_run else None

    def prime_rl_stage(self: Any, weight_dir: str) -> None:
        """Begin to read and check a folder, in a thread: this one goes on with requests."""
        self._prime_rl_staging = self._prime_rl_thread.submit(self._prime_rl_read, weight_dir)

    def prime_rl_staged(self: Any) -> list[str | None] | None:
        """None until the folder is checked; then the reason to refuse it, or None, in a list."""
        return [self._prime_rl_staging.result()] if self._prime_rl_staging.done() else None

    def _prime_rl_read(self: Any, weight_dir: str) -> str | None:
        """Only the first worker of each engine reads every value: all see the same files."""
        self.prime_rl_drop()
        if (reason := unloadable(self.model_runner.get_model())) is not None:
            return reason
        try:
            base = self._prime_rl_base
            first = self.rank == 0
            self._prime_rl_weights = Staged(
                Path(weight_dir), base, look_inside=first, device=self.device
            )
        except WeightsError as error:
            return str(error)
        except Exception as error:  # nothing is loaded yet, so the engine can continue
            return f"{weight_dir}: {type(error).__name__}: {error}"

        return None

    def prime_rl_load(self: Any) -> float:
        """Load the staged weights in place. Returns the seconds it took."""
        start = time.perf_counter()
        staged = self._prime_rl_weights
        try:
            self._prime_rl_reload(staged.tensors())
        finally:
            self.prime_rl_drop()
        return time.perf_counter() - start

    def prime_rl_receive(self: Any, meeting: dict[str, Any]) -> str | None:
        """Load weights from the trainer's memory as they arrive. Returns the reason to refuse them,
        or None. Raises if the broadcast fails once loading has begun."""
        begun = False

        def check(header: Header) -> str | None:
            try:
                check_layout(Announced(header), self._prime_rl_base)
            except WeightsError as error:
                return str(error)
            return unloadable(self.model_runner.get_model())

        def load(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
            nonlocal begun
            begun = True
            self._prime_rl_reload(stream)

        try:
            group = msgspec.convert(meeting, BroadcastGroup)
            of_worker = group.for_worker(self._prime_rl_number)
            with self._prime_rl_member.join(of_worker, self.device) as connection:
                connection.receive(check, load)
        except WeightsError as error:
            if begun:
                raise
            return str(error)

        return None

    def _prime_rl_reload(self: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        # The last step of a prefill engine may still run: see ``prefill.hold_prefill``.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=tensors)
            repack(self.model_runner.get_model())

    def prime_rl_drop(self) -> None:
        """Close and forget the staged weights."""
        if self._prime_rl_weights is not None:
            self._prime_rl_weights.close()
            self._prime_rl_weights = None


def unloadable(model: torch.nn.Module) -> str | None:
    """Why new weights cannot be loaded, or None.

    On a CPU vLLM pads experts whose size is no multiple of 32, and its reload cannot copy into
    them: it would fail half-way (0.32).
    """
    if not current_platform.is_cpu():
        return None
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod):
            continue
        size = int(method.moe.intermediate_size_per_partition_unpadded)
        weight: Any = module.w2_weight
        if weight.numel() > weight.shape[0] * int(method.moe.hidden_dim_unpadded) * size:
            return (
                f"the experts have an intermediate size of {size}, which vLLM pads to a multiple "
                "of 32 on a CPU, and it loads no new weights into padded experts. Serve this model "
                "on a GPU, or by another engine"
            )
    return None


def repack(model: torch.nn.Module) -> None:
    """On a CPU, pack anew what a reload does not (vLLM 0.32, 0.33).

    There some matrices are multiplied in another order of their numbers, which is made at start-up.
    A reload leaves the copy of a tied head as it was, new body, old head; and puts the experts of a
    mixture where packed ones are expected. On a GPU nothing is packed after loading.
    """
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
