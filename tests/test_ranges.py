"""Which versions of other projects the tests run with, and where ranges are declared."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tools import ranges
from tools.ranges import DISTRIBUTIONS, Choice, choose, declared, requirements
from tools.vllm_names import Wheel, declared_range, failing_imports, requirement
from tools.wheel_sources import NoRegistry, sources, versions

RELEASES = ["3.0.0rc1", "2.6.0", "2.5.1", "2.5.0", "2.4.9", "2.4.0", "1.9"]


@pytest.mark.parametrize(
    ("end", "specifier", "version"),
    [
        ("newest", ">=2.4,<2.6", "2.6.0"),  # outside the range too, which it may widen
        ("lowest", ">=2.4,<2.6", "2.4.0"),
        ("lowest", ">=2.4.1,<2.6", "2.4.9"),
        ("lowest", ">2.4.9", "2.5.0"),
        ("newest", "==2.5.1", "2.6.0"),
        ("lowest", "==2.5.1", "2.5.1"),
    ],
)
def test_the_newest_is_the_registrys_and_the_lowest_the_ranges(
    end: str, specifier: str, version: str
) -> None:
    requirement = Requirement(f"verifiers{specifier}")
    assert choose(end, requirement, RELEASES, "2.5.0") == Choice("verifiers", version)


TORCH = ["2.15.0", "2.14.0+cpu", "2.14.0", "2.13.0+cpu", "2.13.0", "2.9.0"]


@pytest.mark.parametrize(
    ("end", "available", "installed", "choice"),
    [
        ("newest", TORCH[1:], "2.13.0+cpu", Choice("torch", "2.14.0+cpu")),
        ("newest", TORCH[1:], "2.14.0+cpu", Choice("torch", "2.14.0")),  # it is there
        ("newest", TORCH, "2.13.0+cpu", Choice("torch", "2.15.0", "skipped")),
        ("lowest", TORCH, "2.13.0+cpu", Choice("torch", "2.9.0", "skipped")),
    ],
)
def test_torch_takes_part_where_a_cpu_build_can_be_had(
    end: str, available: list[str], installed: str, choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges.platform, "system", lambda: "Linux")
    requirement = Requirement("torch>=2.9,<2.15")
    found = choose(end, requirement, available, installed)
    assert (found.name, found.version, bool(found.skipped)) == (
        choice.name, choice.version, bool(choice.skipped)
    )  # fmt: skip
    if found.skipped:
        assert found.skipped == "the registry has no CPU build of it, so 2.13.0+cpu stays"


def test_a_range_without_a_release_is_an_error() -> None:
    with pytest.raises(NoRegistry, match=r"transformers: no release within <0\.1 \(newest: 2\.6"):
        choose("lowest", Requirement("transformers<0.1"), RELEASES, "2.5.0")


@pytest.mark.slow
@pytest.mark.parametrize("end", [min, max])
def test_both_ends_of_torch_have_every_name_that_we_import(
    end: Callable[[Iterable[Version]], Version],
) -> None:
    """Looked up in the wheel's Python files: most versions have no CPU build to run."""
    try:
        releases = [Version(each) for each in versions("torch")]
        chosen = end(declared("torch").specifier.filter(releases))
        wheel = Wheel(sources("torch", chosen.public))
    except NoRegistry as error:
        pytest.skip(f"no registry with torch answers: {error}")

    files = [
        path for path in sorted(ranges.ROOT.rglob("src/**/*.py")) if "torch" in path.read_text()
    ]
    lacking = [
        f"{path.name}: {lack}"
        for path in files
        for lack in failing_imports(wheel, ast.parse(path.read_text()), "torch")
    ]
    assert len(files) > 50
    assert lacking == [], f"torch {chosen}"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_all_distributions_declare_one_range(name: str) -> None:
    """Else one of them would admit what no test has run with."""
    specifiers = {
        str(path.parent): requirement.specifier
        for path, requirement in requirements()
        if requirement.name == name and requirement.specifier  # vLLM's environment pins its own
    }
    assert set(specifiers.values()) == {declared(name).specifier}, specifiers


def test_the_table_of_ranges_has_what_is_declared() -> None:
    lines = (ranges.ROOT / "docs/release.md").read_text().splitlines()
    cells = [re.findall(r"`(.*?)`", line) for line in lines if line.startswith("| `")]
    written = {name: SpecifierSet(bounds) for name, bounds, *_ in cells}
    assert written.pop("vllm") == Requirement(requirement(*declared_range())).specifier
    assert written == {name: declared(name).specifier for name in DISTRIBUTIONS}


def test_the_environment_has_what_is_behind_it_and_what_is_its_own(tmp_path: Path) -> None:
    python = ranges.make_environment(tmp_path / "env", [Choice("torch", "9.9", "skipped")])
    names = ("transformers", "verifiers", "torch")
    assert ranges.installed_versions(python, names) == ranges.installed_versions(
        sys.executable, names
    )
    assert ranges.new_distributions(tmp_path / "env") == []

    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    info = packages / "verifiers-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 9.9\n")
    assert ranges.installed_versions(python, ("verifiers",)) == ["9.9"]
    assert ranges.new_distributions(tmp_path / "env") == ["verifiers 9.9"]


def test_without_a_registry_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def versions(name: str) -> list[str]:
        raise NoRegistry("pip index: no route")

    monkeypatch.setattr(ranges, "versions", versions)
    monkeypatch.setattr(sys, "argv", ["tools.ranges", "newest"])
    assert ranges.main() == 2
    assert capsys.readouterr().err == "error: pip index: no route\n"
