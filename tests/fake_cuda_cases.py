"""Trainers that take two steps on a CUDA device that is not there (``fake_cuda.py``).

``python fake_cuda_cases.py FOLDER`` writes ``FOLDER/results.json``: by case, what was recorded, or
``{"error": ...}``.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from fake_cuda import Recorder, fake_cuda, fake_ranks, pretend
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components, names_of
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import (
    HEAD,
    LOSS,
    collect,
    make_kernel,
    make_observers,
    make_optimizer,
    make_tuning,
)
from prime_rl.streams import COMPUTED, STREAMS, TOP_IDS
from prime_rl.trainer import parallel, update
from prime_rl.trainer.file_writer import FileWriter
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.parallel import stream_to_main
from prime_rl.trainer.published import (
    Publisher,
    published_dtypes,
    published_pieces,
    published_tensors,
)
from prime_rl.weights.tensors import Piece, header_of
from prime_rl.wire import MicroBatch
from prime_rl_broadcast.sender import BroadcastSender
from prime_rl_lora.model import add_lora

VOCAB, TOKENS, LENGTHS = 512, 96, (40, 24, 24, 8)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
NO_GAP = mock.patch("prime_rl.trainer.self_check._gap", lambda *_: 0.0)
"""The self-check reads values."""
MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def dense(layers: int = 2) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": layers})).eval()


def moe() -> PreTrainedModel:
    sizes = {**SIZES, **MOE, "tie_word_embeddings": False}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).eval()


def micro_batch(component: str = "rl", streams: tuple[str, ...] = ()) -> MicroBatch:
    """A row of four sequences, the second half of each a target of ``component``; two groups."""
    rng = np.random.default_rng(0)
    mask = np.concatenate([np.arange(length) >= length // 2 for length in LENGTHS])
    values = mask.astype(np.float32)
    batch = MicroBatch(
        token_ids=rng.integers(1, VOCAB, TOKENS).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -np.log(VOCAB), 0.0).astype(np.float32),
        sequence_lengths=np.array(LENGTHS, np.int32),
        temperatures=np.full(len(LENGTHS), 0.8, np.float32),
        env_ids=np.zeros(len(LENGTHS), np.uint16),
        envs=("fake",),
        advantages=values,
        rollout_ids=np.arange(len(LENGTHS), dtype=np.int32),
        group_ids=np.array([0, 0, 1, 1], np.int32),
    )
    given: dict[str, Any] = {name: values for name in streams if name not in STREAMS}
    if TOP_IDS in given:
        given[TOP_IDS] = np.ones((TOKENS, 2), np.int32)
    tops = [name for name in given if name.startswith("top_") and name != TOP_IDS]
    given |= {name: np.ones((TOKENS, 2), np.float32) for name in tops}
    if component not in ("rl", "ce", "ref_kl"):
        given[f"{component}_weights"] = values
    known = {name: values for name in streams if name in STREAMS}
    if component in ("ce", "ref_kl"):
        known[f"{component}_weights"] = values
    if component != "rl":
        known["rl_weights"] = 0 * values
    return replace(batch, streams=given, **known)


def make_trainer(
    model: Callable[[], PreTrainedModel] = dense,
    settings: dict[str, Any] | None = None,
    folder: Path = Path(),
    colocated: bool = False,
) -> Trainer:
    """As the trainer's process makes it, with weights without values; colocated, on the host."""
    hooks = load_plugins(TRAINER_GROUP)
    config = TrainerConfig(**{"loss": {"type": "default"}} | (settings or {}))
    # The others count and time on the host.
    observers = [o for o in make_observers(config.settings, hooks) if o.name in config.settings]
    with torch.device("cpu" if colocated else "cuda"):
        made = model()
        if (tuning := make_tuning(config.settings, hooks)) is not None:
            tuning.peft_config = add_lora(made, tuning.config)
            made.prime_rl_tuning = tuning
    with NO_GAP:
        trainer = Trainer(
            *(made, Components.load(config, hooks), config, 10, observers, colocated),
            kernel=make_kernel(config, hooks),
            maker=make_optimizer(config.optim, hooks),
        )
    for observer in observers:
        observer.started(trainer, folder)
    return trainer


