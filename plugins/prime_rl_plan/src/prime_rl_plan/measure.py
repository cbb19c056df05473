"""``python -m prime_rl_plan.measure``: one step of the trainer on tensors without values, with few
layers; memory and cost of the whole model by extrapolation. Reads a request from stdin, and writes
the answer to stdout, both JSON.

In a process of its own: it patches torch.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel, make_optimizer, make_tuning
from prime_rl.streams import STREAMS, TOP_IDS
from prime_rl.trainer import logprobs, optim, update
from prime_rl.trainer import model as policy_module
from prime_rl.trainer.heads import HeadModule
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import (
    Policy,
    gathered_bytes,
    is_worth_compiling,
    keeps_gathered,
    load_model,
    resident_experts,
)
from prime_rl.trainer.published import published_tensors
from prime_rl.wire.micro_batch import MicroBatch
from prime_rl_plan.fake import BLOCK, fake_ranks, fake_tensors, model_from
from prime_rl_plan.ledger import NETWORK, OUTSIDE, Ledger, owners


def lengths_of(tokens: int, longest: int) -> list[int]:
    """A full row of the longest samples: most attention, most targets."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + [rest] * (rest > 0)


SHORT = (8, 8)
"""Samples of the row before the full one."""


def make_row(
    lengths: Sequence[int], vocab: int, component: str, streams: Sequence[str]
) -> MicroBatch:
    """A row of samples whose tokens, all but the first, are targets of ``component``. The ids are
    spread over the vocabulary, because a CPU allocates only the memory that a token reaches."""
    tokens = sum(lengths)
    samples = len(lengths)
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    values = mask.astype(np.float32)
    columns: dict[str, Any] = {name: values for name in streams if name in STREAMS}
    others: dict[str, Any] = {name: values for name in streams if name not in STREAMS}
    if TOP_IDS in others:
        others[TOP_IDS] = np.ones((tokens, 2), np.int32)
    if component != "rl":
        columns["rl_weights"] = 0 * values
        (columns if f"{component}_weights" in STREAMS else others)[f"{component}_weights"] = values

    return MicroBatch(
        token_ids=(np.arange(tokens) * max(vocab // tokens, 1) % vocab).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=-values,
        sequence_lengths=np.array(lengths, np.int32),
        temperatures=np.full(samples, 0.8, np.float32),
        env_ids=np.zeros(samples, np.uint16),
        envs=("plan",),
        rollout_ids=np.arange(samples, dtype=np.int32),
        group_ids=np.arange(samples, dtype=np.int32) // 2,
        streams=others,
        **{"advantages": values} | columns,
    )


def with_layers(table: Mapping[str, Any], layers: int) -> PretrainedConfig:
    """The architecture with fewer layers: the first ones."""
    known = dict(table)
    known["num_hidden_layers"] = layers
    if known.get("layer_types"):
        known["layer_types"] = known["layer_types"][:layers]
    return AutoConfig.for_model(**known)


@contextlib.contextmanager
def regions(ledger: Ledger, trainer: Trainer, num_rows: int, kept: bool = False) -> Iterator[None]:
    """Tell the ledger the current part of the step. Only the last of the step's ``num_rows`` rows
    is charged, and the update. ``kept``: weights are gathered for the first row alone."""
    names = set(trainer.model._no_split_modules or ())
    modules = trainer.model.modules()
    blocks = [each for each in modules if type(each).__name__.removeprefix("FSDP") in names]
    after = {len(blocks) - 1: "middle", 1: "bottom"}
    row = 0

    def enter(region: str) -> None:
        ledger.region = region

    def begin(*_: Any) -> None:
        nonlocal row
        row += 1
        ledger.charges = row == num_rows
        ledger.charges_gathering = kept and row < num_rows
        enter("forward")

    def watch(region: str, _: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:  # its gradient ends the backward pass through the block
            hidden.register_hook(lambda _: enter(region))

    def entering(region: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            enter(region)
            return function(*args, **kwargs)

        return call

    handles = [trainer.policy.register_forward_pre_hook(begin)]
    for number, region in after.items():
        if number >= len(blocks):  # of one block
            continue
        hook = partial(watch, region)
        handles.append(blocks[number].register_forward_pre_hook(hook, with_kwargs=True))

    head = logprobs.token_logprobs
    clip = optim.clip_gradients
    with (
        mock.patch.object(policy_module, "token_logprobs", entering("top", head)),
        mock.patch.object(update, "clip_gradients", entering("update", clip)),
    ):
        yield

    for handle in handles:
        handle.remove()
    ledger.region = OUTSIDE
    ledger.charges = False


def whole_policy(request: Mapping[str, Any], config: TrainerConfig) -> Policy:
    """The policy of a run, with all layers, its adapter and heads: weights without memory."""
    hooks = load_plugins(TRAINER_GROUP)
    kernel = make_kernel(config, hooks)
    tuning = make_tuning(config.settings, hooks)
    available = Components.load(config, hooks).heads
    architecture = with_layers(request["model"], request["model"]["num_hidden_layers"])

    with model_from(architecture) as folder, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architecture)
        if tuning is not None:
            tuning.prepare(model, folder, None)
        heads = [HeadModule(available[name], table, model) for name, table in config.heads.items()]
        policy = Policy(model, config, heads=heads, kernel=kernel)

    with fake_ranks(request["ranks"]):
        policy.resident_experts = resident_experts(model, config, kernel)
    return policy


@cache
def choices(request: str) -> tuple[bool, bool]:
    """What a run would decide by the size of its whole policy: whether it compiles the blocks, and
    whether it keeps weights gathered between the passes of a step. ``memory`` of the request: bytes
    of its GPU.

    Here blocks run as they are: memory is theirs, and of time the ledger leaves out what a compiler
    saves.
    """
    asked = json.loads(request)
    gpu = bool(asked["gpu"])
    half = bool(asked["half"])
    config = TrainerConfig.model_validate(asked["trainer"])
    # The policy is not compiled here, and attention must not be registered as if it were.
    policy = whole_policy(asked, config.model_copy(update={"compile": False}))

    compiled = config.compile
    if compiled == "auto":
        compiled = is_worth_compiling(policy, config, on_gpu=gpu)

    kept = False
    if half or asked["ranks"] > 1:  # else nothing is gathered
        memory = asked.get("memory", 0.0) if gpu else 0.0
        kept = keeps_gathered(config, gathered_bytes(policy, half), memory=memory)
    return compiled, kept


def step(request: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Peaks by region and kind, and costs, of one training step with so many layers."""
    gpu = request["gpu"]
    half = request["half"]
    settings = {
        **request["trainer"],
        "device": "cpu",
        "dtype": "bfloat16" if half else "float32",
        "num_ranks": None,
        "compile": False,
    }
    if gpu:
        settings["share_prompts"] = False

    compiled, kept = choices(json.dumps(request))
    settings["reshard_after_forward"] = not kept
    hooks = load_plugins(TRAINER_GROUP)
    config = TrainerConfig.model_validate(settings)
    lengths = lengths_of(request["row_tokens"], request["seq_len"])
    ledger = Ledger(
        pairs=sum(n * (n + 1) / 2 for n in lengths),
        rounds=gpu,
        fuses=compiled,
    )
    architecture = with_layers(request["model"], layers)
    torch.manual_seed(0)
    losses = Components.load(config, hooks)
    kernel = make_kernel(config, hooks)
    if gpu:
        kernel.block_logits = BLOCK
    with (
        fake_tensors(gpu, half, compiled=ledger.fusion is not None),
        fake_ranks(request["ranks"]),
        model_from(architecture) as folder,
    ):
        tuning = make_tuning(config.settings, hooks)
        model = load_model(folder, config, tuning)
        whole = {
            "weights": sum(each.numel() for each in model.parameters()),
            "trained": sum(each.numel() for each in model.parameters() if each.requires_grad),
        }
        resized = lambda storage, size: ledger.resize(storage, size)  # noqa: E731  # as a method
        with ledger, mock.patch("torch.UntypedStorage.resize_", resized):
            trainer = Trainer(
                model,
                losses,
                config,
                10,
                kernel=kernel,
                maker=make_optimizer(config.optim, hooks),
            )
            ledger.owned = lambda: owners(trainer.policy, trainer.optimizers)
            ledger.hold(_locals(trainer.policy), "weights")
            component = losses[request["component"]]
            named = architecture.vocab_size, component.name, component.streams
            short, full = (make_row(each, *named) for each in (SHORT, lengths))
            trainer.train_step(1, [short])  # makes the optimizer's state
            ledger.clear()
            rows = [*[short] * (request["rows"] > 1), full]  # the last finds gradients
            with regions(ledger, trainer, len(rows), kept=kept):
                trainer.train_step(2, rows)

        published = published_tensors(trainer.model)
        sizes = [tensor.numel() for tensor in published.values()]
        return {
            **whole,
            "published": sum(sizes),
            "largest": max(sizes),
            "keeps_gathered": kept,
            "peaks": ledger.peaks,
            "inputs_on_host": ledger.most_on_host,
            "costs": [[*key, number] for key, number in ledger.costs.items()],
        }


def _locals(policy: Any) -> Iterator[torch.Tensor]:
    for each in (*policy.parameters(), *policy.buffers()):
        yield each.to_local() if hasattr(each, "to_local") else each


def extrapolate(first: Any, second: Any, layers: tuple[int, int], whole: int) -> Any:
    """Numbers, and tables of them, at ``whole`` layers: on the line through two measurements."""
    if isinstance(first, Mapping):
        return {
            key: extrapolate(first.get(key, 0), second.get(key, 0), layers=layers, whole=whole)
            for key in {**first, **second}
        }
    a, b = layers
    return first + (second - first) * (whole - a) / (b - a)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The whole model's memory and costs."""
    whole = request["model"]["num_hidden_layers"]
    a, b = request["layers"]
    steps = [step(request, layers) for layers in ((a, b) if whole > b else (whole,))]
    for each in steps:
        each["costs"] = _summed(each["costs"], request["roofline"])
    estimate = (
        extrapolate(steps[0], steps[1], layers=(a, b), whole=whole) if len(steps) == 2 else steps[0]
    )
    return dict(estimate) | {"layers": [a, b] if len(steps) == 2 else [whole]}


def _summed(costs: Sequence[Sequence[Any]], roofline: Mapping[str, float]) -> dict[str, float]:
    """Seconds, operations and bytes of a row and of the update. ``roofline``: the device's peaks
    per second. Bytes of the network stand under part, kind and group of ranks."""
    sums: Counter[str] = Counter()
    for region, name, dtype, flops, moved, number in costs:
        part = "update" if region == "update" else "rows"
        if dtype.startswith(NETWORK):
            # Copies of the model are summed once per step, in the backward pass of the last row.
            part = "update" if name == "allreduce_" else part
            sums[f"{part}_{dtype}"] += moved * number
            continue
        if dtype == "host":
            sums[f"{part}_host_bytes"] += moved * number
            continue
        peak = roofline["bfloat16" if dtype == "bfloat16" else "float32"]
        sums[f"{part}_seconds"] += number * max(flops / peak, moved / roofline["bytes"])
        sums[f"{part}_flops"] += flops * number
        sums[f"{part}_bytes"] += moved * number

    return dict(sums)


def main() -> int:
    """Answer the request on stdin."""
    torch.set_num_threads(1)
    print(json.dumps(answer(json.loads(sys.stdin.read()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
