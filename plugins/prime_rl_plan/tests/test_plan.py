"""What plan foresees, beside published sizes, real steps, another tracker and sums worked out by
hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from typer.testing import CliRunner

from prime_rl import ConfigError, PluginConfig
from prime_rl.config.run import WeightBroadcastConfig
from prime_rl.rundir.machine import VISIBLE
from prime_rl_app.cli.app import app
from prime_rl_plan.advice import advise
from prime_rl_plan.architecture import active_share, kv_bytes
from prime_rl_plan.devices import GIB, ON_HOST, SHEETS, Machines, here, parse
from prime_rl_plan.devices import MIB as CARDS
from prime_rl_plan.estimate import (
    Plan,
    Side,
    copy_to_send,
    engine_side,
    gpus_of_copy,
    kv_copies,
)

MIB = 2**20
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "configs" / "recipes"
RECIPES = sorted(each.stem for each in FOLDER.glob("*.toml"))
NUMBERS = {"one": 1, "two": 2, "four": 4, "eight": 8}
MACHINES = re.compile(r"(?:(\w+) machines of )?(\w+) (?:GPUs? of )?(\d+) GB")
"""In the header of a recipe: "one GPU of 24 GB", "two machines of eight 80 GB GPUs"."""


def machines_of(name: str) -> list[str]:
    """The machines that a recipe's header names, for ``--gpus``: with the card of that size that
    has the least memory, and, as a common one, the H100."""
    lines = (FOLDER / f"{name}.toml").read_text().splitlines()
    match = MACHINES.search(" ".join(line for line in lines if line.startswith("#")))
    assert match is not None, f"{name}: the header names no machine"
    nodes, count = (NUMBERS[(each or "one").lower()] for each in match.group(1, 2))
    size = int(match[3])
    cards = [card for card, sold in CARDS if sold == size]
    smallest = min(cards, key=lambda card: CARDS[card, size])
    chosen = {f"{smallest.replace(' ', '')}-{size}", "H100-80"}
    return [f"{nodes}x{count}x{card}" for card in sorted(chosen)]


WHAT = re.compile(r"\[|#|$|(name|id|type|args|tasks|max_steps|base_url|num_examples) =")
"""Lines of a recipe that say what it is."""


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def table_of(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((files("prime_rl_plan") / f"models/{name}.json").read_text())
    return table


# -- machines and architectures ------------------------------------------------------------------


def test_machines_are_parsed() -> None:
    assert parse("8xH100-80") == Machines(
        "H100 80 GB", 1, 8, 81559 * MIB, 989e12, 67e12, 3350e9, 450e9
    )
    two = parse("2x8xa100-40")
    assert (two.nodes, two.total, two.memory, two.bandwidth) == (2, 16, 40 * GIB, 1555e9)
    assert parse("1xRTX4090").memory == 24564 * MIB
    with pytest.raises(ConfigError, match=r"8xH100-80 .*known names are A10, A100"):
        parse("8xV100-16")
    for spec in ("0xH100-80", "2x0xH100-80", "0x8xH100-80"):
        with pytest.raises(ConfigError, match="expected COUNTxNAME-GB"):
            parse(spec)


def test_every_card_of_a_data_sheet_has_its_real_memory() -> None:
    """At most what it is sold with, and more than nine tenths of it."""
    for name, (sold, *_) in SHEETS.items():
        assert 0.9 * sold * GIB < parse(f"1x{name}").memory <= sold * 1.02 * GIB, name
    # A size that no table knows: the share that the known card has.
    assert parse("1xH100-40").memory == pytest.approx(40 * 81559 / 80 * MIB)


@pytest.mark.parametrize(
    ("line", "name", "mebibytes"),
    [
        ("NVIDIA H100 80GB HBM3, 81559", "H100 80 GB", 81559),
        ("NVIDIA H100 NVL, 95830", "H100 94 GB", 95830),
        ("NVIDIA A100-SXM4-40GB, 40536", "A100 40 GB", 40536),  # of an older driver
        ("NVIDIA L4, 23034", "L4 24 GB", 23034),
    ],
)
def test_this_machines_cards_have_the_memory_that_the_driver_shows(
    line: str, name: str, mebibytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{line}'\necho '{line}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machines = here()
    assert (machines.name, machines.count) == (name, 2)
    assert machines.memory == mebibytes * MIB


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-30B-A3B", 30_532_122_624),
    ],
)
def test_shipped_architectures_have_the_published_number_of_weights(
    name: str, weights: int
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from prime_rl_plan.measure import with_layers

    table = table_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(with_layers(table, table["num_hidden_layers"]))
    assert sum(each.numel() for each in model.parameters()) == weights


def test_kv_and_active_weights_by_hand() -> None:
    # 2 * 36 layers * 8 heads * 128 * 2 bytes
    assert kv_bytes(table_of("Qwen3-8B"), 2) == 147_456
    # Of 128 experts with 3 * 2048 * 768 weights in 48 layers, 120 rest: "A3B".
    active = active_share(table_of("Qwen3-30B-A3B"), 30_532_122_624) * 30_532_122_624
    assert active == 30_532_122_624 - 120 * 48 * 3 * 2048 * 768
    assert active_share(table_of("Qwen3-8B"), 8e9) == 1.0


def test_latent_keys_and_layers_without_experts_count_as_deepseek_v3_has_them():
    """61 layers of 512 + 64 numbers in bfloat16 are 70 KB a token. Of 671B weights a token meets
    37B (arXiv:2412.19437): 58 layers have 256 experts of 3 * 7168 * 2048, of which it takes 8."""
    table = {
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
    }
    assert kv_bytes(table, 2) == 70_272
    assert 36e9 < active_share(table, 671e9) * 671e9 < 39e9


@pytest.mark.parametrize(("latent", "copies"), [(512, 8), (None, 1)])
def test_tensor_parallelism_divides_heads_and_no_latent(latent: int | None, copies: int) -> None:
    settings = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    engine = SimpleNamespace(config=SimpleNamespace(model_dump=lambda: settings))
    facts: Any = SimpleNamespace(table={"kv_lora_rank": latent}, engine=engine)
    assert kv_copies(facts) == copies


def test_prefill_engines_have_copies_of_the_weights_of_their_own() -> None:
    """Two GPUs for each of three engines: half of the weights on a GPU, not a sixth."""
    settings = {"tensor_parallel_size": 2, "prefill_engines": 2}
    config = SimpleNamespace(model_dump=lambda: settings)
    facts: Any = SimpleNamespace(engine=SimpleNamespace(config=config, num_gpus=6))
    assert gpus_of_copy(facts) == 2


@pytest.mark.parametrize(
    ("table", "free", "size"),
    [
        ({"type": "nccl"}, 23.99, 20),  # of 79.6 GiB, 3.98 stay free
        ({"type": "nccl"}, 23.97, 0),
        ({"type": "nccl", "overlap": True}, 1, 20),
        ({"type": "nccl", "overlap": False}, 70, 0),
        ({"type": "gloo"}, 70, 0),  # on the host
    ],
)
def test_the_copy_that_nccl_sends_counts_where_the_trainer_makes_it(
    table: dict[str, Any], free: float, size: float
) -> None:
    """10 Gi weights in bfloat16."""

    config = SimpleNamespace(
        weight_broadcast=WeightBroadcastConfig.model_validate(table),
        trainer=SimpleNamespace(publish_dtype="bfloat16"),
    )
    facts: Any = SimpleNamespace(
        config=config, adapts=False, measured={"published": 10 * GIB}, machines=parse("1xH100-80")
    )
    assert copy_to_send(facts, free * GIB) == size * GIB


@pytest.mark.parametrize(
    ("largest", "on_the_way"),
    [(2**29, 2 * 2**30 + 64 * 2**20), (2**10, 3 * 64 * 2**20)],  # a large weight; a bucket
)
def test_a_shared_gpu_holds_the_largest_weight_twice_while_the_engine_copies_it(
    largest: int, on_the_way: int
) -> None:
    """In bfloat16. The rest of the card is the engine's, contexts of CUDA excepted."""
    config = SimpleNamespace(
        weight_broadcast=WeightBroadcastConfig(type="ipc"),
        trainer=SimpleNamespace(publish_dtype="bfloat16"),
        inference=SimpleNamespace(max_model_len=None),
        seq_len=1024,
    )
    engine = SimpleNamespace(num_gpus=1, config=PluginConfig())
    machines = parse("1xH100-80")
    facts: Any = SimpleNamespace(
        config=config, adapts=False, measured={"largest": largest}, machines=machines, weights=8e9,
        size=2, engine=engine, table=table_of("Qwen3-8B"), other_context=GIB, in_flight=8,
    )  # fmt: skip
    side, _ = engine_side(facts)
    assert side.parts["weights on their way"] == on_the_way
    assert side.limit == machines.memory - 2 * GIB
    assert side.total == pytest.approx(0.9 * machines.memory + on_the_way)


