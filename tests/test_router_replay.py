"""Router replay from the embedded engine to the trainer: the experts that computed a token when it
was sampled compute it again, in every family and way of a row through the model.

An engine and a trainer of one machine in float32 agree on nearly every choice. So the trainer's
routers are moved by 1e-3, as rounding in bfloat16 would, and by more where few choices are close.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from family_models import DEEPSEEK, EXPERTS, FAMILIES, Family
from pydantic import ValidationError
from renderers.client import parse_generate_response
from small_training import PolicyGradient
from trainer_fixtures import kernel_of

from in_process.client import routes_of
from prime_rl import EngineError, EngineLaunch, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import ConfigError, StreamError
from prime_rl.orchestrator.packer import alone, pack_ranks
from prime_rl.registry.components import installed_losses
from prime_rl.rollout import Sample
from prime_rl.streams import ROUTES
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model as load_policy
from prime_rl.trainer.packed_row import APART
from prime_rl.wire import MicroBatch
from prime_rl.wire.micro_batch import decode_batch, encode_batch
from prime_rl_embedded import Embedded, EmbeddedConfig
from prime_rl_embedded.batch import Batches
from prime_rl_embedded.generate import generate_response
from prime_rl_embedded.model import load_model
from prime_rl_embedded.prefixes import PrefixCache
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_engine_kit.batch import frame, take_answers
from prime_rl_vllm import Vllm, VllmConfig
from prime_rl_vllm.reply import _routes as vllm_routes

MANY = {"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16}
"""So many that near ties are frequent."""
BY_NAME = {family.name: family for family in FAMILIES}
MIXTURES = (
    replace(BY_NAME["Qwen3-MoE"], settings=EXPERTS | MANY),
    replace(BY_NAME["Mixtral"], settings=EXPERTS | MANY),
    replace(
        BY_NAME["DeepSeek V3"],
        settings=DEEPSEEK | MANY | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    ),
)


def sampled_by_the_engine(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int = 12, kept_mib: int = 0
) -> list[Request]:
    """Requests of the engine, to their end, with routes."""
    with torch.inference_mode():
        served = load_model(folder, max_len=128, records_routes=True)
        scheduler = Scheduler(served, num_slots=4, max_model_len=128)
        scheduler.kept = PrefixCache(kept_mib * 2**20)
        requests = [
            Request(list(prompt), SamplingParams(max_tokens=max_tokens)) for prompt in prompts
        ]
        for request in requests:
            scheduler.add(request)
            if kept_mib:  # one after the other: the next begins with what the last one left
                while scheduler.has_work:
                    scheduler.step()
        while scheduler.has_work:
            scheduler.step()
    return requests


def sample_of(request: Request) -> Sample:
    """As a harness gives it: verifiers repeats the routes of the last computed token for the last
    sampled one, which no pass has computed."""
    tokens = request.prompt + request.token_ids
    mask = np.arange(len(tokens)) >= len(request.prompt)
    logprobs = np.zeros(len(tokens), np.float32)
    logprobs[mask] = request.logprobs
    assert request.routes is not None
    return Sample(
        token_ids=np.array(tokens, np.int32),
        loss_mask=mask,
        inference_logprobs=logprobs,
        advantages=mask.astype(np.float32),
        routed_experts=np.concatenate([request.routes, request.routes[-1:]]),
    )


def row_of(samples: Sequence[Sample], over_the_wire: bool = True) -> MicroBatch:
    packing = replace(alone(samples, ["a"] * len(samples)), needs=frozenset({ROUTES}))
    ((row,),) = pack_ranks(packing, capacity=4096)
    if over_the_wire:
        _, (row,) = decode_batch(encode_batch(1, [row]))
    return row


def trainer_of(folder: Path, **settings: object) -> Trainer:
    table = {"router_replay": True, "device": "cpu", "optim": {"lr": 1e-5}}
    config = TrainerConfig.model_validate({"loss": {"type": "pg"}, **table, **settings})
    losses = installed_losses().with_rl(PolicyGradient(PluginConfig()))
    return Trainer(load_policy(folder, config), losses, config, 10, kernel=kernel_of(config))


@torch.no_grad()
def move_routers(trainer: Trainer, size: float) -> None:
    """Add noise of this size, relative to the weights, to every router; where a bias decides the
    choice alone, to the bias."""
    torch.manual_seed(1)
    model = trainer.model
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    routers = {n: w for n, w in model.named_parameters() if n.endswith(("gate.weight", "router.w"))}
    for value in (biases or routers).values():
        scale = 1.0 if biases else value.std()
        value += size * scale * torch.randn_like(value)


def gaps_of(trainer: Trainer, row: MicroBatch) -> tuple[float, float, float, float]:
    """Mean KL(mu || pi) by the k3 estimator with replay and without, and the flipped and the
    replayed choices."""
    with torch.no_grad():
        packed, *columns = trainer.forward(row)
        replayed = columns[0]
        assert trainer.replay is not None
        flipped, number = trainer.replay.flips
        _, own, *_ = trainer.forward(row, with_replay=False)

    at = packed.targets
    ratios = [(column - packed.inference_logprobs)[at].double() for column in (replayed, own)]
    kls = [(ratio.expm1() - ratio).mean().item() for ratio in ratios]
    return kls[0], kls[1], float(flipped), float(number)


PROMPTS = [[5, 9, 3, 7], [5, 9, 3, 7], [5, 9, 3, 7], [11, 2], [30, 31, 32, 33, 34]]


@pytest.mark.parametrize(
    ("family", "size", "left"),
    [(MIXTURES[0], 1e-3, 1e-5), (MIXTURES[1], 1e-3, 1e-5), (MIXTURES[2], 1e-2, 1e-10)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_replay_takes_away_the_mismatch_of_moved_routers(
    family: Family, size: float, left: float, tmp_path: Path
) -> None:
    """Of a family whose bias only decides the choice, nothing is left but rounding; of the others
    the weights of the experts have moved too, by a thousandth."""
    family.write(tmp_path)
    requests = sampled_by_the_engine(tmp_path, PROMPTS * 3, max_tokens=24)
    row = row_of([sample_of(request) for request in requests])
    trainer = trainer_of(tmp_path)
    exact, alone_, flipped, number = gaps_of(trainer, row)
    assert (exact, alone_) == pytest.approx((0.0, 0.0), abs=1e-10)
    assert flipped == 0

    move_routers(trainer, size)
    replayed, own, flipped, number = gaps_of(trainer, row)
    computed = sum(len(request.prompt) + len(request.token_ids) - 1 for request in requests)
    num_mixtures = len(trainer.policy.mixtures)
    assert 0 < flipped < number <= computed * num_mixtures * 2
    assert replayed < left < 30 * left < own


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-moe")
    MIXTURES[0].write(folder)
    return folder


@pytest.fixture(scope="module")
def requests(qwen: Path) -> list[Request]:
    return sampled_by_the_engine(qwen, PROMPTS)


def test_every_way_of_a_row_through_the_model_replays_the_same_experts(
    qwen: Path, requests: list[Request]
) -> None:
    """The routers are moved so far that many choices differ: whole rows, shared prompts, documents
    apart, and blocks that are computed again in the backward pass agree in log π and gradient."""
    samples = [sample_of(request) for request in requests]
    samples.append(replace_routes(samples[0], None))  # of an engine without routes: its own routers
    row = row_of(samples)
    gradients = []
    columns = []
    for settings in ({}, {"share_prompts": False}, {"activation_checkpointing": 1}, None):
        trainer = trainer_of(qwen, **(settings or {}))
        if settings is None:
            trainer.policy.use(APART)
        move_routers(trainer, 0.3)
        packed, logprobs, *_ = trainer.forward(row)
        logprobs[packed.targets].sum().backward()
        columns.append(logprobs.detach()[packed.targets])
        gradients.append({n: p.grad for n, p in trainer.model.named_parameters()})
        assert trainer.replay is not None
        flipped, number = (float(count) for count in trainer.replay.flips)
        assert 0.05 < flipped / number < 0.95

    for column, gradient in zip(columns[1:], gradients[1:], strict=True):
        torch.testing.assert_close(column, columns[0], atol=2e-4, rtol=1e-4)
        for name, part in gradient.items():
            torch.testing.assert_close(part, gradients[0][name], atol=2e-2, rtol=1e-3)


def replace_routes(sample: Sample, routes: np.ndarray | None) -> Sample:
    kept = {name: column for name, column in sample.columns.items() if name != ROUTES}
    return Sample(**kept, routed_experts=routes)


def test_a_step_reports_flips_and_the_mismatch_with_and_without_replay(
    qwen: Path, requests: list[Request]
) -> None:
    trainer = trainer_of(qwen)
    move_routers(trainer, 0.1)
    row = row_of([sample_of(request) for request in requests])
    replayed, own, flipped, number = gaps_of(trainer, row)
    metrics = trainer.train_step(1, [row])
    assert metrics["router/flipped"] == pytest.approx(flipped / number, rel=1e-5)
    assert metrics["router/mismatch_kl_replayed"] == pytest.approx(replayed, rel=1e-3)
    assert metrics["router/mismatch_kl_own"] == pytest.approx(own, rel=1e-3)
    assert metrics["mismatch_kl/all/mean"] == pytest.approx(replayed, rel=1e-3)
    assert replayed < own


def test_what_comes_from_a_cache_has_the_routes_with_which_it_was_computed(qwen: Path) -> None:
    """The second request repeats the first one's tokens, whose keys are kept; a third is computed
    whole by another engine."""
    prompt = [*range(3, 40)]
    first, second = sampled_by_the_engine(qwen, [prompt, prompt], max_tokens=2, kept_mib=8)
    (whole,) = sampled_by_the_engine(qwen, [prompt], max_tokens=2)
    assert second.cached_tokens == 32 and whole.cached_tokens == 0
    for request in (first, second):
        assert request.routes is not None and whole.routes is not None
        assert request.routes.dtype == np.uint8
        assert request.routes.shape == (38, 2, 2)
        np.testing.assert_array_equal(request.routes[:37], whole.routes[:37])


def test_a_reply_says_the_routes_as_verifiers_reads_them(requests: list[Request]) -> None:
    """Both routes of the engine give the same, from the position that the client asks for."""
    request = requests[3]
    assert request.routes is not None
    later = replace(request.params, routes_start=1)
    request = replace(request, params=later)
    (choice,) = parse_generate_response(generate_response([request], "m", True))["choices"]
    entry = choice["routed_experts"]
    data = np.frombuffer(b64decode(entry["data"]), entry["dtype"]).reshape(entry["shape"])
    np.testing.assert_array_equal(data, request.routes[1:])
    assert entry["start"] == 1

    batches = Batches(engine=None, limits=None)  # type: ignore[arg-type]  # answers need neither
    (answer,) = take_answers(bytearray(frame(batches._answer(0, request))))
    assert routes_of(answer) == entry | {"data": bytes(entry["data"]).decode()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda routes: routes[:, :1], "got 1 layers of 2 experts per token, expected 2 layers"),
        (lambda routes: routes[..., :1], "got 2 layers of 1 experts per token"),
        (lambda routes: routes + 9, r"has the expert 2\d, expected 0 to 15"),
    ],
)
def test_routes_of_another_model_are_refused(
    qwen: Path, requests: list[Request], change: object, reason: str
) -> None:
    sample = sample_of(requests[0])
    assert callable(change)
    row = row_of([replace_routes(sample, np.ascontiguousarray(change(sample.routed_experts)))])
    with pytest.raises(StreamError, match=reason):
        trainer_of(qwen).forward(row)


def test_a_dense_model_has_nothing_to_replay_or_to_record(tmp_path: Path) -> None:
    BY_NAME["Qwen3"].write(tmp_path)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM has no mixture of experts"):
        trainer_of(tmp_path)
    with pytest.raises(EngineError, match="Qwen3ForCausalLM has no mixture of experts"):
        load_model(tmp_path, max_len=32, records_routes=True)


def test_replay_and_a_compiled_graph_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="Leave one of them out"):
        TrainerConfig.model_validate({"router_replay": True, "compile": True})


def test_the_engines_of_a_run_are_started_with_routes() -> None:
    launch = EngineLaunch(
        model_path=Path("m"),
        served_model_name="m",
        host="127.0.0.1",
        port=1,
        max_model_len=8,
        seed=0,
        admin_key="k",
        records_routes=True,
    )
    assert "--record-routes" in Embedded(EmbeddedConfig()).command(launch).argv
    vllm = Vllm(VllmConfig()).command(launch).argv
    assert json.loads(vllm[vllm.index("--settings") + 1])["enable_return_routed_experts"] is True
    plain = Embedded(EmbeddedConfig()).command(replace(launch, records_routes=False)).argv
    assert "--record-routes" not in plain


def test_vllm_gives_the_routes_of_prompt_and_completion() -> None:
    """In either form: all in the choice, or the prompt's in the output."""
    routes = np.arange(5 * 2 * 2, dtype=np.int32).reshape(5, 2, 2)
    whole = SimpleNamespace(routed_experts=routes)
    parts = SimpleNamespace(routed_experts=routes[3:])
    for choice, output in (
        (whole, SimpleNamespace()),
        (parts, SimpleNamespace(prompt_routed_experts=routes[:3])),
    ):
        found = vllm_routes(choice, output)
        assert found is not None and found.dtype == np.uint8
        np.testing.assert_array_equal(found, routes)
    assert vllm_routes(SimpleNamespace(routed_experts=None), SimpleNamespace()) is None
