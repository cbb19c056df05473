"""Damaged run directories: each command says which file, in one line and without a traceback."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from report_runs import make_run, offering
from safetensors.numpy import save_file
from typer.testing import CliRunner

from prime_rl import ConfigError, PluginConfig, PrimeRLError
from prime_rl.orchestrator.packer import pack
from prime_rl.registry.manager import installed_versions
from prime_rl.rundir.checkpoints import CHECKSUMS, durable, finished
from prime_rl.rundir.control import Supervisor
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.wire import encode_batch
from prime_rl_app.api import Run
from prime_rl_app.cli.app import app
from prime_rl_app.output import trained_steps
from prime_rl_app.resume import plan
from prime_rl_app.run_states import REWARD, run_info
from prime_rl_app.saved_rollouts import read_step
from prime_rl_evals.evaluation import EvalLog, began_with
from prime_rl_observers.step_file import StepFile
from prime_rl_tools.race.schedule import Budget, _new_points, _tokens, result_of
from prime_rl_tools.replay import score
from prime_rl_tools.replay.score import read_run_config
from prime_rl_tools.serve.chat import _folders
from prime_rl_tools.view.ending import logged_errors
from prime_rl_tools.view.live import MetricsTail
from prime_rl_tools.view.summary import summarize
from prime_rl_tools.watch.server import Watched

DEEP = b"[" * 100_000
WRONG = [None, "x", -1, 1e999, 10**400, [], {}, [[]], "\ud800", True]
"""Values of another type or size than a file has in any place."""


NUM_STEPS = 8
"""Enough for a verdict of the doctor."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: ``good``, and ``bad`` with every kind of file."""
    folder = tmp_path_factory.mktemp("outputs")
    make_run(folder / "good")
    config = make_run(folder / "bad")
    bad = folder / "bad"
    (bad / "status").mkdir()
    Supervisor(1, "elsewhere", 2.5, "failed").write(bad)
    Status(bad / "status" / "trainer.json").report("training", progress=0.5, loss=1.0)
    rows = [
        {
            "step": step,
            "progress/total_tokens": 9,
            "progress/seconds": 1.0,
            REWARD: 0.5,
            "batch/agg/seen": 6,
            "batch/agg/trainable": 5,
            "train/agg/all/has_error/mean": 0.25,
            "optim/lr": 0.1,
            "mismatch_kl/mean": None,
        }
        for step in range(1, NUM_STEPS + 1)
    ]
    write_lines(bad / "metrics.jsonl", rows)
    steps = [{"step": row["step"], "metrics": {"optim/lr": 0.1}} for row in rows]
    write_lines(bad / "trainer.jsonl", steps)
    result = {
        "step": 2,
        "when": "during",
        "env": "words",
        "policy_version": 2,
        "reward": 0.5,
        "num_rollouts": 8,
        "num_failed": 0,
        "metrics": {},
    }
    write_lines(bad / "evals.jsonl", [result, {**result, "step": 4, "policy_version": 4}])
    write_lines(bad / "recoveries.jsonl", [{"cause": "x", "lost_seconds": 2.0}])
    write_table(bad / "plugins.json", {"packages": {"prime-rl-core": "1"}, "plugins": []})
    launch = Launch(
        model_path=str(bad / "weights"),
        served_model_name="tiny",
        engine_urls=[],
        transport_type="filesystem",
        transport_host="",
        transport_ports=[],
    )
    launch.write(bad)
    shutil.copy(bad / "configs" / "launch.json", bad / "configs" / "launch.attempt_1.json")
    exports = bad / "token_exports" / "step_1"
    exports.mkdir(parents=True)
    record = {"env_name": "words", "token_ids": [1], "inference_logprobs": [0.0]}
    write_lines(exports / "rank_0.jsonl", [record])
    (bad / "weights").mkdir()
    write_table(bad / "weights" / "config.json", {"model_type": "llama"})
    weight_map = {"weight_map": {"a": "model.safetensors"}}
    write_table(bad / "weights" / "model.safetensors.index.json", weight_map)
    save_file({"a": np.zeros((2, 3), np.float32)}, bad / "weights" / "model.safetensors")
    wire = bad / "rollouts_wire" / "step_1"
    wire.mkdir(parents=True)
    kept = read_step(bad / "rollouts" / "step_1.msgpack").kept
    rows_sent = pack([kept[0].samples[0]], ["words"], 16)
    (wire / "rank_0.bin").write_bytes(encode_batch(1, rows_sent))

    checkpoint = finished(bad, 2)
    checkpoint.orchestrator.mkdir(parents=True)
    progress = {"config": config.model_dump(mode="json"), "plugins": installed_versions()}
    write_table(checkpoint.progress, progress)
    checkpoint.weights.mkdir()
    (checkpoint.weights / "model.safetensors").touch()
    (checkpoint.directory / CHECKSUMS).touch()
    point = {"step": 4, "reward": 0.5, "tokens": 9, "cpu_seconds": 1.0, "before": None}
    write_table(bad / "race.json", {"key": RACED, "point": point})
    return folder


