"""Checkpoints on disk: whole or not there, kept as asked, never the newest one lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import CkptConfig
from prime_rl.rundir import checkpoints
from prime_rl.rundir.checkpoints import (
    Checkpoint,
    complete,
    copy,
    finished,
    remove,
    retain,
    unfinished,
    whole_steps,
)


def write(run_dir: Path, step: int, text: str = "state") -> Checkpoint:
    """Both parts, not completed yet."""
    target = unfinished(run_dir, step)
    for part in (target.orchestrator, target.trainer, target.weights):
        part.mkdir(parents=True)
        (part / "file").write_text(text)
    return target


def test_a_checkpoint_is_due_every_interval_and_after_the_last_step() -> None:
    every_third, bare, off = CkptConfig(interval=3), CkptConfig(), CkptConfig(enabled=False)
    assert [n for n in range(1, 9) if every_third.is_due(n, 8)] == [3, 6, 8]
    assert [n for n in range(1, 9) if bare.is_due(n, 8)] == [8]
    assert not any(off.is_due(n, 8) for n in range(1, 9))
    assert bare.is_due(2, 8, since=600) and not bare.is_due(2, 8, since=599)
    assert not every_third.is_due(2, 8, since=600) and not off.is_due(2, 8, since=600)


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        ({}, [2, 4, 6]),
        ({"interval": 2}, []),
        ({"interval": 4}, [2, 6]),  # written where the run was stopped
        ({"keep_last": 2}, [2, 4, 6]),
        ({"keep_last": 1}, [2, 4, 6, 8]),
        ({"keep_last": 9}, []),
        ({"keep_last": 1, "keep_interval": 4}, [2, 6]),
        ({"keep_interval": 4}, [2, 6]),
        ({"interval": 2, "keep_last": 2}, [2, 4, 6]),
    ],
)
def test_what_is_superseded_never_includes_the_newest(
    settings: dict[str, int], gone: list[int]
) -> None:
    assert CkptConfig(**settings).superseded([2, 4, 6, 8, 10]) == gone


def test_retention_deletes_from_disk_and_spares_what_is_in_use(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(tmp_path, step)
        complete(tmp_path, step)
    retain(tmp_path, CkptConfig(keep_last=1), in_use=[2])
    assert whole_steps(tmp_path) == [2, 6]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_2", "step_6"]


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 2)
    complete(tmp_path, 2)
    write(tmp_path, 4)
    (tmp_path / "checkpoints" / "step_6").mkdir()  # no marker: somebody copied it half
    (tmp_path / "checkpoints" / "step_x").mkdir()
    assert whole_steps(tmp_path) == [2]


class Crash(Exception):
    pass


@pytest.mark.parametrize("call", range(1, 30))
def test_a_crash_at_any_point_leaves_the_checkpoint_before(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dies at the n-th call that reaches the disk while checkpoint 4 replaces an older 4 and 2 goes
    by retention: 2 or 4 is whole at every instant, and what is whole has all its files."""
    write(tmp_path, 2)
    complete(tmp_path, 2)
    write(tmp_path, 4, "new")
    left = call

    def crashing(function):  # type: ignore[no-untyped-def]
        def wrapped(*arguments, **named):  # type: ignore[no-untyped-def]
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash
            return function(*arguments, **named)

        return wrapped

    with monkeypatch.context() as patch:
        for where, name in ((os, "fsync"), (Path, "rename"), (Path, "touch"), (os, "unlink")):
            patch.setattr(where, name, crashing(getattr(where, name)))
        patch.setattr(shutil, "rmtree", crashing(shutil.rmtree))
        try:
            complete(tmp_path, 4)
            retain(tmp_path, CkptConfig(keep_last=1))
        except Crash:
            pass
    whole = whole_steps(tmp_path)
    assert whole, "nothing is left to resume from"
    for step in whole:
        found = finished(tmp_path, step)
        for part in (found.orchestrator, found.trainer, found.weights):
            assert (part / "file").read_text() == ("new" if step == 4 else "state")


def test_what_is_removed_is_gone_in_one_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 2)
    complete(tmp_path, 2)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *a, **k: None)  # dies before deleting
    remove(finished(tmp_path, 2))
    assert whole_steps(tmp_path) == []
    assert not finished(tmp_path, 2).directory.exists()


def test_a_copy_is_whole_and_survives_its_source(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, 2)
    copied = copy(complete(a, 2), b)
    remove(finished(a, 2))
    assert copied.is_whole and whole_steps(b) == [2] and copied.run_dir == b
    assert (copied.weights / "file").read_text() == "state"


def test_a_copy_that_the_disk_refuses_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, 2)
    source = complete(a, 2)

    def full(source: str, target: str) -> None:
        Path(target).touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "link_or_copy", full)
    with pytest.raises(ConfigError) as caught:
        copy(source, b)
    assert str(caught.value) == (
        f"--resume: cannot copy {source.directory} to {finished(b, 2).directory}: "
        "[Errno 28] No space left on device"
    )
    assert list((b / "checkpoints").iterdir()) == [] and source.is_whole


PARTS = ("orchestrator/file", "trainer/file", "weights/file")


@pytest.mark.parametrize("name", PARTS)
def test_every_flipped_bit_is_found_and_so_is_a_lost_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, 2)
    checkpoint = complete(tmp_path, 2)
    checkpoint.verify()
    path = checkpoint.directory / name
    for bit in range(8 * path.stat().st_size):
        data = bytearray(b"state")
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"{path} is damaged: it is not the file"):
            checkpoint.verify()
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{path} is missing: .* Resume from another"):
        checkpoint.verify()


@pytest.mark.parametrize("content", [b"x", b"[]", b'{"a": 1}', b"\xff", b"[" * 100_000])
def test_a_damaged_mark_is_named(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, 2)
    checkpoint = complete(tmp_path, 2)
    marker = checkpoint.directory / "STABLE"
    marker.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{marker} cannot be checked"):
        checkpoint.verify()


def test_a_checkpoint_of_an_earlier_version_has_no_digests_and_a_copy_keeps_them(
    tmp_path: Path,
) -> None:
    write(tmp_path / "one", 2)
    source = complete(tmp_path / "one", 2)
    copied = copy(source, tmp_path / "two")
    copied.verify()
    (source.directory / "STABLE").write_bytes(b"")
    (source.weights / "file").unlink()
    source.verify()
