"""The file by which a group is opened."""

from __future__ import annotations

from pathlib import Path

from prime_rl_broadcast.group import BroadcastGroup, opened


def test_a_group_is_seen_when_it_is_opened_though_the_name_was_absent(monkeypatch, tmp_path):
    """A client of NFS remembers that a name was absent, and asks again if its folder is listed."""
    group = BroadcastGroup(
        directory="", group="", backend="gloo", rank=0, world_size=1, timeout=1.0, loopback=True
    )
    assert opened(tmp_path) is None
    lookups = []
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: lookups.append(path) or read(path))
    assert opened(tmp_path) is None and lookups == []
    assert group.open(tmp_path)
    assert opened(tmp_path) == group
