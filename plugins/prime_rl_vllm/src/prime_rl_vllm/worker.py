"""What vLLM's workers learn from us (``--worker-extension-cls``): to load a published folder.

vLLM's own ``reload_weights`` does the loading. On its own it takes a checkpoint that lacks a
tensor without a word, leaves the engine in pieces when it fails half-way, and on a CPU leaves a
tied head as it was; so here the folder is checked first and the head is refreshed after.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from prime_rl import WeightsError
from prime_rl.model_files import ModelFiles
from prime_rl_broadcast.connection import Member
from prime_rl_broadcast.group import BroadcastGroup, Header
from prime_rl_vllm.checkpoint import Announced, Staged, check_layout


class WeightExtension:
    """Mixed into the worker's class: ``self`` is the worker. Results travel to the server, so they
    are plain values, and a refusal is one too."""

    _prime_rl_base: ModelFiles
    _prime_rl_attendance: Member
    _prime_rl_staged: Staged | None = None

    def prime_rl_remember(self, base_dir: str) -> str | None:
        """Note which tensors the model has. Returns what is wrong with the folder, or None."""
        try:
            self._prime_rl_base = ModelFiles(Path(base_dir))
            self._prime_rl_attendance = Member()
        except WeightsError as error:
            return str(error)
        return None

    def prime_rl_stage(self: Any, weight_dir: str) -> str | None:
        """Read and check a folder; nothing is loaded. Returns the reason to refuse it, or None.

        The first worker of all reads every value; to the others the files are the same.
        """
        self.prime_rl_drop()
        try:
            base, first = self._prime_rl_base, self.rank == 0
            self._prime_rl_staged = Staged(Path(weight_dir), base, look_inside=first)
        except WeightsError as error:
            return str(error)
        except Exception as error:  # nothing has been touched yet, so nothing needs to end
            return f"{weight_dir}: {type(error).__name__}: {error}"
        return None

    def prime_rl_load(self: Any) -> float:
        """Load what is staged, in place. Returns the seconds it took."""
        start, staged = time.perf_counter(), self._prime_rl_staged
        try:
            self._prime_rl_reload(staged.tensors())
        finally:
            self.prime_rl_drop()
        return time.perf_counter() - start

    def prime_rl_receive(self: Any, meeting: dict[str, Any]) -> str | None:
        """Load what the trainer passes on from its memory, as it comes. Returns the reason to
        refuse it, or None; raises if some of it has been loaded and the rest will not come."""
        begun = False

        def check(header: Header) -> str | None:
            try:
                check_layout(Announced(header), self._prime_rl_base)
            except WeightsError as error:
                return str(error)
            return None

        def load(stream: Iterator[tuple[str, torch.Tensor]]) -> None:
            nonlocal begun
            begun = True
            self._prime_rl_reload(stream)

        try:
            own = msgspec.convert(meeting, BroadcastGroup).for_worker(self.rank)
            with self._prime_rl_attendance.join(own, self.device) as group:
                group.receive(check, load)
        except WeightsError as error:
            if begun:
                raise
            return str(error)
        return None

    def _prime_rl_reload(self: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=tensors)
            refresh_packed_heads(self.model_runner.get_model())

    def prime_rl_drop(self) -> None:
        """Forget what is staged."""
        if self._prime_rl_staged is not None:
            self._prime_rl_staged.close()
            self._prime_rl_staged = None


def refresh_packed_heads(model: torch.nn.Module) -> None:
    """On a CPU: pack the head's matrix anew (vLLM 0.32, 0.33).

    There the head multiplies by a copy that oneDNN packed at start-up. A tied head's own weight is
    the embedding's, which a reload does change, but the copy it leaves alone: body new, head old.
    On a GPU there is no copy and nothing to do.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
