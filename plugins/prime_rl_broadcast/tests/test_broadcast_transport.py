"""What the plugin offers to both sides, and how the trainer waits for the orchestrator."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from disks import SharedDisk

from prime_rl import ConfigError, PluginConfig, WeightsError
from prime_rl.config.run import WeightBroadcastConfig
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_transport
from prime_rl_broadcast import group as group_module
from prime_rl_broadcast.connection import protocol
from prime_rl_broadcast.group import BroadcastGroup, opened
from prime_rl_broadcast.sender import BroadcastSender
from prime_rl_broadcast.transport import BroadcastConfig, GlooTransport, NcclTransport


@pytest.mark.parametrize("group", [PROJECT, TRAINER_GROUP])
@pytest.mark.parametrize("name", ["gloo", "nccl", "ipc"])
def test_both_sides_find_the_transport(group: str, name: str) -> None:
    transport = make_transport(WeightBroadcastConfig(type=name), load_plugins(group))
    assert transport is not None and transport.name == name


def test_files_need_no_transport() -> None:
    assert make_transport(WeightBroadcastConfig(), load_plugins(TRAINER_GROUP)) is None


def test_an_unknown_transport_and_an_unknown_key_are_refused() -> None:
    hooks = load_plugins()
    with pytest.raises(ConfigError, match=r"weight_broadcast: .*Did you mean 'gloo'"):
        make_transport(WeightBroadcastConfig(type="glo"), hooks)
    with pytest.raises(ConfigError, match=r"weight_broadcast \(weight_transport 'gloo'\).timout"):
        make_transport(WeightBroadcastConfig.model_validate({"type": "gloo", "timout": 3}), hooks)
    with pytest.raises(ValueError, match="unknown key timout; type 'filesystem' takes no other"):
        WeightBroadcastConfig.model_validate({"timout": 3})


def test_nccl_needs_a_gpu() -> None:
    transport = NcclTransport(PluginConfig())
    with pytest.raises(ConfigError, match="NCCL needs GPUs"):
        transport.sender(torch.device("cpu"))


def test_the_trainer_joins_an_open_group(tmp_path: Path) -> None:
    group = BroadcastGroup(
        directory="d", group="g", backend="gloo", rank=0, world_size=2, timeout=1.0, loopback=True
    )
    assert group.open(tmp_path)
    order = BroadcastSender(None).wait(tmp_path, lambda: True)
    assert order == {
        "directory": "d",
        "group": "g",
        "backend": "gloo",
        "rank": 0,
        "world_size": 2,
        "timeout": 1.0,
        "loopback": True,
    }


def test_the_trainer_declines_if_files_are_wanted(tmp_path: Path) -> None:
    assert BroadcastSender(None).wait(tmp_path, lambda: True) is None
    assert opened(tmp_path) is None and (tmp_path / "meeting.json").exists()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(group_module.os, "link", refuse)
    with pytest.raises(WeightsError, match=r"cannot write .*meeting\.json.*No space left"):
        BroadcastSender(None).wait(tmp_path, lambda: True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("trainer", "engines", "text"),
    [
        ("2.29.7", "2.29.7", "NCCL 2.29.7 on both sides (torch 2.1 and 2.2)"),
        ("2.29.7", "2.29.3", "NCCL cannot connect: it is 2.29.7 in the trainer (torch 2.1)"),
        ("2.29.7", "2.30.3", "and 2.30.3 in the engines (torch 2.2). Every version will go"),
        (None, "2.30.3", "the NCCL of the trainer is not known here (torch 2.1)"),
        ("2.30.3", None, "the NCCL of the engines is not known here (torch 2.2)"),
    ],
)
def test_nccl_says_what_two_versions_mean(
    trainer: str | None, engines: str | None, text: str
) -> None:
    sides = [{"torch": "2.1", "NCCL": trainer}, {"torch": "2.2", "NCCL": engines}]
    known = [{name: number for name, number in side.items() if number} for side in sides]
    assert text in NcclTransport(BroadcastConfig()).compare(*known)
    assert GlooTransport(BroadcastConfig()).compare(*known) is None


def test_members_with_another_patch_level_of_nccl_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses it only once it connects, when all members wait."""
    said = []
    for version in ((2, 29, 7), (2, 29, 3)):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
        said.append(protocol("nccl"))
    assert said == ["NCCL 2.29.7", "NCCL 2.29.3"]
    (tmp_path / "here_1").write_text(said[1])
    group = BroadcastGroup(
        directory=str(tmp_path), group="g", backend="nccl", rank=0, world_size=2, timeout=1.0,
        loopback=True,
    )  # fmt: skip
    with pytest.raises(WeightsError, match=r"uses NCCL 2\.29\.7; rank 1 uses NCCL 2\.29\.3"):
        group.wait_for_all(said[0])


def test_members_meet_although_the_disk_refuses_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 1):
        (tmp_path / f"here_{rank}").write_text("gloo")
    group = BroadcastGroup(
        directory=str(tmp_path), group="g", backend="gloo", rank=0, world_size=2, timeout=600.0,
        loopback=True,
    )  # fmt: skip
    disk = SharedDisk(monkeypatch, tmp_path)
    monkeypatch.setattr(group_module, "replace_text", lambda path, text: None)
    with disk.refusing() as answer:
        monkeypatch.setattr(group_module.time, "sleep", lambda seconds: answer())
        group.wait_for_all("gloo")
    assert disk.refused == 1


def test_a_member_whose_folder_is_removed_waits_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back: an engine that it keeps must be free for the next attempt."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    group = BroadcastGroup(
        directory=str(folder), group="g", backend="gloo", rank=0, world_size=2, timeout=600.0,
        loopback=True,
    )  # fmt: skip
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        assert len(pauses) == 1, "it still waits"
        shutil.rmtree(folder)

    monkeypatch.setattr(group_module.time, "sleep", pause)
    with pytest.raises(WeightsError, match="is gone: another attempt has begun"):
        group.wait_for_all("gloo")
