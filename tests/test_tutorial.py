"""Pages whose every block is executed in order: files are written, commands run, output compared.

A block is a file (``title="path"``), one table of a TOML file (``title="path, one table"``) or a
console: ``$ command`` and what it prints, where ``...`` stands for anything. A command that has to
fail ends in ``# fails``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from waiting import LIMIT

from prime_rl.testing import make_group, score
from prime_rl_devkit.scaffold import write_package

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLE = DOCS / "examples/prime-rl-my-algo"
TABLE = ", one table"

SCRIPTS = {
    "pip": "import sys; from pip._internal.cli.main import main; sys.exit(main())",
    "pytest": "import sys; import pytest; sys.exit(pytest.console_main())",
    "prime-rl": "from prime_rl_app.cli import main; main()",
}


@dataclass(frozen=True)
class Block:
    """Fenced code of a page."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    pattern = r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$"
    found = re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)
    assert 2 * len(found) == len(re.findall("^```", page.read_text(), re.MULTILINE))
    return [Block(*each) for each in found]


@pytest.fixture(scope="module")
def commands_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a venv that has what ours has, and takes what the pages install."""
    folder = tmp_path_factory.mktemp("tutorial") / "venv"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text(f"import site; list(map(site.addsitedir, {ours}))\n")
    for name, code in SCRIPTS.items():
        script = folder / "bin" / name
        script.write_text(f"#!{folder / 'bin/python'}\n{code}\n")
        script.chmod(0o755)
    return folder / "bin"


@dataclass
class Reader:
    """Follows a page, block by block."""

    folder: Path
    commands_folder: Path
    commands: list[str] = field(default_factory=list)

    def follow(self, block: Block) -> None:
        if block.language == "console":
            for command, expected in exchanges(block.text):
                self.commands.append(command)
                compare(command, expected, self.run(command))
        elif block.title.endswith(TABLE):
            path = self.folder / block.title.removesuffix(TABLE)
            path.write_text(with_table(path.read_text(), block.text))
        else:
            assert block.title, f"neither a console nor a file:\n{block.text}"
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)

    def run(self, command: str) -> str:
        if command.startswith("cd "):
            self.folder = (self.folder / command.removeprefix("cd ")).resolve(strict=True)
            return ""
        # Pages install nothing but what they build.
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        kept = {key: each for key, each in os.environ.items() if key != "PYTHONPATH"}
        path = f"{self.commands_folder}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**kept, **offline, "PATH": path, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        fails = command.endswith("# fails")
        assert (done.returncode != 0) == fails, f"$ {command}\n{done.stdout}"
        return done.stdout


def exchanges(console: str) -> Iterator[tuple[str, list[str]]]:
    """Each command with the lines the page shows below it."""
    assert console.startswith("$ ")
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, *expected = part.splitlines()
        yield command, expected


def compare(command: str, expected: Sequence[str], output: str) -> None:
    """Every line of ``output`` is expected, whatever its columns' width; nothing is, where the page
    shows nothing."""
    if not expected:
        return
    patterns = [re.escape(spaced(line)).replace(r"\.\.\.", ".*") for line in expected]
    lines = "".join(r"(?:.*\n)*" if each == ".*" else rf"{each}\n" for each in patterns)
    found = "".join(f"{line}\n" for line in map(spaced, output.splitlines()) if line)
    shown = "\n".join(expected)
    assert re.fullmatch(lines, found), f"$ {command}\nprinted\n{output}\nexpected\n{shown}"


def spaced(line: str) -> str:
    return " ".join(line.split())


def with_table(text: str, table: str) -> str:
    """A TOML file with one of its tables, header and keys, in the place of what it was."""
    header = table.partition("\n")[0]
    assert text.count(f"\n{header}\n") == 1, header
    before, _, after = text.partition(f"{header}\n")
    rest = after.partition("\n\n")[2]
    return f"{before}{table}\n{rest}"


def test_what_differs_from_the_page_is_seen() -> None:
    compare("x", ["a", "...", "b 1... ms"], "a\nmore\nb 1.25 ms\n")
    for output in ("a\nb 2 ms\n", "b 1 ms\n", "a\nb 1 ms\nmore\n"):
        with pytest.raises(AssertionError, match="expected"):
            compare("x", ["a", "...", "b 1... ms"], output)


@pytest.mark.slow
def test_the_tutorial_goes_from_ten_lines_to_an_installed_wheel(
    tmp_path: Path, commands_folder: Path
) -> None:
    reader = Reader(tmp_path, commands_folder)
    for block in blocks(DOCS / "tutorial-algorithm.md"):
        reader.follow(block)
    for step in ("plugins new", "pytest", "plugins check", "--dry-run", "build", "--find-links"):
        assert any(step in command for command in reader.commands), step


@pytest.mark.slow
def test_the_commands_for_coding_agents_run(tmp_path: Path, commands_folder: Path) -> None:
    reader = Reader(tmp_path, commands_folder)
    for block in blocks(ROOT / "AGENTS.md"):
        reader.follow(block)
    for step in ("plugins new", "pytest", "plugins check", "plugins show"):
        assert any(step in command for command in reader.commands), step


@pytest.mark.slow
def test_the_first_environment_is_written_tested_and_trained_on(
    tmp_path: Path,
    commands_folder: Path,
    model_cache: Path,
    tiny_reverse: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))  # with the model that tiny_reverse made
    reader = Reader(tmp_path, commands_folder)
    for block in blocks(DOCS / "first-environment.md"):
        reader.follow(block)
    (run,) = tmp_path.glob("prime-rl-sorted-letters/outputs/first")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    name = "train/agg/all/reward/mean"
    rewards = [line[name] for line in lines if name in line]
    assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)


@pytest.mark.slow
def test_an_agent_is_trained_scored_and_replaced_by_a_harness(
    tmp_path: Path,
    commands_folder: Path,
    model_cache: Path,
    tiny_reverse: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))  # with the model that tiny_reverse made
    reader = Reader(tmp_path, commands_folder)
    for block in blocks(DOCS / "agents.md"):
        if block.language != "toml" or block.title:  # one table shows a key
            reader.follow(block)
    name = "train/agg/all/has_error/mean"
    for run in ("first", "scored", "own"):
        lines = (tmp_path / "outputs" / run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        failed = [r[name] for r in records if name in r]
        assert failed == [0.0], run


@pytest.mark.slow
def test_several_agents_are_trained_as_the_page_says(
    tmp_path: Path, commands_folder: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))
    reader = Reader(tmp_path, commands_folder)
    for block in blocks(DOCS / "several-agents.md"):
        if block.language != "toml" or block.title:  # one table shows a key
            reader.follow(block)
    assert reader.commands


@pytest.mark.slow
def test_the_page_on_migrating_ends_with_a_package_that_gives_the_old_numbers(
    tmp_path: Path, commands_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(tmp_path, commands_folder)
    for block in blocks(DOCS / "migrating.md"):
        reader.follow(block)
    group = make_group([1.0, 0.0, 0.5, 0.5])
    group[1].is_truncated, group[2].num_turns = True, 3
    old = upstream(tmp_path / "shaping.py", monkeypatch)
    expected = [old(group, turn_cost=cost) for cost in (0.0, 0.25)]
    monkeypatch.syspath_prepend(str(tmp_path / "prime-rl-spread/src"))
    import prime_rl_spread as new  # type: ignore[import-not-found]

    for cost, credit in zip((0.0, 0.25), expected, strict=True):
        score(new.Spread(new.SpreadConfig(turn_cost=cost)), group)
        assert [float(rollout.advantages[0]) for rollout in group] == pytest.approx(credit)
    assert expected[0] != pytest.approx(expected[1])


def upstream(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The old function, with the two classes it imports and a group as upstream gave it."""
    module = ModuleType("prime_rl.orchestrator.advantage")
    module.AdvantageInputs = module.AdvantageOutputs = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)

    def advantages(group: Sequence[Any], **kwargs: float) -> list[float]:
        rollouts = [
            {
                "reward": rollout.reward,
                "is_truncated": rollout.is_truncated,
                "trajectory": [{}] * rollout.num_turns,
            }
            for rollout in group
        ]
        given = names["spread_advantage"](SimpleNamespace(rollouts=rollouts), **kwargs)
        return [float(each) for each in given.advantages]

    return advantages


# -- the example of a third party's repository -----------------------------------------------------


def test_the_example_repository_is_what_plugins_new_writes(tmp_path: Path) -> None:
    """To fix: rm -r docs/examples/prime-rl-my-algo, then
    prime-rl plugins new my-algo --directory docs/examples/prime-rl-my-algo"""
    written = write_package("my-algo", "algorithm", tmp_path / "new").files
    names = sorted(path.relative_to(tmp_path / "new") for path in written)
    assert sorted(files(EXAMPLE)) == names
    for name in names:
        assert (EXAMPLE / name).read_text() == (tmp_path / "new" / name).read_text(), name


def files(folder: Path) -> Iterator[Path]:
    """Those that the folder's own ``.gitignore`` leaves in."""
    ignored = {line.strip("/") for line in (folder / ".gitignore").read_text().splitlines()}
    for path in folder.rglob("*"):
        if path.is_file() and not ignored & set(path.relative_to(folder).parts):
            yield path.relative_to(folder)
