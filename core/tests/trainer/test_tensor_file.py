"""A file that ranks write together equals the file of a single rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tensor_file_cases as cases
import torch
import warm
from safetensors.torch import load_file
from waiting import LIMIT

from prime_rl.trainer.tensor_file import _is_there, lay_out

MANY = [name for name, (num_ranks, _) in cases.MESHES.items() if num_ranks > 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 1, 2, 4 and 2 x 2 ranks wrote."""
    folder = tmp_path_factory.mktemp("files")
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = warm.run([sys.executable, cases.__file__, folder], env=env, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return folder


def seen(folder: Path, name: str) -> list[dict[str, Any]]:
    """By rank."""
    found: list[dict[str, Any]] = json.loads((folder / name / "seen.json").read_text())
    return found


@pytest.mark.parametrize("name", cases.MESHES)
def test_every_way_of_writing_makes_the_same_file(folder: Path, name: str) -> None:
    one = (folder / "one/gathered.safetensors").read_bytes()
    for kind in ("gathered", "shared", "flushed", "again", "apart"):
        assert (folder / name / f"{kind}.safetensors").read_bytes() == one, kind
    tensors, found = cases.make_tensors(1), load_file(folder / name / "shared.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", cases.MESHES)
def test_ranks_round_as_torch_does(folder: Path, name: str) -> None:
    tensors, found = cases.make_tensors(1), load_file(folder / name / "rounded.safetensors")
    kinds = {name: tensor.dtype for name, tensor in found.items()}
    assert kinds["0.uneven"] == kinds["columns"] == torch.bfloat16
    assert kinds["1.uneven"] == torch.float32 and kinds["0.steps"] == torch.int64
    assert all(found[name].equal(tensors[name].to(kind)) for name, kind in kinds.items())


def test_each_rank_writes_its_rows_only(folder: Path) -> None:
    # A block's parameters are 35, 12 and 8 floats; its buffer 6 longs, the rest 24 and 1 floats.
    whole, alone = 2 * (4 * 55 + 8 * 6) + 4 * 25, 2 * 8 * 6 + 4 * 25
    written = {name: [rank["written"] for rank in seen(folder, name)] for name in cases.MESHES}
    assert written["one"] == [whole]
    # Rows of 7: 4 + 3 of 20 bytes; of 3: 2 + 1 of 16; of 8: 4 + 4.
    assert written["two"] == [2 * (80 + 32 + 16) + alone, 2 * (60 + 16 + 16)]
    # Rows of 7: 2, 2, 2, 1; of 3: 1, 1, 1, 0.
    middle = 2 * (40 + 16 + 8)
    assert written["four"] == [middle + alone, middle, middle, 2 * (20 + 0 + 8)]
    # Two that hold the same: 17 + 18 floats of 35, halves of the rest.
    assert written["replicas"] == [2 * (68 + 24 + 16) + alone, 2 * (72 + 24 + 16)]
    assert all(sum(each) == whole for each in written.values())
    assert len(set(written["two_by_two"][1:])) > 1 and min(written["two_by_two"]) > 0


@pytest.mark.parametrize("name", cases.MESHES)
def test_a_disk_that_is_full_on_one_rank_stops_all(folder: Path, name: str) -> None:
    *others, last = [rank["full"] for rank in seen(folder, name)]
    assert last == "OSError: [Errno 28] No space left on device"
    number = len(others)
    assert others == [f"WeightsError: rank {number}: [Errno 28] No space left on device"] * number
    assert not (folder / name / "full.safetensors").exists()
    assert {rank["again"] for rank in seen(folder, name)} == {"done"}


def test_replicas_wait_as_long_as_all_ranks_do(folder: Path) -> None:
    """For a rank with a slow disk: torch's own timeout is half an hour, or ten minutes
    with NCCL."""
    found = {name: [rank["patience"] for rank in seen(folder, name)] for name in cases.MESHES}
    assert found["four"] == [[2.0]] * 4
    assert found["replicas"] == [[2.0, 2.0]] * 2 and found["two_by_two"] == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("name", MANY)
def test_rank_0_writes_everything_if_a_rank_sees_another_disk(folder: Path, name: str) -> None:
    first, *others = [rank["written_apart"] for rank in seen(folder, name)]
    assert first == sum(rank["written"] for rank in seen(folder, name))
    assert others == [0] * len(others)


def test_a_checkpoints_weights_are_on_the_disk_of_other_machines_too(folder: Path) -> None:
    """Rank 0 flushes what was written where it is, when the checkpoint is complete."""
    flushed = {name: [rank["flushed"] for rank in seen(folder, name)] for name in cases.MESHES}
    assert flushed["one"] == [0] and flushed["two"] == [0, 0]
    assert flushed["four"] == flushed["two_by_two"] == [0, 0, 1, 1]


def test_a_file_that_is_absent_or_of_another_length_is_not_the_one_that_rank_0_began(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.safetensors"
    assert not _is_there(path, 0)
    path.write_bytes(b"12345")
    assert [_is_there(path, size) for size in (4, 5, 6)] == [False, True, False]


@pytest.mark.parametrize("length", range(1, 9))
def test_tensors_begin_at_a_multiple_of_eight_bytes(length: int) -> None:
    layout = lay_out({"n" * length: torch.zeros(3)})
    assert len(layout.header) % 8 == 0
    assert int.from_bytes(layout.header[:8], "little") == len(layout.header) - 8
    assert layout.size == len(layout.header) + 12
