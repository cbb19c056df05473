"""What ``prime-rl inspect`` says of a frame, of rollouts, and of a folder of weights."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from report_runs import make_run
from typer.testing import CliRunner

from prime_rl import Sample
from prime_rl.errors import RunError
from prime_rl.orchestrator.packer import pack
from prime_rl.wire import encode_batch
from prime_rl_app.cli.app import app
from prime_rl_tools.replay.inspect import facts_of


def shown(path, *more):
    return CliRunner().invoke(app, ["inspect", str(path), *more])


def frame_of(path):
    samples = [
        Sample(
            token_ids=[1, 2, 3], loss_mask=[0, 1, 1], inference_logprobs=[0, -1.0, -3.0],
            advantages=[0, 0.5, 0.5],
        ),
        Sample(
            token_ids=[4, 5], loss_mask=[0, 1], inference_logprobs=[0, -2.0], advantages=[0, -1.0]
        ),
    ]  # fmt: skip
    path.write_bytes(encode_batch(7, pack(samples, ["b", "a"], 8)))


def test_facts_of_a_frame(tmp_path):
    path = tmp_path / "rank_0.bin"
    frame_of(path)
    facts = facts_of(path)
    assert facts["kind"] == "micro batches" and facts["step"] == 7 and facts["tokens"] == 5
    assert facts["bytes"] == path.stat().st_size and facts["envs"] == ["a", "b"]
    (row,) = facts["rows"]
    assert row["sequences"] == 2 and row["longest"] == 3 and row["masked in"] == 3
    assert row["envs"] == {"b": 1, "a": 1} and row["streams"] == ["advantages"]
    assert row["mean logprob"] == -2.0 and row["mean advantage"] == 0.0


def test_facts_of_a_file_of_rollouts(tmp_path):
    make_run(tmp_path / "run", "observing")
    facts = facts_of(tmp_path / "run" / "rollouts" / "step_2.msgpack")
    assert facts["kind"] == "rollouts" and facts["step"] == 2 and facts["kept"] == 6
    assert facts["dropped"] == {"pre_batch_filters": 3} and len(facts["rollouts"]) == 9
    assert facts["tokens"] == sum(row["tokens"] for row in facts["rollouts"])
    assert facts["rollouts"][0]["streams"] == ["advantages", "ce_weights"]
    assert len(facts["frames"]) == 1


def weights_of(folder):
    folder.mkdir()
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b.bias": {"dtype": "F32", "shape": [4], "data_offsets": [24, 40]},
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + np.zeros(10, np.float32).tobytes()
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


def test_facts_of_a_folder_of_weights(tmp_path):
    folder = tmp_path / "step_3"
    weights_of(folder)
    facts = facts_of(folder)
    assert facts["parameters"] == 10 and facts["model"] == "qwen3" and facts["complete"] is False
    assert [tensor["name"] for tensor in facts["tensors"]] == ["a.weight", "b.bias"]
    (folder / "STABLE").touch()
    assert facts_of(folder)["complete"] is True


def test_the_parameters_of_a_run_are_those_of_its_weights_without_the_broadcasts(tmp_path):
    make_run(tmp_path / "mine", "centred")
    for number in (1, 2):
        (tmp_path / "mine/broadcasts").mkdir(exist_ok=True)
        weights_of(tmp_path / f"mine/broadcasts/step_{number}")
    weights_of(tmp_path / "mine/weights")
    (tmp_path / "mine/weights/STABLE").touch()
    said = shown("mine", "--output-dir", str(tmp_path), "--json")
    facts = json.loads(said.stdout)
    assert (facts["parameters"], facts["complete"]) == (10, True)


def test_all_three_print_as_text_and_as_json(tmp_path):
    frame_of(tmp_path / "rank_0.bin")
    weights_of(tmp_path / "step_3")
    make_run(tmp_path / "run", "centred")
    rollouts = tmp_path / "run" / "rollouts" / "step_2.msgpack"
    for path, word in (
        (tmp_path / "rank_0.bin", "advantages"),
        (tmp_path / "step_3", "a.weight"),
        (rollouts, "pre_batch_filters"),
    ):
        result = shown(path)
        assert result.exit_code == 0 and word in result.output, result.output
        assert json.loads(shown(path, "--json").output) == json.loads(json.dumps(facts_of(path)))


def test_long_tables_are_cut_with_a_note(tmp_path, monkeypatch):
    make_run(tmp_path / "run", "centred")
    monkeypatch.setattr("prime_rl_tools.replay.inspect.LONGEST", 2)
    output = shown(tmp_path / "run" / "rollouts" / "step_1.msgpack").output
    assert "more; --json prints all" in output and output.count("words") == 2


def test_any_other_file_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    for name, message in (
        ("missing.bin", "missing.bin: No such file"),
        ("empty", "the folder is empty"),
        ("text.txt", "not a file of rollouts"),
        ("cut", "not a whole safetensors file"),
    ):
        with pytest.raises(RunError, match=message):
            facts_of(tmp_path / name)
