"""Biases of routers that even out the load (``trainer.balance_bias``): a plain update worked out
here, what engines and checkpoints get, and four ranks against one."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks_cases
import torch
import transformers
import warm
from family_models import DEEPSEEK, FAMILIES
from safetensors.torch import load_file
from test_expert_balance import row_of, trainer_of
from test_router_replay import gaps_of, sample_of, sampled_by_the_engine
from test_router_replay import row_of as routed_row
from torch import nn

from prime_rl.config.run import CkptConfig
from prime_rl.config.trainer import ROUTER_BIASES, TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.rundir.checkpoints import finished, unfinished
from prime_rl.rundir.status import Status
from prime_rl.trainer.checkpoint import Checkpointer, restore
from prime_rl.trainer.expert_balance import LOADS, ExpertBalance, is_router_bias
from prime_rl.trainer.model import Policy, load_model
from prime_rl.trainer.parallel import full
from prime_rl.trainer.published import Publisher, published_dtypes, published_tensors
from prime_rl.trainer.references import References
from prime_rl.trainer.routes import Mixture
from prime_rl.wire import MicroBatch
from prime_rl.wire.micro_batch import MEASURED

BY_NAME = {family.name: family for family in FAMILIES}
DEEPSEEK_V3 = replace(
    BY_NAME["DeepSeek V3"],
    settings=DEEPSEEK
    | {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
    | {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
)
RATE = 0.01


def biases_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, by name."""
    return {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if name.endswith(ROUTER_BIASES)
    }


def test_a_bias_rises_below_the_mean_falls_above_and_stays_at_it() -> None:
    """Choices 3, 1, 2 of a mean of 2: the biases of 0.5 become 0.4, 0.6, 0.5. The second step has
    2, 2, 2, and moves none, whatever the first had."""
    mixture = Mixture(number=0, layer=0, name="m", num_experts=3, top_k=1)
    bias = torch.full((3,), 0.5)
    balance = ExpertBalance(
        [mixture], coefficient=0.0, device=torch.device("cpu"), has_biases=True, biases=[bias]
    )
    expected = [0.4, 0.6, 0.5]
    for chosen in ([0, 0, 0, 1, 2, 2], [0, 0, 1, 1, 2, 2]):
        experts = torch.tensor(chosen)[:, None]
        scores = torch.zeros(6, 3)
        balance.watch(mixture, scores, experts, scores[:, :1], num_owners=None, again=False)
        balance.end_step()
        balance.move_biases(0.1)
        torch.testing.assert_close(bias, torch.tensor(expected))
    metrics = balance.metrics()
    assert metrics["router/bias/max"] == pytest.approx(0.6)
    assert metrics["router/bias/min"] == pytest.approx(0.4)


@pytest.mark.parametrize("name", ["DeepSeek V3", "GLM-4.5"])
def test_three_steps_move_the_biases_as_a_plain_loop_does(tmp_path: Path, name: str) -> None:
    """The loop asks transformers' own routers for their choices before each step, at the weights
    and biases of that step, for each sequence alone."""
    family = DEEPSEEK_V3 if name == "DeepSeek V3" else BY_NAME[name]
    family.write(tmp_path)
    trainer = trainer_of(tmp_path, balance_bias=RATE, optim={"lr": 1e-3, "max_norm": 1e9})
    plain = load_model(tmp_path, trainer.config)
    rows = [row_of([5, 9, 3, 7, 30, 31]), row_of([11, 2, 8, 4, 6, 1, 12])]
    for step in (1, 2, 3):
        before = biases_of(trainer.model)
        plain.load_state_dict(trainer.model.state_dict())
        counts = choices_of(plain, [row.token_ids.tolist() for row in rows])
        trainer.train_step(step, rows)
        after = biases_of(trainer.model)
        assert before.keys() == after.keys() == counts.keys()
        for key, chosen in counts.items():
            expected = before[key] + RATE * (chosen.mean() - chosen).sign()
            torch.testing.assert_close(after[key], expected, rtol=0, atol=1e-7)
            assert len({*chosen.tolist()}) > 1  # otherwise nothing moves