RACED = {"config": "digest", "seed": 1, "budget": asdict(Budget())}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(table), "utf-8")


# -- what reads a run ----------------------------------------------------------------------------


def command(name: str, *options: str, by_name: bool = False) -> Callable[[Path], None]:
    """A command on the run. ``main`` prints an error of ours in one line."""

    def call(bad: Path) -> None:
        folder = bad.parent
        run = [bad.name, "--output-dir", str(folder)] if by_name else [str(bad)]
        words = [word.format(folder=folder, bad=bad) for word in options]
        result = CliRunner().invoke(app, [name, *(words or run)])
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception

    return call


def api(bad: Path) -> None:
    run = Run(bad)
    assert isinstance(run.config, dict) and isinstance(run.state, str)
    run.metrics, run.evals, [*run.rollouts()], run._repr_html_()


def watch(bad: Path) -> None:
    watched = Watched([bad])
    for source in watched._sources:
        source.refresh()
        source.since()


def resume(bad: Path) -> None:
    config = read_run_config(finished(bad, 2).directory.parent.parent)
    again = config.model_copy(
        update={
            "output_dir": str(bad.parent),
            "run": config.run.model_copy(update={"name": bad.name}),
        }
    )
    plan(again, "latest", None, cast("Any", AnyOptimizer()))


class AnyOptimizer:
    """Resumes every state."""

    name = "any"

    def resumes(self, table: Any) -> bool:
        return True


def summary(bad: Path) -> None:
    summarize(bad, NUM_STEPS)
    logged_errors(bad)


def own_reads(bad: Path) -> None:
    """What a resumed run itself reads of what it wrote before."""
    EvalLog(bad)
    began_with(bad, 3)
    trained_steps(bad)
    durable(bad)
    if (bad / "metrics.jsonl").is_file():
        MetricsTail(bad / "metrics.jsonl").read_new()
    observer = StepFile(PluginConfig())
    observer.started(cast("Any", None), bad)
    if (bad / "trainer.jsonl").is_file():
        for line in (bad / "trainer.jsonl").read_bytes().splitlines(keepends=True):
            observer.short(line)
            observer.short(line, is_load=True)


def race(bad: Path) -> None:
    _new_points(bad, 1, [], 0.0)
    _tokens(bad)
    entry = cast("Any", SimpleNamespace(name="raced", digest="digest"))
    link = bad.parent / "raced-seed1"
    link.symlink_to(bad)
    try:
        result_of(entry, 1, Budget(), bad.parent)
    except ConfigError as error:
        assert "is not a finished run of this race" in str(error)
    finally:
        link.unlink()


def chat(bad: Path) -> None:
    _folders(Run(bad))


STATUS = command("status", by_name=True)
REPORT = command("report", "{bad}", "--out", "{folder}/page.html")
REPLAY = command("replay")
DOCTOR = command("doctor")
RUNS = command("runs", "--output-dir", "{folder}")
STOP = command("stop", by_name=True)
INSPECT = command("inspect")


def inspect(file: str) -> Callable[[Path], None]:
    return command("inspect", "{bad}/" + file)


READERS: dict[str, list[Callable[[Path], None]]] = {
    "configs/run.json": [STATUS, STOP, REPORT, REPLAY, DOCTOR, INSPECT, watch, api, own_reads],
    "configs/launch.json": [REPORT, chat],
    "configs/launch.attempt_1.json": [own_reads, chat],
    "metrics.jsonl": [STATUS, REPORT, DOCTOR, watch, api, summary, own_reads, race, INSPECT],
    "trainer.jsonl": [own_reads],
    "evals.jsonl": [own_reads, api, summary, race, DOCTOR],
    "recoveries.jsonl": [STATUS, summary],
    "plugins.json": [summary],
    "race.json": [race],
    "status/supervisor.json": [STATUS, STOP, INSPECT, api, resume],
    "status/trainer.json": [STATUS, STOP],
    "rollouts/step_1.msgpack": [REPORT, REPLAY, DOCTOR, api, inspect("rollouts/step_1.msgpack")],
    "token_exports/step_1/rank_0.jsonl": [REPORT],
    "weights/config.json": [inspect("weights")],
    "weights/model.safetensors.index.json": [inspect("weights")],
    "weights/model.safetensors": [inspect("weights"), INSPECT],
    "rollouts_wire/step_1/rank_0.bin": [inspect("rollouts_wire/step_1/rank_0.bin")],
    "checkpoints/step_2/orchestrator/progress.json": [resume],
    "checkpoints/step_2/STABLE": [resume, INSPECT],
}
"""Files, and what reads them. ``runs`` reads all."""

