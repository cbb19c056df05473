"""Entry points: one function reads them, and it leaves out what is disabled."""

import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from shutil import rmtree

import pytest

from prime_rl.entries import DISABLE, entries, installed_entries, leaving_out
from prime_rl.registry.manager import plugin_names

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "core" / "src" / "prime_rl" / "entries.py"
RAW = re.compile(r"\bentry_points\(|\.entry_points\b|import .*\bentry_points\b|pkg_resources")


def sources():
    folders = (
        ROOT / "core",
        ROOT / "app",
        *ROOT.glob("prime_rl_*"),
        *(ROOT / "plugins").glob("prime_rl_*"),
    )
    files = [file for folder in folders for file in (folder / "src").rglob("*.py")]
    assert len(files) > 200
    return files


def test_no_other_source_file_reads_entry_points():
    """A raw read loads the code of plugins that ``--without`` names."""
    raw = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in sources()
        if file != HERE
        for line in file.read_text().splitlines()
        if RAW.search(line) and not re.search(r"\b_entry_points\(", line)
    ]
    assert raw == []


@pytest.mark.parametrize(
    "line",
    [
        "for entry in entry_points(group=GROUP):",
        "from importlib.metadata import EntryPoint, entry_points",
        "for each in metadata.entry_points().select(group=GROUP):",
        "distribution('x').entry_points",
    ],
)
def test_a_raw_read_is_found(line):
    assert RAW.search(line)


@pytest.fixture
def install(site, tmp_path, monkeypatch):
    """Installs a distribution for this process too."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    return site


@pytest.fixture
def bad(install):
    """An installed distribution with a plugin in every group that a source file names."""
    text = "".join(file.read_text() for file in sources())
    groups = sorted({*re.findall(r'"(prime_rl\.[a-z_]+)"', text), "prime_rl"})
    assert {"prime_rl.trainer", "prime_rl.env_workers", "prime_rl.fits"} <= {*groups}
    install("ill", "".join(f"[{group}]\nbad = bad_exit\n" for group in groups))
    return groups


@pytest.mark.parametrize("name", ["bad", "ill"])
def test_what_is_disabled_is_in_no_group(bad, name, monkeypatch):
    for group in bad:
        assert "bad" in {entry.name for entry in entries(group)}
        with leaving_out([name]):
            assert "bad" not in {entry.name for entry in entries(group)}
            assert not [*entries(group, "bad")]
            assert "bad" in {entry.name for entry in installed_entries(group)}
        monkeypatch.setenv(DISABLE, f"other, {name}")
        assert "bad" not in {entry.name for entry in entries(group)}
        monkeypatch.delenv(DISABLE)


def test_entries_are_in_the_order_of_their_names_and_chosen_by_name(install):
    install("several", "[prime_rl.mine]\nb = m:b\na = m:a\nc = m:c\n")
    assert [entry.name for entry in entries("prime_rl.mine")] == ["a", "b", "c"]
    assert [entry.value for entry in entries("prime_rl.mine", "b")] == ["m:b"]


def test_what_is_installed_is_scanned_again_only_when_a_distribution_comes_or_goes(
    install, tmp_path, monkeypatch
):
    scans = []
    monkeypatch.setattr("prime_rl.entries.entry_points", lambda: scans.append(1) or entry_points())
    install("first", "[prime_rl.mine]\na = m:a\n[prime_rl.other]\nb = m:b\n")
    assert [entry.name for entry in entries("prime_rl.mine")] == ["a"]
    assert [entry.name for entry in entries("prime_rl.other")] == ["b"]
    assert [entry.name for entry in entries("prime_rl.mine")] == ["a"]
    assert len(scans) == 1
    install("second", "[prime_rl.mine]\nc = m:c\n")
    assert [entry.name for entry in entries("prime_rl.mine")] == ["a", "c"]
    rmtree(tmp_path / "site" / "first-0.1.dist-info")
    assert [entry.name for entry in entries("prime_rl.mine")] == ["c"]
    monkeypatch.setattr("sys.path", [path for path in sys.path if path != str(tmp_path / "site")])
    assert entries("prime_rl.mine") == []
    assert len(scans) == 4


def test_what_can_be_left_out_is_every_plugin_and_every_distribution_but_core():
    names = plugin_names()
    assert {"core-parts", "parts"} <= names
    assert "prime-rl-core" not in names
    assert not [name for name in names if "." in name]  # no entry of prime_rl.known