def choices_of(model: nn.Module, documents: list[list[int]]) -> dict[str, torch.Tensor]:
    """By the name of a router's bias: how often each expert is chosen."""
    counts: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def keep(router: nn.Module, inputs: Any, output: Any) -> None:
            _, _, chosen = output
            here = torch.bincount(chosen.flatten(), minlength=len(router.e_score_correction_bias))
            counts[name] = counts.get(name, 0) + here.float()

        return keep

    routers = {
        f"{name}.e_score_correction_bias": module
        for name, module in model.named_modules()
        if "e_score_correction_bias" in module._buffers
    }
    handles = [module.register_forward_hook(watch(name)) for name, module in routers.items()]
    with torch.no_grad():
        for tokens in documents:
            model(input_ids=torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    return counts


def test_a_load_that_biases_have_made_uneven_becomes_even(tmp_path: Path) -> None:
    """The loss has no gradient (advantages of 0): the biases alone move. One starts at 0.3."""
    DEEPSEEK_V3.write(tmp_path)
    trainer = trainer_of(tmp_path, balance_bias=0.03)
    for bias in trainer.policy.moving_biases:
        bias[0] = 0.3
    row = row_of([*range(1, 60)])
    metrics = [trainer.train_step(step, [row]) for step in range(1, 11)]
    first = metrics[0]
    last = metrics[-1]
    assert first["router/bias/max"] == pytest.approx(0.3)
    assert first["router/bias/min"] == 0
    assert last["router/load/max"] < 0.75 * first["router/load/max"]
    assert last["router/load/entropy"] > first["router/load/entropy"]
    assert "router/balance" not in last


def test_a_step_that_is_skipped_moves_no_bias(tmp_path: Path) -> None:
    """One that only measures, and one whose gradient is not finite."""
    DEEPSEEK_V3.write(tmp_path)
    trainer = trainer_of(tmp_path, balance_bias=RATE)
    before = biases_of(trainer.model)
    row = row_of([5, 9, 3, 7])
    trainer.train_step(1, [replace(row, minibatch=MEASURED)])
    bad = replace(row, advantages=row.advantages * 0 + float("inf"))
    metrics = trainer.train_step(2, [bad])
    assert metrics["optim/skipped"] == 1
    for name, bias in biases_of(trainer.model).items():
        assert torch.equal(bias, before[name])


def test_engines_get_the_biases_unrounded_and_sample_by_them(tmp_path: Path) -> None:
    """A version in bfloat16 has them in float32. The embedded engine, which serves that version,
    chooses the trainer's experts, and its routes replay."""
    DEEPSEEK_V3.write(tmp_path)
    settings = {"balance_bias": 0.1, "router_replay": True, "share_prompts": True}
    trainer = trainer_of(tmp_path, **settings)
    rows = [row_of([*range(1, 40)]), row_of([*range(20, 60)]), row_of([*range(5, 50)])]
    for step, row in enumerate(rows, start=1):
        trainer.train_step(step, [row])
    publisher = Publisher(tmp_path / "rounded", keep=2, dtype="bfloat16")
    publisher.write(trainer.model, 3)
    published = load_file(publisher.path(3) / "model.safetensors")
    for name, bias in biases_of(trainer.model).items():
        assert published[name].dtype == torch.float32
        assert torch.equal(published[name], bias)
        assert bias.abs().max() > 0.05

    exact = Publisher(tmp_path / "exact", keep=2)
    exact.write(trainer.model, 3)
    shutil.copy(tmp_path / "config.json", exact.path(3))
    requests = sampled_by_the_engine(exact.path(3), [[5, 9, 3, 7], [11, 2]])
    sampled: MicroBatch = routed_row([sample_of(request) for request in requests])
    replayed, own, flipped, number = gaps_of(trainer, sampled)
    assert (replayed, own) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert flipped == 0 < number

    unbalanced = load_model(tmp_path, trainer.config)
    trainer.model.load_state_dict(unbalanced.state_dict())
    _, own, flipped, _ = gaps_of(trainer, sampled)
    assert flipped > 0 and own > 1e-4


def test_a_reference_has_the_biases_of_its_weights(tmp_path: Path) -> None:
    """log π of the first weights stays what it was before any step, though biases choose others."""
    DEEPSEEK_V3.write(tmp_path)
    trainer = trainer_of(tmp_path, balance_bias=0.2, ema_decay=0.5)
    trainer.references._folder = tmp_path
    row = row_of([*range(1, 40)])
    with torch.no_grad():
        _, first, *_ = trainer.forward(row)
    average = biases_of(trainer.model)
    for step in (1, 2, 3):
        trainer.train_step(step, [row])
        for name, bias in biases_of(trainer.model).items():
            average[name] = 0.5 * average[name] + 0.5 * bias

    moved = biases_of(trainer.model)
    with torch.no_grad():
        _, now, *_ = trainer.forward(row)
        with trainer.references.within("initial_logprobs"):
            _, reference, *_ = trainer.forward(row)
        with trainer.references.within("ema_logprobs"):
            for name, bias in biases_of(trainer.model).items():
                torch.testing.assert_close(bias, average[name])
    torch.testing.assert_close(reference, first)
    assert float((now - first).abs().max()) > 1e-2
    for name, bias in biases_of(trainer.model).items():
        assert torch.equal(bias, moved[name])


def test_adapters_have_no_biases_to_publish(tmp_path: Path) -> None:
    DEEPSEEK_V3.write(tmp_path)
    config = TrainerConfig(device="cpu", balance_bias=RATE)
    model = load_model(tmp_path, config)
    vars(model)["prime_rl_tuning"] = object()
    with pytest.raises(ConfigError, match="adapters are published without the biases"):
        Policy(model, config)


SGD = {"optim": {"type": "sgd", "lr": 2e-2, "max_norm": 0.5}}
"""Adam would magnify the rounding of sums in another order."""
MOVED = {"balance_bias": RATE, "minibatches": 2, **SGD}
FOUR = {**MOVED, "expert_parallel": True, "dp_replicate": 2, "activation_checkpointing": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, by name."""
    folder = tmp_path_factory.mktemp("biases")
    DEEPSEEK_V3.write(folder / "model")
    (folder / "model/tokenizer.json").write_text("{}")

    def job(name: str, trainer: dict[str, Any], **more: Any) -> dict[str, Any]:
        run_dir = str(folder / name)
        return {"run_dir": run_dir, "model": str(folder / "model"), "trainer": trainer} | more

    from_four = {"resume": str(folder / "four/checkpoints/step_2")}
    sets = [
        (1, [job("one", MOVED)]),
        (4, [job("four", FOUR), job("four_of_two_rows", {**MOVED, "context_parallel": 2})]),
        (2, [job("two_from_four", MOVED, **from_four)]),
        (1, [job("one_from_four", MOVED, **from_four)]),
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps(sets))
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    result = warm.run([sys.executable, ranks_cases.__file__, path], env=env)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["four", "four_of_two_rows", "two_from_four", "one_from_four"])
def test_ranks_and_resumed_runs_have_the_biases_of_one_rank(runs: Path, name: str) -> None:
    """A minibatch has the same samples on any number of ranks. Of step 3 one rank has a sample, and
    step 4 trains nothing."""
    published = {step: biases_in(runs / name, step) for step in (3, 4, 5)}
    assert len(published[3]) == 2
    for bias, after in zip(published[3].values(), published[4].values(), strict=True):
        assert torch.equal(bias, after)
    for step, biases in published.items():
        expected = biases_in(runs / "one", step)
        for key, bias in biases.items():
            assert bias.dtype == torch.float32
            torch.testing.assert_close(bias, expected[key], rtol=0, atol=1e-7)


def biases_in(run: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (run / f"broadcasts/step_{step}").glob("*.safetensors")
    return {name: b for name, b in load_file(file).items() if name.endswith(ROUTER_BIASES)}


@pytest.mark.slow
def test_a_run_of_four_ranks_exports_and_keeps_the_biases_it_has_published(runs: Path) -> None:
    """In ``weights/`` and in a checkpoint; and its steps moved them."""
    last = biases_in(runs / "four", 5)
    exported = load_file(runs / "four/weights/model.safetensors")
    kept = load_file(runs / "four/checkpoints/step_2/weights/model.safetensors")
    first = biases_in(runs / "four", 2)
    for name, bias in last.items():
        assert torch.equal(exported[name], bias)
        assert torch.equal(kept[name], first[name])
        assert float(bias.abs().max()) >= 4 * RATE - 1e-6
    lines = (runs / "four" / LOADS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 5]


def test_a_checkpoint_of_before_whose_average_lacks_the_biases_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average of the biases begins with the loaded ones, and everything else goes on."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    DEEPSEEK_V3.write(model_dir)
    (model_dir / "tokenizer.json").write_text("{}")

    def weights_alone(references: References) -> dict[str, torch.Tensor]:
        return {n: p for n, p in references._model.named_parameters() if p.requires_grad}

    with monkeypatch.context() as patch:
        patch.setattr(References, "_trained", weights_alone)
        before = trainer_of(model_dir, ema_decay=0.9)
        before.train_step(1, [row_of([5, 9, 3, 7])])
        run = tmp_path / "run"
        folder = unfinished(run, 1)
        folder.orchestrator.mkdir(parents=True)
        folder.progress.write_text("{}")
        publisher = Publisher(run / "broadcasts", 2)
        publisher.write(before.model, 1, exact=True)
        publisher.announce(1)
        checkpointer = Checkpointer(run, CkptConfig(interval=1), model_dir, None)
        checkpointer.save(before, 1, publisher.path(1), Status(None))
        checkpointer.wait(Status(None))

    resumed = trainer_of(model_dir, ema_decay=0.9)
    loaded = {n: t.clone() for n, t in resumed.references.average.items() if is_router_bias(n)}
    assert loaded
    restore(resumed, finished(run, 1))
    for name, average in resumed.references.average.items():
        expected = loaded[name] if name in loaded else before.references.average[name]
        torch.testing.assert_close(full(average), full(expected), rtol=0, atol=0)


def test_a_bias_that_is_a_parameter_is_refused_by_both_settings_and_rounded_for_engines() -> None:
    """Ernie 4.5. Neither message sends to the other setting."""
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name in ("balance_loss", "balance_bias"):
        settings: dict[str, Any] = {"device": "cpu", name: 0.001}
        with pytest.raises(ConfigError, match=f"trainer.{name}: .*leave both out"):
            Policy(model, TrainerConfig(**settings))

    model._keep_in_fp32_modules_strict = None  # as AFMoE and Laguna, which transformers rounds
    tensors = published_tensors(model)
    (bias, *_) = [name for name in tensors if is_router_bias(name)]
    assert published_dtypes(model, tensors, torch.bfloat16)[bias] == torch.bfloat16
