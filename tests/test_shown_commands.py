"""Every command that a document, a docstring, a comment or a message shows exists as it is shown:
its name, its options, its files, its keys. Nothing is run here."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from bench.__main__ import BENCHES
from shown_commands import ROOT, Shown, shown_commands

from prime_rl_app.cli.app import add_commands, app
from prime_rl_app.cli.run import split_arguments, split_resume
from prime_rl_app.config import load_config
from prime_rl_app.resolve import check
from prime_rl_tools.commands.later import Later

FIRST_RUN = ROOT / "configs/reverse_text/grpo.toml"
FIRST_SFT = ROOT / "configs/sft/reverse.toml"
COMMANDS = shown_commands()


EXECUTED = {
    "docs/tutorial-algorithm.md",
    "docs/migrating.md",
    "docs/first-environment.md",
    "docs/agents.md",
    "docs/several-agents.md",
    "docs/sft.md",
    "docs/gateway.md",
    "AGENTS.md",
}
"""Pages whose blocks ``test_tutorial.py`` executes in order, with what they create."""


class Wrong(Exception):
    """What is wrong with a command."""


def test_every_shown_command_exists_as_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wrong = list[str]()
    for shown in COMMANDS:
        try:
            CHECKS[shown.words[0]](shown)
        except Wrong as error:
            wrong.append(f"{shown}\n    {error}")

    assert not wrong, "\n".join(wrong)


def test_commands_of_every_form_are_found() -> None:
    """Of pages, docstrings, comments of configs, READMEs of plugins and messages."""
    found = {(shown.where.partition(":")[0], shown.words[:3]) for shown in COMMANDS}
    assert len(COMMANDS) > 500
    assert ("docs/engines.md", ("prime-rl", "plugins", "check")) in found
    assert ("bench/publish.py", ("python", "-m", "bench.publish")) in found
    assert (
        "configs/algorithms/cispo.toml",
        ("prime-rl", "run", str(FIRST_RUN.relative_to(ROOT))),
    ) in found
    assert ("plugins/prime_rl_vllm/README.md", ("make", "test-vllm")) in found
    assert ("app/src/prime_rl_app/cli/__init__.py", ("prime-rl", "plugins", "list")) in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prime-rl trian x.toml", "no command"),
        ("prime-rl report latest --besides other", "no option"),
        ("prime-rl run configs/reverse_text/grpo.toml --trainer.optim.lrr 1", "lrr"),
        ("prime-rl run configs/no_such_folder/grpo.toml", "no file"),
        ("prime-rl plugins new", "Missing"),
        ("python -m bench publish --larger", "no option"),
        ("python -m bench publishing", "no bench"),
        ("python -m bench.publishing", "no module"),
        ("make tests", "no target"),
        ("make version NEWER=1", "no variable"),
        ("pip install prime-rl-nothing", "no distribution"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = tuple(text.split())
    with pytest.raises(Wrong, match=said):
        CHECKS[words[0]](Shown(where="here", words=words, form="line"))


# -- prime-rl ------------------------------------------------------------------------------------


@cache
def command_tree() -> Any:
    add_commands("prime_rl")
    return typer.main.get_group(app)


def check_prime_rl(shown: Shown) -> None:
    words = list(_without_notation(shown.words[1:]))
    command = command_tree()
    path = list[str]()
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            _check_options(command, [*words], "prime-rl")
            return
        if words[0] not in command.commands:
            if shown.form == "prose" or not re.fullmatch(r"[a-z][a-z-]*", words[0]):
                return
            raise Wrong(f"no command {' '.join([*path, words[0]])!r}")

        command = command.commands[words[0]]
        path.append(words.pop(0))

    if hasattr(command, "commands"):
        return

    if isinstance(command, Later):
        assert command.callback is not None
        alone = typer.Typer(add_completion=False)
        alone.command(context_settings=command.context_settings)(command.callback())
        command = typer.main.get_command(alone)

    if shown.form == "prose":
        words = [word for word in words if word.startswith("--")]
    elif shown.where.partition(":")[0] in EXECUTED:
        return
    if path in (["run"], ["sft"], ["plan"]):
        _check_run(words, command, FIRST_SFT if path == ["sft"] else FIRST_RUN)
    elif shown.form == "line":
        _check_whole(command, path[-1], words)
    else:
        _check_options(command, words, " ".join(path))


def _without_notation(words: tuple[str, ...]) -> list[str]:
    """``[--option VALUE]`` and a last ``...`` are of a description, not of the command."""
    kept = list[str]()
    for word in words:
        follows_option = bool(kept) and kept[-1].startswith("--") and "=" not in kept[-1]
        if word in ("...", "[...]", "..", "$@", "${@}"):
            if follows_option:
                kept.append("X")
        else:
            kept.append(word.strip("[]"))

    return kept


def _check_options(command: Any, words: list[str], path: str) -> None:
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    known |= {"--help", "-h", "--without"}
    passes_on = command.context_settings.get("ignore_unknown_options", False)
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known and not (passes_on and "." in name):
            raise Wrong(f"`{path}` has no option {name}; it has {', '.join(sorted(known))}")


def _check_whole(command: Any, name: str, words: list[str]) -> None:
    """Parse as click does. A file that is not in this repository is the reader's own."""
    _check_options(command, words, name)
    if "--help" in words or "-h" in words:
        return
    words = [re.sub(r"^[A-Z]$", "1", word) for word in words]
    try:
        command.make_context(name, words)
    except Exception as error:
        message = getattr(error, "message", "") or str(error)
        if "does not exist" not in message:
            raise Wrong(message) from error


