"""Any number of ranks trains what one trains: the same curve, the same weights, from any
checkpoint."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle_cases
import pytest
import ranks_cases
import torch
import warm
from safetensors.torch import load_file
from trainer_fixtures import make_qwen3 as make_qwen3
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

TIED, UNTIED = "tied", "untied"
RECURRENT = "recurrent"
"""Its documents go through the model apart: ranks with fewer of them make calls for nothing."""
WITHHOLDING = "withholding"
"""It fails in the midst of a block when its rows are packed, and then trains apart."""
MIXTURE = "mixture"
EXPORT = {"token_export": {"enabled": True}}
# A small rate: of a gradient near zero, Adam makes a step of that size whose sign is rounding.
LORA = {"lora": {"rank": 4}, "optim": {"lr": 2e-3, "max_norm": 0.5}}
LORA_OF_EXPERTS = LORA | {"lora": {"rank": 4, "experts": True}}
SMALL = {"optim": {"lr": 2e-3, "max_norm": 0.5}}
MUON = {"optim": {"type": "muon", "lr": 1e-3, "max_norm": 0.5}}
# Adam would multiply the rounding of twenty steps.
MINIBATCHES = {"minibatches": 2, "epochs": 2, "optim": {"type": "sgd", "lr": 2e-2, "max_norm": 0.5}}
ANCHORED = {"ema_decay": 0.5, "optim": {"type": "sgd", "lr": 2e-2, "max_norm": 0.5}}
KEPT: dict[str, Any] = {"reshard_after_forward": False}
CONTEXT = {"context_parallel": 2}
"""Two ranks compute each row together."""
HEAD = {"heads": {"scores": {"lr": 2e-3}}, "optim": {"lr": 5e-4, "max_norm": 0.5}}
OWN_MODEL = {**HEAD, "heads": {"scores": {"lr": 1e-3, "own_model": True}}}

ORACLE = ["rollout", "group", "per_env"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, make_qwen3: Callable[..., PreTrainedModel]
) -> Path:
    """A folder of runs: on one rank, two and four, and on as many from the others' checkpoints."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, tied in ((TIED, True), (UNTIED, False)):
        model = make_qwen3(num_hidden_layers=3, tie_word_embeddings=tied)
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")

    models = {RECURRENT: recurrent(), WITHHOLDING: withholding(), MIXTURE: mixture()}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")

    def job(name: str, model: str = TIED, **more: Any) -> dict[str, Any]:
        trainer = more.pop("trainer", {})
        return {
            "run_dir": str(folder / name), "model": str(folder / model), "trainer": trainer, **more
        }  # fmt: skip

    def checkpoint(name: str) -> str:
        return str(folder / name / "checkpoints/step_2")

    sets = [
        (
            1,
            [
                job("one", trainer=EXPORT),
                job("one_untied", UNTIED),
                job("one_lora", trainer=LORA),
                job("one_experts", MIXTURE, trainer=LORA_OF_EXPERTS),
                job("one_muon", trainer=MUON),
                job("one_minibatches", trainer=MINIBATCHES, loss="old_ratio"),
                job("one_anchored", trainer=ANCHORED, loss="anchored"),
                job("one_head", trainer=HEAD),
                job("one_own_model", UNTIED, trainer=OWN_MODEL),
                job("one_recurrent", RECURRENT, trainer=SMALL),
                job("one_withholding", WITHHOLDING, trainer=SMALL),
            ],
        ),
        (
            4,
            [
                job("four", trainer=EXPORT),
                job("two_by_two", trainer={"dp_replicate": 2}),
                job("four_context", trainer={"context_parallel": 4}),
                job("four_context_by_two", trainer=CONTEXT),
                job("oracle_4", oracle=ORACLE),
                job("oracle_4_of_a_row", oracle=ORACLE, ranks_of_a_row=4),
            ],
        ),
        (
            2,
            [
                job("two"),
                job("two_kept", trainer=KEPT),
                job("two_anchored_kept", trainer=ANCHORED | KEPT, loss="anchored"),
                job("two_by_memory", broadcast="gloo"),
                job("two_replicas", trainer={"dp_replicate": 2}),
                job("two_untied", UNTIED, trainer={"activation_checkpointing": 1}),
                job("two_lora", trainer=LORA),
                job("two_experts", MIXTURE, trainer=LORA_OF_EXPERTS),
                job("two_muon", trainer=MUON),
                job("two_minibatches", trainer=MINIBATCHES, loss="old_ratio"),
                job("two_anchored", trainer=ANCHORED, loss="anchored"),
                job(
                    "two_anchored_from_one",
                    trainer=ANCHORED,
                    loss="anchored",
                    resume=checkpoint("one_anchored"),
                ),
                job("two_head", trainer=HEAD),
                job("two_head_replicas", trainer={**HEAD, "dp_replicate": 2}),
                job("two_head_rounded", trainer={**HEAD, "reduce_dtype": "bfloat16"}),
                job("two_own_model", UNTIED, trainer=OWN_MODEL),
                job(
                    "two_own_model_from_one",
                    UNTIED,
                    trainer=OWN_MODEL,
                    resume=checkpoint("one_own_model"),
                ),
                job("two_head_from_one", trainer=HEAD, resume=checkpoint("one_head")),
                job("two_recurrent", RECURRENT, trainer=SMALL),
                job("two_withholding", WITHHOLDING, trainer=SMALL),
                job("two_from_one", resume=checkpoint("one")),
                job("two_from_four", resume=checkpoint("four")),
                job("two_bad", bad=True, checkpoints=False),
                job("two_context", trainer=CONTEXT | EXPORT),
                job("two_context_from_one", trainer=CONTEXT, resume=checkpoint("one")),
                job("two_experts_context", MIXTURE, trainer=LORA_OF_EXPERTS | CONTEXT),
                job("two_minibatches_context", trainer=MINIBATCHES | CONTEXT, loss="old_ratio"),
                job("two_anchored_context", trainer=ANCHORED | CONTEXT, loss="anchored"),
                job("two_own_model_context", UNTIED, trainer=OWN_MODEL | CONTEXT),
                job("two_recurrent_context", RECURRENT, trainer=SMALL | CONTEXT),
                job("oracle_2", oracle=ORACLE),
                job("oracle_2_of_a_row", oracle=ORACLE, ranks_of_a_row=2),
            ],
        ),
        (
            1,
            [
                job("one_from_two", resume=checkpoint("two")),
                job("one_from_replicas", resume=checkpoint("two_by_two")),
                job("one_from_context", resume=checkpoint("two_context")),
            ],
        ),
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps(sets))
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = warm.run([sys.executable, ranks_cases.__file__, path], env=env)
    assert done.returncode == 0, done.stderr
    return folder


