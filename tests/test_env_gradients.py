"""The gradients of envs, and PCGrad on them: against autograd, one rank and two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import env_gradient_cases as cases
import numpy as np
import pytest
import torch
import warm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from waiting import LIMIT

from prime_rl import PluginError, StreamError
from prime_rl.orchestrator.packer import alone, batch_frames
from prime_rl.rundir.launch import STORE
from prime_rl.trainer.rank import Rank
from prime_rl.wire.micro_batch import decode_batch


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    folder: Path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def oracle(folder: Path) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """The weights after one step of PCGrad as Algorithm 1 of the paper has it, on whole vectors;
    the norm of each env's gradient, and that of their sum."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = [name for name, _ in model.named_parameters()]
    total = sum(int(each.loss_mask.sum()) for each in cases.samples()[0])
    vectors = []
    for env in cases.ENVS:
        model.zero_grad()
        for sample, of in zip(*cases.samples(), strict=True):
            if of != env:
                continue
            ids = torch.from_numpy(np.asarray(sample.token_ids, np.int64))
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
            taken = logprobs.gather(1, ids[1:, None])[:, 0]
            mask = torch.from_numpy(sample.loss_mask[1:])
            credit = torch.from_numpy(sample.advantages[1:])
            (-(credit * taken)[mask].sum() / total).backward()
        vectors.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())

    order = np.random.default_rng(1)
    surgery = []
    for env in range(len(vectors)):
        mine = vectors[env].clone()
        for other in order.permutation(len(vectors)):
            if other != env and mine @ vectors[other] < 0:
                mine -= (mine @ vectors[other]) / (vectors[other] @ vectors[other]) * vectors[other]
        surgery.append(mine)
    step = sum(surgery)
    norm = float(step.norm())
    step = step * min(1.0, 0.5 / (norm + 1e-6))

    after = {}
    at = 0
    for name, parameter in zip(names, model.parameters(), strict=True):
        size = parameter.numel()
        change = step[at : at + size].view_as(parameter)
        after[name] = (parameter.detach().double() - cases.LR * change).float()
        at += size
    return after, [float(each.norm()) for each in vectors], norm


def run(folder: Path, out: Path, ranks: int, **table: object) -> tuple[dict, dict[str, float]]:
    """One step by ``ranks`` gloo ranks: weights and metrics."""
    out.mkdir()
    job = out / "job.json"
    job.write_text(json.dumps({"model": str(folder), "out": str(out), "trainer": table}))
    processes = []
    for number in range(ranks):
        env = os.environ | {
            "RANK": str(number),
            "WORLD_SIZE": str(ranks),
            STORE: str(out / "store"),
        }
        command = [sys.executable, cases.__file__, str(job)]
        processes.append(
            warm.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    for process in processes:
        output = process.communicate(timeout=LIMIT)[0]
        assert process.returncode == 0, output
    metrics = json.loads((out / "metrics.json").read_text())
    return load_file(out / "weights.safetensors"), metrics


def assert_as_oracle(
    folder: Path, weights: dict[str, torch.Tensor], metrics: dict[str, float]
) -> None:
    expected, norms, norm = oracle(folder)
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = dict(first.named_parameters())
    for name, values in expected.items():
        moved = float((values - before[name].detach()).abs().max())
        torch.testing.assert_close(weights[name], values, rtol=0, atol=max(1e-3 * moved, 1e-7))
    found = [metrics[f"optim/env_norm/{env}"] for env in cases.ENVS]
    assert found == pytest.approx(norms, rel=1e-4)
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_a_step_of_one_rank_is_that_of_the_paper(model_dir: Path) -> None:
    trainer, metrics = cases.train(model_dir, Rank())
    assert_as_oracle(model_dir, dict(trainer.model.named_parameters()), metrics)
    weights = [metrics[f"optim/env_weight/{env}"] for env in cases.ENVS]
    assert max(weights) > 1.01  # a and b conflict


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_of_two_ranks_is_that_of_the_paper(
    model_dir: Path, tmp_path: Path, replicas: int
) -> None:
    """In shards, and in whole copies."""
    weights, metrics = run(model_dir, tmp_path / "two", 2, dp_replicate=replicas)
    assert_as_oracle(model_dir, weights, metrics)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_hold_one_env_and_ranks_have_equally_many_of_each(ranks: int) -> None:
    packing = alone(*cases.samples())
    frames = batch_frames(packing, cases.CAPACITY, ranks, one_env_per_row=True)
    envs = [[row.envs for row in decode_batch(frame)[1]] for frame in frames]
    assert all(each == envs[0] for each in envs)
    assert envs[0] == sorted(envs[0]) and {*envs[0]} == {("a",), ("b",), ("c",)}
    tokens = sum(int(row.loss_mask.sum()) for f in frames for row in decode_batch(f)[1])
    assert tokens == sum(int(each.loss_mask.sum()) for each in cases.samples()[0])


def test_rows_of_several_envs_are_refused(model_dir: Path) -> None:
    trainer, _ = cases.train(model_dir, Rank())
    _, rows = decode_batch(batch_frames(alone(*cases.samples()), 64)[0])
    with pytest.raises(StreamError, match="one of several"):
        trainer.train_step(2, rows)


@pytest.mark.parametrize("wrong", [[1.0], [1.0, float("nan"), 1.0], None, ["x", 1, 1]])
def test_weights_that_are_no_number_per_env_are_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, wrong: object
) -> None:
    monkeypatch.setattr(cases.Sgd, "env_weights", lambda *_: wrong)
    with pytest.raises(PluginError, match="optimizer 'weighed_sgd': env_weights gave"):
        cases.train(model_dir, Rank())