def test_advice_adds_changes_until_it_fits() -> None:
    from prime_rl_app.config import load_config

    config = load_config([], ["--model.name", "o/m", "--max_steps", "1", "--seq-len", "100"])
    trainer = config.trainer.model_copy(update={"micro_batch_tokens": 400})
    config = config.model_copy(update={"trainer": trainer})
    needs = {(): 50.0, ("true",): 48.0, ("true", "1"): 40.0, ("true", "1", "100"): 20.0}

    def plan(values: tuple[str, ...]) -> Plan:
        side, machines = Side({}, 30.0, needs[values]), Machines(nodes=1, count=1)
        others: dict[str, Any] = {"tokens": 1, "rows": 1, "concurrency": 1}
        facts = SimpleNamespace(ranks=1, measured={"keeps_gathered": not values})
        others |= {"update": 0.0, "seconds": {}, "facts": facts}
        return Plan(config, machines, [], side, None, {}, **others)

    changes, found = advise(plan(()), lambda given: plan(tuple(value for _, value in given)))
    assert changes == [
        ("trainer.reshard_after_forward", "true"),
        ("trainer.activation_checkpointing", "1"),
        ("trainer.micro_batch_tokens", "100"),
    ]
    assert found.fits


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many weights", "many tokens", "large vocabulary, recomputed"])
def test_the_peak_of_a_real_step_on_cpu_is_foreseen_within_a_tenth(name: str) -> None:
    from bench import plan

    assert plan.planned(plan.cpu_request(name)) == pytest.approx(plan.measured(name), rel=0.1)