ENDS = {"vocab_size": ranks_cases.VOCAB, "hidden_size": 32, "intermediate_size": 48}
BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def recurrent() -> PreTrainedModel:
    """Qwen3.5: a layer of the gated delta rule, and one of attention."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        **ENDS,
        **BLOCKS,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        initializer_range=0.3,
    )
    return Qwen3_5ForCausalLM(config)


def withholding() -> PreTrainedModel:
    """StableLM's blocks do not hand on where documents begin."""
    torch.manual_seed(0)
    return StableLmForCausalLM(StableLmConfig(**ENDS, **BLOCKS, initializer_range=0.3))


def mixture() -> PreTrainedModel:
    """Four experts, of which a token uses two."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**ENDS, **BLOCKS, **experts, head_dim=8, initializer_range=0.3)
    return Qwen3MoeForCausalLM(config)


def curve(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "trainer.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"] for line in lines}


def reference_of(runs: Path, name: str) -> Path:
    """The run of one rank that it has to equal."""
    special = name.removeprefix("two").removesuffix("_from_one").removesuffix("_context")
    special = special.removesuffix("_replicas") if "head" in special else special
    return runs / (f"one{special}" if (runs / f"one{special}").exists() else "one")


def tolerance(name: str) -> float:
    """Muon multiplies in bfloat16, where the last bit of a gradient may become one of 2^-8. A
    token's ``k3`` magnifies a difference of log-probabilities by ``e^d - 1``, six times at 3.9. The
    others sum in another order, and Adam's first steps magnify that: 2e-5 was measured."""
    return 5e-4 if "muon" in name else 5e-5