def steps(
    recorder: Recorder, trainer: Trainer, rows: list[MicroBatch], last: int = 2
) -> dict[str, Any]:
    """What the last step did; the first also makes the optimizer's state."""
    for step in range(1, last + 1):
        recorder.clear()
        trainer.train_step(step, rows)
    states = [state for each in trainer.optimizers for state in each.state.values()]
    columns = [(name, value) for state in states for name, value in state.items()]
    tensors = [value for name, value in columns if torch.is_tensor(value) and name != "step"]
    parameters = list(trainer.policy.parameters())
    devices = {str(each.device) for each in [*parameters, *tensors]}
    moments = {f"{each.device} {list(each.shape)}" for each in tensors}
    return {
        "waits": dict(recorder.waits),
        "kernels": dict(recorder.kernels),
        "float32_products": dict(recorder.float32_products),
        "collectives": dict(recorder.collectives),
        "devices": sorted(devices),
        "moments": sorted(moments),
        "state_dtypes": sorted({str(each.dtype) for each in tensors}),
        "weight_dtypes": sorted({f"{p.requires_grad} {p.dtype}" for p in parameters}),
        "packing": trainer.policy.packing.name,
        "dtype": trainer.dtype,
        "published": [[each.name, list(each.shape)] for each in published(trainer)],
        "copied": copied(recorder, trainer),
        "staged": staged(recorder, trainer),
    }


def experts_at_home(folder: Path) -> dict[str, Any]:
    """Where a colocated trainer fills its weights while engines hold the GPU."""
    filled: set[str] = set()
    fill = parallel.fill

    def look(part: torch.Tensor, value: torch.Tensor) -> None:
        filled.add(str(part.device))
        fill(part, value)

    with fake_ranks(4), mock.patch.object(parallel, "fill", look):
        trainer = make_trainer(moe, {"expert_parallel": 2}, folder, colocated=True)
    resident = {str(each.device) for each in trainer.policy.resident}
    return {"filled": sorted(filled), "resident": sorted(resident)}