@pytest.mark.slow
def test_upstreams_peak_of_one_h100_is_foreseen_within_a_tenth() -> None:
    from bench import plan

    *request, published = plan.PUBLISHED["Qwen3-0.6B, 16k"]
    assert published == 12.5
    assert plan.planned(plan.gpu_request(*request)) == pytest.approx(published, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [0, 1])
def test_another_tracker_sees_the_same_peak_on_fake_cuda_tensors(
    tmp_path: Path, recomputed: int
) -> None:
    """torch's MemTracker, on the tensors of our permanent tests; eight layers, none of which is
    extrapolated there and three of which are here."""
    import fake_cuda
    from bench import plan

    if fake_cuda.lacks():
        pytest.skip(f"needs {fake_cuda.lacks()}")
    settings = {"activation_checkpointing": recomputed}
    request = plan.gpu_request("Qwen3-0.6B", 1, 4096, settings) | {"rows": 1}
    request["model"]["num_hidden_layers"] = 8
    script = Path(__file__).with_name("mem_tracker.py")
    command = [sys.executable, str(script), str(tmp_path)]
    text = json.dumps(request)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    tracked = json.loads(done.stdout.splitlines()[-1])["Total"] / GIB
    assert plan.planned(request) == pytest.approx(tracked, rel=0.01)


@pytest.mark.slow
def test_moments_that_are_off_the_gpu_count_as_host_memory() -> None:
    recipe = str(ROOT / "configs/recipes/opd_qwen3.toml")
    command = [sys.executable, "-m", "prime_rl", "plan", recipe, "--gpus=2xH100-80", "--json"]
    done = warm.run([*command, "--trainer.optim.type=adamw_offload"], timeout=300)
    found = json.loads(done.stdout)
    # Two float32 numbers per weight, in blocks of 512 bytes; two copies in the engine's dtype.
    assert found["host"] == {
        ON_HOST: pytest.approx(8 * 596_049_920, rel=1e-4),
        "weights on their way to files (two copies at most)": 2 * 2 * 596_049_920,
    }
    assert "optimizer" not in found["trainer"]["parts"]
    assert found["trainer"]["parts"]["weights"] > 4 * 596_049_920 - 1
    assert found["update"] == 2 * 596_049_920  # the engine's dtype