COMPARED = (
    *("loss/", "entropy/", "mismatch_kl/", "optim/", "tokens/", "nll", "ref_kl", "logprob_"),
    *("minibatch/", "fit/"),
)

MANY = [
    *("four", "two_by_two", "two", "two_replicas", "two_untied", "two_lora", "two_muon"),
    *("two_experts", "two_by_memory", "two_minibatches", "two_anchored", "two_recurrent"),
    *("two_withholding", "two_head", "two_head_replicas", "two_own_model"),
    *("four_context", "four_context_by_two", "two_context", "two_experts_context"),
    *("two_minibatches_context", "two_anchored_context", "two_own_model_context"),
]
RESUMED = [
    "two_head_from_one",
    "two_own_model_from_one",  # nothing reads its LM head, which has no gradient and no state
    "two_anchored_from_one",
    "two_from_one",
    "two_from_four",
    "one_from_two",
    "one_from_replicas",
    "two_context_from_one",
    "one_from_context",
]


@pytest.mark.parametrize("name", ["two", "two_anchored"])
def test_weights_that_stay_gathered_change_no_bit(runs: Path, name: str) -> None:
    kept = curve(runs / f"{name}_kept")
    for step, metrics in curve(runs / name).items():
        own = {key: value for key, value in metrics.items() if key.startswith(COMPARED)}
        assert "loss/mean" in own and "optim/grad_norm" in own
        assert own == {key: kept[step][key] for key in own}


@pytest.mark.parametrize("name", [*MANY, *RESUMED])
def test_the_curve_is_that_of_one_rank(runs: Path, name: str) -> None:
    expected = curve(reference_of(runs, name))
    found = curve(runs / name)
    assert list(found) == ([3, 4, 5] if name in RESUMED else [1, 2, 3, 4, 5])
    for step, metrics in found.items():
        own = {key for key in expected[step] if key.startswith(COMPARED)}
        # Over micro batches, of which there are other ones.
        own -= {f"loss/{key}" for key in ("median", "std", "min", "max")}
        assert {"loss/mean", "optim/grad_norm", "tokens/rl"} <= own
        assert metrics.keys() >= own
        differences = {
            key: (metrics[key], expected[step][key])
            for key in own
            if metrics[key]
            != pytest.approx(expected[step][key], rel=tolerance(name), abs=tolerance(name))
        }
        assert not differences, f"step {step}"


def test_gradients_of_heads_are_summed_in_float32_where_others_are_rounded(runs: Path) -> None:
    """Of the first step: the weights before it are the same."""
    exact = curve(runs / "one_head")[1]
    rounded = curve(runs / "two_head_rounded")[1]
    errors = {
        name: abs(rounded[name] / exact[name] - 1)
        for name in ("optim/grad_norm", "optim/scores/grad_norm")
    }
    assert 1e-5 < errors["optim/grad_norm"] < 2**-8
    assert errors["optim/scores/grad_norm"] < 1e-6


def published(run: Path, step: int) -> dict[str, torch.Tensor]:
    (file,) = (run / f"broadcasts/step_{step}").glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize("name", [*MANY, *RESUMED])
def test_every_published_version_has_the_weights_of_one_rank(runs: Path, name: str) -> None:
    reference = reference_of(runs, name)
    moved = 0.0
    for step in (3, 5):
        found, expected = published(runs / name, step), published(reference, step)
        before = published(reference, 1)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=tolerance(name))
            moved = max(moved, float((tensor - before[key]).abs().max()))
    assert moved > 1e-3


def test_a_transport_sends_the_published_weights_and_files_only_if_wanted(
    runs: Path,
) -> None:
    received = load_file(runs / "two_by_memory/received.safetensors")
    expected = published(runs / "two", 1)
    assert received.keys() == expected.keys()
    assert all(received[name].equal(tensor) for name, tensor in expected.items())
    as_files = [
        step
        for step in range(1, 6)
        if list((runs / f"two_by_memory/broadcasts/step_{step}").glob("*.safetensors"))
    ]
    assert as_files == [2, 3, 4, 5]  # checkpoints and the end, and 3, which was wanted
    sizes = {name: curve(runs / name)[1]["perf/broadcast_mib"] for name in ("two", "two_by_memory")}
    assert sizes["two_by_memory"] == pytest.approx(sizes["two"], rel=0.05)  # a file has a header


