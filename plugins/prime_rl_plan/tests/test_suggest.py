"""``prime-rl plan --suggest``: the fastest divisions of GPUs, for costs that are given here.

Other tests measure what a step costs. The rules of a run, the time of sampling and the memory of
engines are the real ones.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from prime_rl import ConfigError
from prime_rl.config.trainer import TrainerConfig
from prime_rl_app.cli.app import app
from prime_rl_plan import estimate as estimates
from prime_rl_plan import places
from prime_rl_plan.devices import GIB, HOST, NETWORK, ON_HOST, parse
from prime_rl_plan.estimate import Plan, estimate
from prime_rl_plan.suggest import (
    EXPERTS,
    Suggestion,
    divisors,
    expert_groups,
    faster_network,
    layouts,
    suggest,
    toml_lines,
)

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "configs/recipes/qwen3_8b_32k.toml"
HALVES = """
deployment.colocated = false
inference.replicas = 4
trainer.num_ranks = 4
weight_broadcast.type = "nccl"
"""
"""Four GPUs sample, four train."""
FILES: tuple[Path, ...] = (RECIPE,)
"""With ``HALVES`` in a test of known costs."""
WEIGHTS = 8_190_735_360
ROW_SECONDS = 4.8
"""Of a row of 32,768 tokens."""
OTHERS = 28 * GIB
"""Of a rank besides its state, with recomputed activations."""


def costs(config: Any, *_: Any, ranks: int, network: float = 0.0, **__: Any) -> dict[str, Any]:
    """As ``measure.py`` answers for Qwen3-8B, in whole numbers."""
    trainer = config.trainer
    offloaded = trainer.optim.type == "adamw_offload"
    shards = ranks // trainer.dp_replicate
    parts: dict[str, float] = {
        "weights": 4 * WEIGHTS / shards,
        "gradients": 4 * WEIGHTS / shards,
        ON_HOST if offloaded else "optimizer": 8 * WEIGHTS / shards,
        "activations": OTHERS * (1 if trainer.activation_checkpointing else 20),
    }
    update = parts | {"total": sum(parts.values())}
    return {
        "weights": WEIGHTS,
        "trained": WEIGHTS,
        "published": WEIGHTS,
        "largest": 622_329_856,
        "layers": [3, 5],
        "inputs_on_host": 0.0,
        "peaks": {"top": update, "update": update},
        "costs": {
            "rows_seconds": ROW_SECONDS,
            "update_seconds": 0.1,
            f"rows_network/shared/{ranks}/{ranks}": network / trainer.dp_replicate,
        },
    }


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "halves.toml").write_text(HALVES)
    monkeypatch.setattr(sys.modules[__name__], "FILES", (RECIPE, tmp_path / "halves.toml"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(estimates, "measure", costs)
    versions = {"vllm": "0.32.0", "prime-rl-vllm": version("prime-rl-vllm")}
    monkeypatch.setattr("prime_rl_vllm.interpreter._installed", lambda *_: versions)
    monkeypatch.setattr("prime_rl_app.libraries.libraries", lambda _: {})


def planned(gpus: str, overrides: Sequence[str] = (), *more: Path) -> Plan:
    machines = parse(gpus)
    files = [str(file) for file in (*FILES, *more)]
    placed = places.read(files, [*overrides], machines)
    where = (placed.config, placed.hooks, placed.engine, placed.ranks, placed.places)
    return estimate(*where, machines)


def suggested(gpus: str, *overrides: str) -> list[Suggestion]:
    def again(changes: Sequence[tuple[str, str]]) -> Plan:
        return planned(gpus, [*overrides, *(f"--{key}={value}" for key, value in changes)])

    return suggest(planned(gpus, overrides), again)


def test_eight_gpus_take_turns_before_any_division(known_costs: None) -> None:
    first, second, third = suggested("8xH100-80")
    of_recipe = planned("8xH100-80").seconds["step"]
    assert first.layout.describe(1) == "8 GPUs in turns"
    assert second.layout.describe(1) == "6 GPUs sample, 2 train"  # with moments on the host
    assert third.layout.describe(1) == "5 GPUs sample, 3 train"
    # 256 samples: 32 of each rank, one per row.
    assert first.plan.seconds["train"] == pytest.approx(32 * ROW_SECONDS + 0.1)
    moved = 12 * WEIGHTS / 8 + 2 * WEIGHTS  # the trainer's shard; the engine's bfloat16 weights
    assert first.plan.seconds["move"] == pytest.approx(2 * moved / HOST)
    assert first.seconds == pytest.approx(
        sum(first.plan.seconds[key] for key in ("train", "sample", "move"))
    )
    # Engines set the pace: four of the recipe, six and five of the suggestions.
    assert second.seconds / of_recipe == pytest.approx(4 / 6, rel=0.05)
    assert third.seconds / of_recipe == pytest.approx(4 / 5, rel=0.05)
    assert first.seconds < second.seconds < third.seconds < of_recipe
    assert second.reason == (
        "bound by sampling; the trainer works 40% of the time; 30.5 GiB of moments of each rank "
        "lie on the host"
    )


def test_the_lines_of_toml_make_the_layout(known_costs: None, tmp_path: Path) -> None:
    for suggestion in suggested("8xH100-80"):
        file = tmp_path / "layout.toml"
        file.write_text("\n".join(toml_lines(suggestion.changes)))
        tables = tomllib.loads(file.read_text())
        assert tables["trainer"]["num_ranks"] == suggestion.layout.ranks
        plan = planned("8xH100-80", (), file)
        assert plan.seconds == suggestion.plan.seconds
        assert plan.ranks == suggestion.layout.ranks
        assert plan.config.inference.replicas == suggestion.layout.replicas
        assert plan.config.deployment.colocated == suggestion.layout.colocated
    turns = dict(suggested("8xH100-80")[0].changes)
    assert turns["weight_broadcast.type"] == '"filesystem"'  # nccl cannot share GPUs


@pytest.mark.parametrize("update", [0.1, 100.0])
def test_copies_of_the_model_where_the_network_limits(
    known_costs: None, monkeypatch: pytest.MonkeyPatch, update: float
) -> None:
    """The network takes longer than the rows, however long the optimizer steps."""

    def slow(*given: Any, **named: Any) -> dict[str, Any]:
        answer = costs(*given, **named, network=5e13)
        answer["costs"]["update_seconds"] = update
        return answer

    monkeypatch.setattr(estimates, "measure", slow)
    best = suggested("8xB200-180")[0]
    copies = dict(best.changes)["trainer.dp_replicate"]
    assert copies == "8" and "8 copies of the model: less to gather" in best.reason
    assert best.plan.seconds["train"] == pytest.approx(32 * 5e13 / 8 * 7 / 8 / 900e9 + update)


MIXTURE = ROOT / "configs/recipes/qwen3_30b_a3b_32k.toml"


def test_tokens_stay_on_a_machine_where_experts_of_two_machines_limit_the_trainer(
    known_costs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen ranks gather all experts over the network, or send it their tokens; groups of eight
    gather an eighth. Two copies of the model take twice the memory."""

    def of_group(config: Any, *given: Any, ranks: int, **named: Any) -> dict[str, Any]:
        answer = costs(config, *given, ranks=ranks, **named)
        group = config.trainer.expert_ranks(ranks)
        gathered = 2e14 / group if group < ranks else 0.0
        answer["costs"]["rows_network/shared/16/16"] = gathered
        answer["costs"][f"rows_network/sent/{group}/{group}"] = 1e14 if group > 1 else 0.0
        state = 16 * 30e9 / (ranks // config.trainer.dp_replicate)
        for peak in answer["peaks"].values():
            peak["total"] += state
        return answer

    monkeypatch.setattr(sys.modules[__name__], "FILES", (MIXTURE,))
    monkeypatch.setattr(estimates, "measure", of_group)
    plan = planned("4x8xH100-80")
    assert expert_groups(plan, 16, 2) == [(EXPERTS, "8"), (EXPERTS, "true")]
    assert expert_groups(plan, 8, 1) == [(EXPERTS, "true")]
    assert expert_groups(plan, 12, 2) == []  # 128 experts

    def again(changes: Sequence[tuple[str, str]]) -> Plan:
        return planned("4x8xH100-80", [f"--{key}={value}" for key, value in changes])

    faster, changes = faster_network(plan, {}, again)
    assert changes == {EXPERTS: "8"}
    rows = 32
    tokens = rows * 1e14 * 7 / 8 / 450e9
    experts = rows * 2e14 / 8 * 15 / 16 / NETWORK
    assert faster.seconds["train"] == pytest.approx(experts + tokens + 0.1)


@settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    count=st.integers(1, 8),
    card=st.sampled_from(["H100-80", "A100-40", "B200-180", "H200"]),
    parallel=st.sampled_from([1, 2, 4]),
    recomputed=st.sampled_from([0, 1]),
)
def test_every_suggestion_fits_its_gpus(
    known_costs: None, count: int, card: str, parallel: int, recomputed: int
) -> None:
    overrides = [f"--inference.vllm.tensor_parallel_size={parallel}", "--trainer.num_ranks=1"]
    overrides += [f"--trainer.activation_checkpointing={recomputed}", "--inference.replicas=1"]
    if count < 2 or parallel > count - 1:
        overrides += ["--deployment.colocated=true", "--weight_broadcast.type=filesystem"]
    if parallel > count:
        return
    if "--deployment.colocated=true" in overrides:
        overrides[1] = f"--trainer.num_ranks={count}"
    suggestions = suggested(f"{count}x{card}", *overrides)
    assert len(suggestions) <= 3
    assert sorted(each.seconds for each in suggestions) == [each.seconds for each in suggestions]
    for each in suggestions:
        assert each.plan.fits
        layout = each.layout
        sampling = layout.replicas * parallel
        assert (max if layout.colocated else sum)((sampling, layout.ranks)) <= count
        assert sampling > 0 and layout.ranks > 0


