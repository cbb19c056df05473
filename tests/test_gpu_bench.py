"""``python -m bench.gpu``: every stage runs on CPU at toy size, what fails says so, and
figures of a GPU alone are recorded. And which wheels a machine without a registry needs.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import warm
from bench.gpu import __main__ as command
from bench.gpu import device, results, runs, stages, trainer, wheels
from bench.records import read
from tools.docs.figures import filled

SKIPPED = {"facts", "compiled", "broadcast"}
"""Stages that say nothing without a GPU."""


@pytest.mark.slow
def test_every_stage_runs_at_toy_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"Popen": warm.Popen, "STDOUT": subprocess.STDOUT}
    parts["TimeoutExpired"] = subprocess.TimeoutExpired
    monkeypatch.setattr(stages, "subprocess", SimpleNamespace(**parts))
    failed = command.main(["--out", str(tmp_path), "--minutes", "60"])
    shown = capsys.readouterr().out
    assert failed == 0, shown
    table = json.loads((tmp_path / "results.json").read_text())["stages"]
    states = {name: each["state"] for name, each in table.items()}
    assert states == {name: "skipped" if name in SKIPPED else "ok" for name in stages.STAGES}
    assert [line.split()[0] for line in shown.splitlines()[1 : 1 + len(stages.STAGES)]] == [
        *stages.STAGES
    ]
    figures = {name: device.flat(each["figures"]) for name, each in table.items()}
    rate = figures["trainer"]["packed.recompute.rate_tokens_per_s"]
    assert rate == pytest.approx(2 * 256 / figures["trainer"]["packed.recompute.step_s"])
    assert "packed.recompute.mfu_percent" not in figures["trainer"]  # a CPU's peak is unknown
    assert 0 < figures["first_run"]["last_reward"] < 1
    assert figures["recipe"]["rate_tokens_per_s"] > 0
    assert 0.4 < figures["recipe"]["first_reward"] < 0.6  # half of the vocabulary earns
    assert 0 < figures["on_policy"]["mismatch_kl"] < 1e-6
    assert (tmp_path / "logs.tar").exists() and not [*tmp_path.glob("*.log")]
    with pytest.raises(ValueError, match="without a GPU"):
        results.record_results(tmp_path / "results.json", tmp_path / "records.json")


def test_packed_rows_are_full_and_long_ones_one_sequence() -> None:
    rng = np.random.default_rng(0)
    assert trainer.lengths_of("long", 640, rng) == [640]
    packed = trainer.lengths_of("packed", 640, rng)
    assert sum(packed) == 640
    assert len(packed) >= 8
    assert all(20 <= length < 80 for length in packed[:-1])


@pytest.mark.parametrize(
    ("code", "text", "state", "said"),
    [
        (0, 'noise\nRESULT {"step_s": 1.5}\n', "ok", "step_s 1.5"),
        (0, 'RESULT {"skipped": "no GPU"}\n', "skipped", "no GPU"),
        (0, "ended early\n", "FAILED", "ended early"),
        (1, "Traceback\nAssertionError: expected a GPU\n", "FAILED", "expected a GPU"),
        (-11, "", "FAILED", "why"),
        (None, "step 1\nstep 2\n", "TIMEOUT", "last step 2"),
    ],
)
def test_a_stage_that_ends_badly_says_so_in_its_line(
    code: int | None, text: str, state: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(text)
    outcome = stages.read_log(tmp_path / "log", code, limit=60, seconds=2)
    assert outcome.state == state
    assert said in device.show(outcome.figures)
    assert outcome.failed == state.isupper()


def test_no_stage_starts_without_time(tmp_path: Path) -> None:
    assert stages.run_apart("parity", stages.LEAST - 1, tmp_path).state == "no time"
    assert not [*tmp_path.iterdir()]


def test_a_stage_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["trainers"])
    assert "no stage 'trainers'; there are facts, parity" in capsys.readouterr().err


def test_a_run_without_rewards_fails_its_stage(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0}\n')
    (tmp_path / "trainer.jsonl").write_text('{"step": 1, "metrics": {}}\n')
    with pytest.raises(AssertionError, match="expected 1 rewards, found rewards 0"):
        runs.summary(tmp_path, 1)


# -- records


def results_file(folder: Path, gpu: str = "NVIDIA H100, 79.1 GiB", state: str = "ok") -> Path:
    conditions = {"date": "2026-12-01", "commit": "abc", "cpu": "Xeon, 16 cores"}
    conditions |= {"versions": "torch 2.11.0", "command": "python -m bench gpu"}
    figures: dict[str, Any] = {"packed": {"recompute": {"step_s": 1.25, "peak_gib": 12345.6789}}}
    figures |= {"on_cuda": True, "gpu": "H100", "ratio": float("nan")}
    table = {"device": gpu, "conditions": conditions}
    stages = {"trainer": {"state": state, "seconds": 9, "figures": figures}}
    path = folder / "results.json"
    path.write_text(json.dumps(table | {"stages": stages}))
    return path


def test_figures_of_a_gpu_replace_the_earlier_ones_and_fill_the_page(tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    old = {"name": "gpu.trainer.gone_s", "value": 1.0, "unit": "s"}
    another = {"name": "gpu.trainers.kept_s", "value": 1.0, "unit": "s"}
    other = {"name": "wire.bytes", "value": 12.0, "unit": "bytes"}
    common = {"date": "2026-11-01", "commit": "x", "cpu": "y", "versions": "z", "command": "c"}
    records.write_text(json.dumps([old | common, another | common, other | common]))
    assert results.record_results(results_file(tmp_path), records) == 2
    figures = read(records)
    assert set(figures) == {
        "gpu.trainer.packed.recompute.peak_gib",
        "gpu.trainer.packed.recompute.step_s",
        "gpu.trainers.kept_s",
        "wire.bytes",
    }
    del figures["gpu.trainers.kept_s"]
    page = "<!-- figures: gpu -->\n<!-- /figures -->"
    assert filled(page, figures).splitlines()[1:-1] == [
        "| what | measured |",
        "|---|---|",
        "| trainer, packed, recompute | peak_gib 12,346 GiB; step_s 1.25 s |",
        "",
        "2026-12-01, `python -m bench gpu`, commit abc, GPU NVIDIA H100, 79.1 GiB, CPU Xeon, 16 "
        "cores, versions torch 2.11.0.",
    ]
    assert "have run on a CPU only" in filled(page, {})


@pytest.mark.parametrize("state", ["skipped", "no time"])
def test_a_stage_that_did_not_run_leaves_the_earlier_figures(state: str, tmp_path: Path) -> None:
    records = tmp_path / "records.json"
    old = {"name": "gpu.trainer.step_s", "value": 1.0, "unit": "s", "date": "2026-11-01"}
    old |= {"commit": "x", "cpu": "y", "versions": "z", "command": "c"}
    records.write_text(json.dumps([old]))
    assert results.record_results(results_file(tmp_path, state=state), records) == 0
    assert set(read(records)) == {"gpu.trainer.step_s"}


def test_streams_that_overlap_are_busy_once() -> None:
    assert trainer.union([]) == 0
    assert trainer.union([(0, 4), (1, 2), (3, 6), (10, 11)]) == 7


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"gpu": ""}, "without a GPU"), ({"state": "FAILED"}, "trainer failed")],
)
def test_what_is_not_of_a_gpu_or_failed_is_not_recorded(
    change: dict[str, str], reason: str, tmp_path: Path
) -> None:
    records = tmp_path / "records.json"
    records.write_text("[]")
    with pytest.raises(ValueError, match=reason):
        results.record_results(results_file(tmp_path, **change), records)
    assert records.read_text() == "[]"


# -- wheels


def lacking(image: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    pins = wheels.pins((wheels.ROOT / "constraints.txt").read_text())
    ours = wheels.our_packages()
    return wheels.closure("prime-rl", ours=ours, image=image, constraints=pins, python="3.12")


def test_an_image_gets_what_it_lacks_and_what_it_has_in_another_range() -> None:
    pins = wheels.pins((wheels.ROOT / "constraints.txt").read_text())
    ours, none = lacking(pins)
    assert none == {}
    assert {"prime-rl", "prime-rl-core", "prime-rl-kernels", "prime-rl-plan"} <= {*ours}
    assert "prime-rl-vllm" not in ours

    older = pins | {"torch": "2.11.0", "transformers": "5.17.0"}  # 2.11 is in the range
    _, missing = lacking(older)
    assert missing == {"transformers": pins["transformers"]}

    less = {name: version for name, version in pins.items() if name not in ("verifiers", "mcp")}
    _, missing = lacking(less)
    assert missing == {"verifiers": pins["verifiers"], "mcp": pins["mcp"]}  # verifiers needs mcp


def test_a_frozen_list_is_read_as_pip_writes_it() -> None:
    text = "torch==2.11.0+cu130\nPyYAML==6.0.3\n-e git+https://x/y#egg=z\nlocal @ file:///x\n# a\n"
    assert wheels.pins(text) == {"torch": "2.11.0+cu130", "pyyaml": "6.0.3"}


def test_a_library_without_a_tested_version_is_named() -> None:
    with pytest.raises(SystemExit, match="torch: needed, not in the image, and without a version"):
        wheels.closure("torch", ours=(), image={}, constraints={}, python="3.12")
