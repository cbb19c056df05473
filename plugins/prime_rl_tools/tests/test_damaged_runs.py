"""Damaged run directories: each command says which file, in one line and without a traceback."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from report_runs import make_run, offering
from safetensors.numpy import save_file
from typer.testing import CliRunner

from prime_rl import PrimeRLError
from prime_rl.orchestrator.packer import pack
from prime_rl.rundir.control import Supervisor
from prime_rl.rundir.status import Status
from prime_rl.wire import encode_batch
from prime_rl_app.cli.app import app
from prime_rl_app.rollouts import read_step
from prime_rl_tools.replay import score

DEEP = b"[" * 100_000
WRONG = [None, "x", -1, 1e999, 10**400, [], {}, [[]], "\ud800", True]
"""Values of another type or size than a file has in any place."""
SEED = 21


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: ``good``, and ``bad`` with every kind of file."""
    folder = tmp_path_factory.mktemp("outputs")
    make_run(folder / "good")
    make_run(folder / "bad")
    bad = folder / "bad"
    (bad / "status").mkdir()
    Supervisor(1, "elsewhere", 2.5, "failed").write(bad)
    Status(bad / "status" / "trainer.json").report("training", progress=0.5, loss=1.0)
    rows = [
        {"step": n, "progress/total_tokens": 9, "train/agg/all/reward/mean": 0.5} for n in (1, 2)
    ]
    (bad / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (bad / "configs" / "launch.json").write_text(json.dumps({"model_path": str(bad / "weights")}))
    exports = bad / "token_exports" / "step_1"
    exports.mkdir(parents=True)
    record = {"env_name": "words", "token_ids": [1], "inference_logprobs": [0.0]}
    (exports / "rank_0.jsonl").write_text(json.dumps(record) + "\n")
    (bad / "weights").mkdir()
    (bad / "weights" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": np.zeros((2, 3), np.float32)}, bad / "weights" / "model.safetensors")
    wire = bad / "rollouts_wire" / "step_1"
    wire.mkdir(parents=True)
    kept = read_step(bad / "rollouts" / "step_1.msgpack").kept
    rows = pack([kept[0].samples[0]], ["words"], 16)
    (wire / "rank_0.bin").write_bytes(encode_batch(1, rows))
    return folder


READERS = {
    "configs/run.json": ["status", "stop", "report", "replay"],
    "configs/launch.json": ["report"],
    "metrics.jsonl": ["status", "report"],
    "status/supervisor.json": ["status", "stop"],
    "status/trainer.json": ["status", "stop"],
    "rollouts/step_1.msgpack": ["report", "replay", "inspect"],
    "token_exports/step_1/rank_0.jsonl": ["report"],
    "weights/config.json": ["inspect"],
    "weights/model.safetensors": ["inspect"],
    "rollouts_wire/step_1/rank_0.bin": ["inspect"],
}
"""Files, and the commands that read them."""


def damages(path: Path, chance: random.Random) -> list[bytes | None]:
    """Contents that take the file's place; None: a folder does."""
    data = path.read_bytes()
    found: list[bytes | None] = [
        *(None, b"", b"\0" * 9, DEEP, b"[]\n", b"null\n", b'"x"\n', b'{"a": 1}\n', b"\xff\xfe\n"),
        *(data[: len(data) // 2], data + b"\xff\n", chance.randbytes(200)),
    ]
    for _ in range(4):
        flipped = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        found.append(bytes(flipped))
    return found + [_changed(path, data, chance) for _ in range(12)]


def _changed(path: Path, data: bytes, chance: random.Random) -> bytes:
    """With one value of another type, wherever it is."""
    if path.suffix == ".msgpack":
        value = msgspec.msgpack.decode(data)
        _replace(value, chance, [each for each in WRONG if each not in ("\ud800", 10**400)])
        return msgspec.msgpack.encode(value)
    if path.suffix in (".json", ".jsonl"):
        value = json.loads(data.splitlines()[0]) if path.suffix == ".jsonl" else json.loads(data)
        _replace(value, chance, WRONG)
        return json.dumps(value).encode() + b"\n"
    return chance.randbytes(8) + data[8:]


def _replace(value: Any, chance: random.Random, wrong: list[Any]) -> None:
    while True:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[key], dict | list) or not value[key] or chance.random() < 0.1:
            value[key] = chance.choice(wrong)
            return
        value = value[key]


def invoke(command: str, folder: Path, path: Path) -> None:
    run, options = str(folder / "bad"), []
    if command in ("status", "stop"):
        run, options = "bad", ["--output-dir", str(folder)]
    elif command == "inspect":
        run = str(path)
    elif command == "report":
        options = ["--out", str(folder / "page.html")]
    result = CliRunner().invoke(app, [command, run, *options])
    if not isinstance(result.exception, SystemExit | None):
        # ``main`` prints these in one line; anything else is a traceback.
        assert isinstance(result.exception, PrimeRLError), repr(result.exception)
        assert path.name in str(result.exception) or path.is_dir(), result.exception


@pytest.mark.parametrize("file", READERS)
def test_every_damage_of_a_file_is_reported_by_its_name(
    file: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "load_plugins", lambda **_: offering())
    folder = tmp_path / "outputs"
    shutil.copytree(whole, folder)
    path = folder / "bad" / file
    chance = random.Random(f"{SEED} {file}")
    for number, content in enumerate(damages(path, chance)):
        path.unlink() if path.is_file() else path.rmdir()
        path.mkdir() if content is None else path.write_bytes(content)
        for command in READERS[file]:
            try:
                invoke(command, folder, path)
            except AssertionError as error:
                raise AssertionError(f"damage {number} of {file}, {command}: {error}") from error
        result = CliRunner().invoke(app, ["runs", "--output-dir", str(folder)])
        assert result.exit_code == 0 and "good" in result.output, f"damage {number} of {file}"