def test_no_gpu_stays_idle_that_an_engine_could_have(known_costs: None) -> None:
    two = planned(
        "8xH100-80", ["--inference.vllm.tensor_parallel_size=2", "--inference.replicas=2"]
    )
    found = {(each.replicas, each.ranks) for each in layouts(two) if not each.colocated}
    assert found == {(3, 2), (2, 4), (1, 6)}  # an odd number of ranks would leave one over
    assert {each.ranks for each in layouts(two) if each.colocated} == {8}
    assert [*divisors(12)] == [2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["--inference.replicas=0"], "starts no engine"),
        (["--deployment.trainer_gpus=[4, 5, 6, 7]"], "divides them already"),
        (["--trainer.device=cpu"], 'trainer.device is "cpu"'),
    ],
)
def test_what_cannot_be_divided_is_named(
    known_costs: None, overrides: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        suggested("8xH100-80", *overrides)


def test_the_command_prints_layouts_or_json(known_costs: None) -> None:
    arguments = ["plan", str(RECIPE), "--gpus", "8xH100-80", "--suggest"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("as it is   ")
    assert lines[1].startswith("layout 1   8 GPUs in turns: at least train ")
    assert lines[2].startswith("memory     trainer ") and "of 78.6 GiB, engine" in lines[2]
    assert lines[3].startswith("reason     no GPU waits for another: sampling ")
    assert lines[4:8] == [
        "           [deployment]",
        "           colocated = true",
        "           [inference]",
        "           replicas = 8",
    ]
    table = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [each["layout"] for each in table] == [
        "8 GPUs in turns",
        "6 GPUs sample, 2 train",
        "5 GPUs sample, 3 train",
    ]
    assert tomllib.loads(table[1]["toml"])["trainer"]["optim"] == {"type": "adamw_offload"}


def test_nothing_fits_a_small_card(known_costs: None) -> None:
    arguments = ["plan", str(RECIPE), "--gpus", "8xL4-24", "--suggest"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 1
    assert "no division of these GPUs fits" in shown.stdout


def test_a_config_whose_division_does_not_fit_the_machine_is_divided_anew(
    known_costs: None, tmp_path: Path
) -> None:
    """The recipe has eight ranks, and the machine four GPUs."""
    arguments = ["plan", str(RECIPE), "--gpus", "4xH200", "--suggest"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("as it is   not on these machines: trainer.num_ranks is 8")
    assert lines[1].startswith("layout 1   4 GPUs in turns: ")
    for each in json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout):
        file = tmp_path / "layout.toml"
        file.write_text(each["toml"])
        assert planned("4xH200", (), file).seconds == each["plan"]["seconds"]


def test_several_machines_need_a_launcher_that_uses_them(known_costs: None, tmp_path: Path) -> None:
    """The recipe has the launcher of one machine."""
    arguments = ["plan", str(RECIPE), "--gpus", "2x8xH100-80", "--suggest"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert ", on one of these machines" in shown.stdout.splitlines()[0]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    tables = tomllib.loads(found[0]["toml"])
    assert tables["launcher"] == {"type": "ray"}
    assert tables["rollout_transport"] == {"host": "0.0.0.0"}
    assert tables["inference"]["replicas"] + tables["trainer"]["num_ranks"] == 16

    # A division of the GPUs is suggested once, and not again with its trainer on other machines.
    divisions = {
        (tables["inference"]["replicas"], tables["trainer"]["num_ranks"])
        for tables in (tomllib.loads(each["toml"]) for each in found)
    }
    assert len(divisions) == len(found)


@pytest.mark.parametrize(
    ("trainer", "num_experts", "ranks", "expected"),
    [
        ({}, 128, 8, ["true"]),
        ({"lora": {"rank": 4}}, 128, 8, ["true"]),
        ({"lora": {"rank": 4, "experts": True}}, 128, 8, ["true"]),
        ({"expert_parallel": True}, 128, 8, []),  # tokens travel already
        ({"compile": True}, 128, 8, []),
        ({}, 0, 8, []),
        ({}, 128, 6, []),
        ({"dp_replicate": 3}, 128, 6, ["true"]),
    ],
)
def test_tokens_travel_to_experts_where_a_run_allows_it_with_adapters_too(
    trainer: dict[str, Any], num_experts: int, ranks: int, expected: list[str]
) -> None:
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(trainer=TrainerConfig.model_validate(trainer)),
        facts=SimpleNamespace(table={"num_experts": num_experts}),
    )
    assert [value for _, value in expert_groups(plan, ranks, nodes=1)] == expected