# -- recipes -------------------------------------------------------------------------------------


@pytest.fixture
def without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for a machine without the hub and without vLLM: questions in a file, and an
    interpreter that says it has vLLM."""
    questions, python = tmp_path / "questions.jsonl", tmp_path / "python"
    questions.write_text('{"question": "2 + 3?", "answer": "#### 5"}\n')
    versions = json.dumps({"vllm": "0.32.0", "prime-rl-vllm": version("prime-rl-vllm")})
    python.write_text(f"#!/bin/sh\necho '{versions}'\n")
    python.chmod(0o755)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path / "cache"))
    return [f"--inference.python={python}", f"--output-dir={tmp_path / 'out'}", str(questions)]


def with_local_questions(recipe: Path, questions: str) -> list[str]:
    """Overrides that replace datasets of the hub by a local file."""
    found = []
    for part, envs in tomllib.loads(recipe.read_text())["orchestrator"].items():
        for number, env in enumerate(envs["env"] if part in ("train", "eval") else ()):
            if "dataset" in env.get("args", {}):
                args = f'{{ path = "{questions}" }}'
                found.append(f"--orchestrator.{part}.env.{number}.args={args}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_a_dry_run_and_fits_its_machines(
    name: str, without_a_hub: list[str]
) -> None:
    recipe = ROOT / f"configs/recipes/{name}.toml"
    *overrides, questions = without_a_hub
    command = [sys.executable, "-m", "prime_rl"]
    local = with_local_questions(recipe, questions)
    for arguments in (
        ["run", str(recipe), "--dry-run", *overrides, *local],
        *(["plan", str(recipe), "--gpus", each, *overrides] for each in machines_of(name)),
    ):
        done = warm.run([*command, *arguments], timeout=1800, cwd=ROOT)
        assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.stdout.startswith("valid") or done.stdout.endswith("fits\n")
        assert "refuse" not in done.stdout


def test_recipes_are_planned_on_the_smallest_card_of_the_size_that_they_name() -> None:
    found = {name: machines_of(name) for name in RECIPES}
    assert found["qwen3_0.6b_gsm8k"] == ["1x1xA10-24", "1x1xH100-80"]  # 22.5 and 79.6 GiB
    assert found["qwen3_30b_a3b"] == ["2x8xH100-80"]
    assert found["qwen3_30b_a3b_32k"] == ["4x8xH100-80"]
    assert found["qwen3_8b_32k"] == ["1x8xH100-80"]
    assert found["tool_agent"] == found["mixed_judge"] == ["1x2xH100-80"]


@pytest.mark.parametrize("name", RECIPES)
def test_each_line_of_a_recipe_that_sets_a_number_has_its_reason_beside_it(name: str) -> None:
    """Names of models, tasks and algorithms say what the recipe is; the rest is a choice."""
    for line in (ROOT / f"configs/recipes/{name}.toml").read_text().splitlines():
        assert WHAT.match(line) or "  # " in line, line


@pytest.mark.slow
def test_a_run_is_planned_by_its_name_and_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the run resolved: its overrides are in its config."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VISIBLE, "")
    started = ["run", str(ROOT / "configs/reverse_text/grpo.toml"), "--run.name", "mine"]
    started += ["--model.name", "Qwen/Qwen3-0.6B", "--dry-run", "--quick"]
    first, *others = (
        CliRunner().invoke(app, [*arguments, "--gpus", "1xH100-80"] if plan else arguments)
        for plan, arguments in (
            (False, started), (True, ["plan", "mine"]), (True, ["plan", "outputs/mine"]),
            (True, ["plan", "outputs/mine/configs/run.json"]), (True, ["plan", "yours"]),
        )
    )  # fmt: skip
    assert first.exit_code == 0, first.output
    assert len({result.stdout for result in others[:3]}) == 1
    assert others[0].stdout.endswith("fits\n")
    assert "no run 'yours'" in str(others[3].exception)