def in_turns(recorder: Recorder, folder: Path, **settings: Any) -> dict[str, Any]:
    """The default layout of one GPU: the trainer holds it for its step only, and its weights are at
    home on the host. Where they are at each point, and what the second of two steps did."""
    places: dict[str, Any] = {}
    pinned: list[bool] = []
    empty = torch.empty_like

    def empty_like(*given: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        pinned.append(pin_memory)  # there is no driver to pin it
        return empty(*given, **settings)

    def look(trainer: Trainer, when: str) -> None:
        states = [state for each in trainer.optimizers for state in each.state.values()]
        tensors = [v for s in states for n, v in s.items() if torch.is_tensor(v) and n != "step"]
        devices = {str(each.device) for each in [*trainer.policy.parameters(), *tensors]}
        places[when] = sorted(devices)

    with fake_ranks(1):
        trainer = make_trainer(dense, settings, folder, colocated=True)
        look(trainer, "made")
        rows = [micro_batch(), micro_batch()]
        for step in (1, 2):
            recorder.clear()
            trainer.memory.load()
            look(trainer, f"loaded {step}")
            loading = dict(recorder.waits)
            recorder.clear()
            with NO_GAP:  # on the first step: before, the trainer does not hold the device
                trainer.train_step(step, rows)
            done = {
                "waits": dict(recorder.waits),
                "kernels": dict(recorder.kernels),
                "float32_products": dict(recorder.float32_products),
                "collectives": dict(recorder.collectives),
            }
            weights = {str(each.dtype) for each in trainer.policy.parameters()}
            recorder.clear()
            pinned.clear()
            with mock.patch("prime_rl.trainer.device.torch.empty_like", empty_like):
                trainer.memory.unload()
            places[f"new buffers {step}"] = [len(pinned), all(pinned)]
            look(trainer, f"unloaded {step}")
        return (
            done
            | {
                "places": places,
                "loading": loading,
                "unloading": dict(recorder.waits),
                "weight_dtypes": sorted(weights),
                "packing": trainer.policy.packing.name,
                "dtype": trainer.dtype,
            }
            | sharding(trainer)
        )


def copied(recorder: Recorder, trainer: Trainer) -> dict[str, Any]:
    """What copying the weights for a thread does, and where the copies are."""
    with mock.patch("prime_rl.trainer.file_writer.parallel.host_group"):  # gloo, of real ranks
        writer = FileWriter(trainer.model, Publisher(Path(), 1, "bfloat16"), print)
    writer._one_disk = True  # no rank asks the others
    recorder.clear()
    pinned: list[bool] = []
    empty = torch.empty_like

    def made(*given: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        pinned.append(pin_memory)  # there is no driver to pin it
        return empty(*given, **settings)

    with (
        mock.patch("prime_rl.trainer.file_writer.torch.empty_like", made),
        mock.patch("prime_rl.trainer.file_writer.torch.cuda.Event") as event,
    ):
        done = writer.copy()
    buffers = writer._next.buffers.values() if writer._next else ()
    places = {f"{each.device} {each.dtype}" for each in buffers}
    events = event.return_value.record.call_count
    return {
        "done": done, "waits": dict(recorder.waits), "pinned": [*set(pinned)], "events": events,
        "places": sorted(places), "collectives": dict(recorder.collectives),
    }  # fmt: skip


def staged(recorder: Recorder, trainer: Trainer) -> dict[str, Any]:
    """What copying the weights for a broadcast does, and where the copy is."""
    sender = BroadcastSender(torch.device("cuda", 0), overlap=True)
    tensors = published_tensors(trainer.model)
    dtypes = published_dtypes(trainer.model, tensors, torch.bfloat16)
    order = {
        "directory": "", "group": "", "backend": "nccl", "rank": 0, "world_size": 2,
        "timeout": 1.0, "loopback": True,
    }  # fmt: skip
    recorder.clear()
    with mock.patch.object(sender, "_send_copy"):
        stream_to_main(
            tensors,
            lambda stream: sender.send(order, header_of(tensors, dtypes), stream),
            device=sender.device,
        )
        sender.finish()
    places = {f"{each.device} {each.dtype}" for each in sender._buffers}
    size = sum(each.numel() for each in sender._buffers)
    return {"waits": dict(recorder.waits), "places": sorted(places), "bytes": size}


def published(trainer: Trainer) -> list[Piece]:
    """Found by the values of other tensors, which are real; of these it takes the shapes."""
    with _disable_current_modes():
        return published_pieces(trainer.model, published_tensors(trainer.model))


def sharding(trainer: Trainer) -> dict[str, Any]:
    """How the weights lie on the ranks."""
    tensors = published_tensors(trainer.model)
    sharded = [each for each in tensors.values() if isinstance(each, DTensor)]
    down = "model.layers.0.mlp.down_proj.weight"
    if not sharded:
        return {}
    first = tensors.get(down, sharded[0])
    assert isinstance(first, DTensor)
    return {
        "whole_tensors": len(tensors) - len(sharded),
        "placements": sorted({str(each.placements) for each in sharded}),
        "mesh": list(first.device_mesh.shape),
        "whole": list(first.shape),
        "shard": list(first.to_local().shape),
    }


def cases(recorder: Recorder, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name. Each makes a trainer of its own."""

    def ranks(
        size: int, model: Callable[[], PreTrainedModel] = dense, **settings: Any
    ) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            with fake_ranks(size):
                trainer = make_trainer(model, settings, folder)
                return steps(recorder, trainer, [micro_batch(), micro_batch()]) | sharding(trainer)

        return run

    def case(
        model: Callable[[], PreTrainedModel] = dense, **settings: Any
    ) -> Callable[[], dict[str, Any]]:
        return ranks(1, model, **settings)

    return {
        "dense": case(),
        "in turns": lambda: in_turns(recorder, folder),
        "experts in turns": lambda: experts_at_home(folder),
        "float32": case(dtype="float32"),
        "recompute": case(activation_checkpointing=1),
        "lora": case(lora={"rank": 4}),
        "muon": case(optim={"type": "muon"}),
        "offload": case(optim={"type": "adamw_offload"}),
        "offload, 8 ranks": ranks(8, optim={"type": "adamw_offload"}),
        "moe": case(moe),
        "moe lora": case(moe, lora={"rank": 4}),
        "experts lora": case(moe, lora={"rank": 4, "experts": True}),
        "experts lora, 8 ranks": ranks(8, moe, lora={"rank": 4, "experts": True}),
        "token export": case(token_export={"enabled": True}),
        "every loss": lambda: losses(recorder, folder, heads=False),
        "losses with heads": lambda: losses(recorder, folder, heads=True),
        "8 ranks": ranks(8),
        "8 ranks, resharded": ranks(8, reshard_after_forward=True),
        "resharded": case(reshard_after_forward=True),
        "moe, 8 ranks": ranks(8, moe),
        "256 ranks": ranks(256),
        "4 x 64 ranks": ranks(256, dp_replicate=4),
        "256 ranks, rows of 4": ranks(256, context_parallel=4),
    }


def losses(recorder: Recorder, folder: Path, heads: bool) -> dict[str, Any]:
    """All installed losses that read heads, or that do not, in one step, each on a row of its own.
    With an adapter: without it the model has its first weights, which some losses read."""
    hooks = load_plugins(TRAINER_GROUP)
    installed, rows, tables = collect(hooks, HEAD), [], {}
    # A second model, over the rollouts of a group: these rows have neither.
    installed = {n: each for n, each in installed.items() if not each.cls.gives_logprobs}
    for name, offered in collect(hooks, LOSS).items():
        reads = [each if isinstance(each, str) else each[0] for each in offered.cls.reads]
        own = [installed[each].cls for each in reads if each in installed]
        # The user's own, and that of the second model.
        if bool(own) != heads or name in ("custom", "implicit_reward_loss"):
            continue
        streams = {*reads, *(each for head in own for each in names_of(head.reads))}
        streams |= {TOP_IDS} if "top_logprobs" in reads else set()
        streams -= {*COMPUTED, *installed, *(each for head in own for each in head.writes)}
        rows.append(micro_batch(name, tuple(sorted(streams))))
        tables[name] = {"constant": 1.0} if offered.cls.normalize_by == "constant" else {}
        tables[name] |= {"estimator": "k3"} if name == "kl_to_initial" else {}
    settings = {"losses": tables, "heads": {n: {} for n in installed if heads}, "lora": {"rank": 4}}
    with fake_ranks(1):
        trainer = make_trainer(partial(dense, layers=1), settings, folder)
        return steps(recorder, trainer, rows, last=1) | {"losses": [*tables]}


def main(folder: Path) -> None:
    """Every case, or those named on the command line."""
    torch.set_num_threads(1)
    update.check_declared = lambda component: None  # values here are all 1: no sum can be told
    pretend(folder)
    results = {}
    with fake_cuda() as recorder:
        found = cases(recorder, folder)
        for name in sys.argv[2:] or found:
            started = time.process_time()
            try:
                results[name] = found[name]()
            except Exception as error:
                results[name] = {"error": f"{error}", "traceback": traceback.format_exc()}
            results[name]["seconds"] = time.process_time() - started
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
