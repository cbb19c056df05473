"""Entry points: one function reads them, and it leaves out what is disabled."""

import re
from pathlib import Path

import pytest

from prime_rl.entries import DISABLE, entries, installed_entries, leaving_out

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