def test_a_step_that_trains_nothing_moves_nothing_on_many_ranks(runs: Path) -> None:
    metrics = curve(runs / "four")
    assert [metrics[step]["optim/skipped"] for step in (3, 4, 5)] == [0, 1, 0]
    third, fourth = (
        load_file(runs / f"four/broadcasts/step_{step}/model.safetensors") for step in (3, 4)
    )
    assert all(third[name].equal(fourth[name]) for name in third)


def test_the_exported_folder_is_the_last_version_and_loads(runs: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(runs / "four/weights").state_dict()
    last = load_file(runs / "four/broadcasts/step_5/model.safetensors")
    assert all(exported[name].equal(tensor) for name, tensor in last.items())
    assert "lm_head.weight" not in last  # tied


def exported_tokens(run: Path, step: int) -> dict[tuple[int, ...], list[float | None]]:
    """Each sequence's logprobs, by its tokens."""
    folder = run / f"token_exports/step_{step}"
    assert (folder / "STABLE").exists()
    lines = [json.loads(x) for path in folder.glob("rank_*") for x in path.read_text().splitlines()]
    return {tuple(line["token_ids"]): line["trainer_logprobs"] for line in lines}


def test_every_rank_exports_its_own_tokens(runs: Path) -> None:
    for step in (1, 3):
        expected, found = (exported_tokens(runs / name, step) for name in ("one", "four"))
        assert found.keys() == expected.keys()
        for tokens, logprobs in expected.items():
            assert found[tokens] == [None if x is None else pytest.approx(x) for x in logprobs]
    assert len(list((runs / "four/token_exports/step_1").glob("rank_*"))) == 4


def test_bad_steps_end_all_ranks_with_one_message_that_names_the_rollout(runs: Path) -> None:
    first, second = ((runs / f"two_bad/error_{rank}").read_text() for rank in (0, 1))
    assert first == second != ""
    assert (
        "step 3: the gradient norm is nan" in first or "step 3: the gradient norm is inf" in first
    )
    assert "Most conspicuous: env 'code', rank " in first
    begun = load_file(runs / "tied/model.safetensors")
    last = load_file(runs / "two_bad/broadcasts/step_2/model.safetensors")
    assert all(begun[name].equal(tensor) for name, tensor in last.items())


def test_ranks_of_a_row_count_its_tokens_once(runs: Path) -> None:
    one, two, four = (
        curve(runs / name)[1] for name in ("one", "two_context", "four_context_by_two")
    )
    assert one["tokens/rl"] == two["tokens/rl"] == four["tokens/rl"]
    expected, found = (exported_tokens(runs / name, 1) for name in ("one", "two_context"))
    assert found.keys() == expected.keys()
    files = (runs / "two_context/token_exports/step_1").glob("rank_*")
    assert sorted(len(file.read_text().splitlines()) > 0 for file in files) == [False, True]


def test_a_recurrent_model_is_refused_where_several_ranks_compute_a_row(runs: Path) -> None:
    errors = [(runs / f"two_recurrent_context/error_{rank}").read_text() for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert "Leave trainer.context_parallel out, or train a model of another" in errors[0]


@pytest.mark.parametrize("ranks", ["2", "4", "2_of_a_row", "4_of_a_row"])
@pytest.mark.parametrize("case", ORACLE)
def test_scopes_and_divisors_over_ranks_are_those_of_transformers_sequence_by_sequence(
    runs: Path, case: str, ranks: str
) -> None:
    model = oracle_cases.in_double(AutoModelForCausalLM.from_pretrained(runs / TIED))
    rollouts = oracle_cases.rollouts_of(oracle_cases.losses_of(case))
    loss, gradient = oracle_cases.reference(model, rollouts, case)
    found_loss, found = torch.load(runs / f"oracle_{ranks}" / case)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert oracle_cases.distance(found, gradient) < oracle_cases.ROUNDING