def _check_run(words: list[str], command: Any, stand_in: Path) -> None:
    """Files of this repository exist, and overrides are keys of the config."""
    words, _ = split_resume([re.sub(r"\$\w+", "1", word) for word in words])
    for option in command.params:
        for name in option.opts:
            while name in words:
                first = words.index(name)
                del words[first : first + (1 if getattr(option, "is_flag", False) else 2)]

    words = [word for word in words if word != "--help"]
    files, overrides = split_arguments(words)
    for file in files:
        if file.startswith("configs/") and not [*ROOT.glob(file)]:
            raise Wrong(f"no file {file}")

    if not overrides:
        return
    known = [Path(file) for file in files if file.startswith("configs/")]
    if not known or known[0].parent.name == "algorithms":
        known.insert(0, stand_in)
    try:
        config = load_config(known, overrides)
        if not any(re.fullmatch(r"[A-Z]+", word) for word in overrides):
            check(config)
    except Exception as error:
        # A file of the reader's own is not here.
        if not re.search("nothing was given|does not exist", str(error)):
            raise Wrong(str(error)) from error


# -- python -m -----------------------------------------------------------------------------------


def check_python(shown: Shown) -> None:
    if shown.words[1:2] != ("-m",):
        return
    module, *words = _without_notation(shown.words[2:])
    if module.startswith("X") or module in ("venv", "pip", "pytest", "build", "http.server"):
        return
    if module == "bench" and words[:1] == ["--record"]:
        words = words[1:]
    if module == "bench" and words:
        name = words[0]
        if re.fullmatch(r"[a-z_]+", name) and name not in BENCHES:
            raise Wrong(f"no bench {name!r}; there are {', '.join(BENCHES)}")
        module = f"bench.{name}" if name in BENCHES else module

    source = _source_of(module)
    for word in words:
        option = word.partition("=")[0]
        if re.match(r"--[a-z]", option) and option not in source:
            raise Wrong(f"{module} has no option {option}")


@cache
def _source_of(module: str) -> frozenset[str]:
    """The texts in a module that can be run."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise Wrong(f"no module {module}")
    path = Path(spec.origin)
    if path.name == "__init__.py":
        path = path.with_name("__main__.py")
    if not path.exists() or ("__main__" not in path.read_text("utf-8") and path.stem != "__main__"):
        raise Wrong(f"{module} cannot be run: it has no main")
    tree = ast.parse(path.read_text("utf-8"))
    imported = {
        str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prime_rl")
    }
    trees = [tree]
    for name in imported:  # where the options of both engines' servers are
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            trees.append(ast.parse(Path(found.origin).read_text("utf-8")))

    nodes = [node for each in trees for node in ast.walk(each)]
    return frozenset(str(node.value) for node in nodes if isinstance(node, ast.Constant))


# -- make and pip --------------------------------------------------------------------------------


def check_make(shown: Shown) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    rules = re.findall(r"^([\w.][\w .-]*):(?!=)", makefile, re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for word in _without_notation(shown.words[1:]):
        variable, given, _ = word.partition("=")
        if given and f"$({variable})" not in makefile and variable != "ARGS":
            raise Wrong(f"no variable {variable}")
        if not given and re.fullmatch(r"[a-z][\w-]*", word) and word not in targets:
            raise Wrong(f"no target {word}; there are {', '.join(sorted(targets))}")


@cache
def _distributions() -> frozenset[str]:
    projects = [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml")]
    projects += ROOT.glob("plugins/*/pyproject.toml")
    names = [re.search(r'^name = "(.+)"$', path.read_text("utf-8"), re.M) for path in projects]
    return frozenset(name[1] for name in names if name is not None)


def check_pip(shown: Shown) -> None:
    if shown.where.partition(":")[0] in EXECUTED:
        return
    for word in shown.words[2:]:
        name = re.split(r"[\[=<>~]", word)[0]
        if re.fullmatch(r"prime-rl(-[a-z0-9-]+)?", name) and name not in _distributions():
            raise Wrong(f"no distribution {name} in this repository")


CHECKS = {
    "prime-rl": check_prime_rl,
    "python": check_python,
    "python3": check_python,
    "make": check_make,
    "pip": check_pip,
}