OTHERS = [
    *(
        b"",
        b"\0" * 9,
        DEEP,
        b"[]\n",
        b"[{}]\n",
        b"null\n",
        b"3\n",
        b'"x"\n',
        b"{}\n",
        b'{"a": 1}\n',
    ),
    *(b"\xff\xfe\n", b"{'a': 1}\n", b"\xef\xbb\xbf", b'{"a": "\xe2\x80\xa8"', b"\n\n"),
]
"""Contents of another shape."""


def damages(path: Path) -> st.SearchStrategy[bytes | None]:
    """Contents that take the file's place; None: a folder does."""
    data = path.read_bytes()
    changed = st.randoms(use_true_random=False).map(lambda chance: _changed(path, data, chance))
    return (
        st.none()
        | st.sampled_from(OTHERS)
        | st.binary(max_size=200)
        | st.integers(0, len(data)).map(lambda end: data[:end])
        | st.sampled_from([data + b"\xff\n", b"\xef\xbb\xbf" + data, b"\n\n" + data])
        | st.randoms(use_true_random=False).map(lambda chance: _flipped(data, chance))
        | changed
        | changed
    )


def _flipped(data: bytes, chance: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if flipped:
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _changed(path: Path, data: bytes, chance: random.Random) -> bytes:
    """With one value of another type, or without it, wherever it is."""
    if path.suffix == ".msgpack":
        value = msgspec.msgpack.decode(data)
        _replace(value, chance, [each for each in WRONG if each not in ("\ud800", 10**400)])
        return msgspec.msgpack.encode(value)
    if path.suffix == ".json":
        value = json.loads(data)
        _replace(value, chance, WRONG)
        return json.dumps(value).encode() + b"\n"
    if path.suffix == ".jsonl":
        lines = data.splitlines()
        number = chance.randrange(len(lines))
        value = json.loads(lines[number])
        _replace(value, chance, WRONG)
        lines[number] = json.dumps(value).encode()
        return b"\n".join(lines) + b"\n"
    return chance.randbytes(8) + data[8:]


def _replace(value: Any, chance: random.Random, wrong: list[Any]) -> None:
    while True:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], dict | list) or not value[key] or chance.random() < 0.1:
            if chance.random() < 0.3:
                del value[key]
            else:
                value[key] = chance.choice(wrong)
            return
        value = value[key]


@pytest.mark.parametrize("examples", [6, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", READERS)
def test_every_damage_of_a_file_is_reported_by_its_name(
    file: str,
    examples: int,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(score, "load_plugins", lambda **_: offering())
    caplog.set_level(logging.CRITICAL)
    bad = whole / "bad"
    path = bad / file
    good = path.read_bytes()

    # Only that: of a long file it would shrink for minutes.
    @settings(max_examples=examples, phases=[Phase.generate])
    @given(damages(path))
    def check(content: bytes | None) -> None:
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        try:
            for read in [*READERS[file], RUNS]:
                try:
                    read(bad)
                except PrimeRLError as error:
                    # Another value, of its type.
                    words = "[model] has changed", "no loss is set"
                    is_whole = any(each in str(error) for each in words)
                    is_named = path.name in str(error) or content is None or is_whole
                    assert is_named, error
                    assert path.suffix == ".msgpack" or "Error:" not in str(error), error
        finally:
            path.rmdir() if content is None else path.unlink()
            path.write_bytes(good)

    check()


def test_an_error_says_where_what_was_expected_and_what_was_found(whole: Path) -> None:
    path = whole / "bad" / "configs" / "run.json"
    good = path.read_bytes()
    wrong = {
        b'{"max_steps":\n 3,\n "seed" 4}': "line 3, column 9: expected ':' del",
        b"[]": "expected `object`, found `array`",
        b'{"max_steps": "x"}': "expected `int`, found `str` - at `$.max_steps`",
        b"{}": "expected an object with the key `max_steps`",
        b'{"a": 1}\n\xff': "line 2: expected UTF-8, found the byte 0xff",
        DEEP: "line 1: expected JSON, found a value nested too deeply",
    }
    try:
        for content, said in wrong.items():
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=re.escape(f"{path} cannot be read: {said}")):
                run_info(whole / "bad")
    finally:
        path.write_bytes(good)
