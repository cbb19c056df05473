"""The arrows: who may import whom. Read from the source, so that a lazy import counts too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import prime_rl

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/prime_rl"
PLUGINS = sorted([*(ROOT / "plugins").glob("prime_rl_*"), *ROOT.glob("prime_rl_*")])
PLUGINS = [folder for folder in PLUGINS if (folder / "pyproject.toml").exists()]

MODULES_OF = {"prime-rl-core": "prime_rl", "pyzmq": "zmq"}
"""Import name of a distribution where it is not its own name with underscores."""

PUBLIC = {"prime_rl", "prime_rl.testing"}
"""What every plugin may import of core."""

FOR_SERVERS = {
    *("prime_rl.rundir.launch", "prime_rl.rundir.processes", "prime_rl.rundir.status"),
    *("prime_rl.adapter", "prime_rl.model_files", "prime_rl.errors"),
}
"""What a plugin that starts a process of its own may import besides: how to be a child of a run and
a server of the engine contract, and what a published folder holds."""

FOR_LAUNCHERS = {"prime_rl.run.children"}
"""What a plugin that starts a run's processes may import besides: how to start and end one."""

HAS_LAUNCHER = {"prime_rl_ray"}

FOR_TRANSPORTS = {
    *(
        "prime_rl.plugins.weight_transports",
        "prime_rl.weights.tensors",
        "prime_rl.weights.versions",
    ),
    *("prime_rl.rundir.launch", "prime_rl.rundir.status"),
}
"""What a weight transport may import besides: the contract, versions on disk and addresses."""

HAS_TRANSPORT = {"prime_rl_broadcast"}

HAS_SERVER = {"prime_rl_embedded", "prime_rl_engine_kit", "prime_rl_environments", "prime_rl_vllm"}

OF_CORE = {"prime_rl_devkit", "prime_rl_tools"}
"""Commands that look into core itself and are released with it: they may import all of it but the
trainer."""


@dataclass(frozen=True)
class Import:
    """One imported module. ``from a.b import c`` is ``a.b.c`` where that is one, else ``a.b``."""

    module: str
    file: Path
    line: int
    typing_only: bool
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"

    def inside(self, *packages: str) -> bool:
        return any(self.module == each or self.module.startswith(f"{each}.") for each in packages)


@cache
def imports(file: Path) -> tuple[Import, ...]:
    """Every import of a file, at any depth."""
    tree = ast.parse(file.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        for module, names in _imported(node, file):
            found.append(Import(module, file, node.lineno, id(node) in typing_only, names))  # type: ignore[attr-defined]
    return tuple(found)


def _imported(node: ast.AST, file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, ()
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{file}:{node.lineno}: relative import"
        module = node.module or ""
        names = tuple(alias.name for alias in node.names)
        submodules = [n for n in names if _is_core_module(f"{module}.{n}")]
        for name in submodules:
            yield f"{module}.{name}", ()
        if rest := tuple(name for name in names if name not in submodules):
            yield module, rest
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        for argument in node.args[:1]:
            if isinstance(argument, ast.Constant):
                yield str(argument.value), ()


def _is_core_module(name: str) -> bool:
    path = CORE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def files(*folders: str) -> list[Path]:
    """Core's Python files, of some packages or modules."""
    paths = [CORE / folder for folder in folders] if folders else [CORE]
    return [f for path in paths for f in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


def offences(among: list[Path], *packages: str, typing_too: bool = False) -> list[str]:
    """Imports of ``packages`` among some files."""
    return [
        str(each)
        for file in among
        for each in imports(file)
        if each.inside(*packages) and (typing_too or not each.typing_only)
    ]


def import_names(folder: Path) -> list[str]:
    """The top-level packages of a plugin's folder."""
    return sorted(path.parent.name for path in (folder / "src").glob("*/__init__.py"))


def pyproject(folder: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


# -- 1: core imports no plugin -------------------------------------------------------------------


def test_core_imports_no_plugin() -> None:
    names = [name for folder in PLUGINS for name in import_names(folder)]
    assert {"prime_rl_grpo", "prime_rl_embedded", "reverse_text", "in_process"} <= set(names)
    assert offences(files(), *names, typing_too=True) == []


def test_core_names_no_algorithm() -> None:
    found = [
        f"{path.relative_to(CORE)}: {line.strip()}"
        for path in files()
        for line in path.read_text().splitlines()
        if re.search("grpo|max_?rl", line, re.IGNORECASE)
    ]
    assert found == []


# -- 2: the two sides ----------------------------------------------------------------------------

TORCH_FREE = ("weights/__init__.py", "weights/versions.py", "weights/transports.py")
SHARED = ("wire", "config", "rollout.py", "plugins", *TORCH_FREE)
ORCHESTRATOR_SIDE = (
    "orchestrator",
    "inference",
    "monitor",
    "run",
    "cli",
    "testing",
    "defaults.py",
)
WITH_TORCH = {"gradient.py"}
"""The module of the test kit that checks gradients, where torch is installed."""


def test_the_orchestrator_side_imports_neither_trainer_nor_torch() -> None:
    side = files(*ORCHESTRATOR_SIDE, *SHARED, "env", "rundir", "__init__.py")
    kit = {CORE / "testing" / name for name in WITH_TORCH}
    assert kit <= set(side)
    side = [file for file in side if file not in kit]
    assert offences(side, "torch", "prime_rl.trainer", "prime_rl.weights.tensors") == []
    assert {
        each.file.name for file in side for each in imports(file) if each.inside("transformers")
    } <= {"rendering.py"}


def test_the_trainer_side_imports_no_orchestrator_no_environment_and_no_inference() -> None:
    others = ("orchestrator", "inference", "monitor", "cli", "testing", "defaults")
    names = [f"prime_rl.{other}" for other in others]
    assert offences(files("trainer"), *names, "verifiers", "renderers") == []


def test_the_trainer_uses_no_scoring_hook_and_no_algorithm() -> None:
    """It may load plugins of its own group; of the contract's classes it knows losses only."""
    foreign = {"Algorithm", "Filter", "Sampler", "Engine", "Monitor", "ModelMaker", "ALGORITHM"}
    for file in files("trainer"):
        for each in imports(file):
            assert not foreign & set(each.names), f"{each}: {each.names}"


def test_the_processes_of_a_run_import_nothing_of_their_supervisor() -> None:
    sides = files(*SHARED, "env", "inference", "monitor", "orchestrator", "rundir", "trainer")
    assert offences(sides, "prime_rl.run", "prime_rl.cli") == []


def test_what_both_sides_share_imports_neither_side() -> None:
    both = ("prime_rl.orchestrator", "prime_rl.trainer", "prime_rl.inference", "prime_rl.monitor")
    assert offences(files(*SHARED), *both, "verifiers", "renderers") == []


# -- 3: the trainer's own entry-point group ------------------------------------------------------


def test_every_trainer_load_of_plugins_names_the_trainer_group() -> None:
    calls = [
        ast.unparse(node)
        for file in files("trainer")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load_plugins")
    ]
    assert calls
    assert all(call.startswith("load_plugins(TRAINER_GROUP") for call in calls), calls


def test_losses_and_weight_transports_are_offered_to_the_trainer() -> None:
    groups = {folder.name: pyproject(folder).get("entry-points", {}) for folder in PLUGINS}
    offering = [name for name, found in groups.items() if "prime_rl.trainer" in found]  # type: ignore[operator]
    assert offering == ["prime_rl_broadcast", "prime_rl_clip_losses", "prime_rl_losses"]


# -- 4: plugins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_imports_of_core_what_is_public(folder: Path) -> None:
    allowed = PUBLIC | (FOR_SERVERS if folder.name in HAS_SERVER else set())
    allowed |= FOR_LAUNCHERS if folder.name in HAS_LAUNCHER else set()
    allowed |= FOR_TRANSPORTS if folder.name in HAS_TRANSPORT else set()
    for file in sorted((folder / "src").rglob("*.py")):
        for each in imports(file):
            if folder.name in OF_CORE:
                assert not each.inside("prime_rl.trainer"), str(each)
            elif each.inside("prime_rl"):
                assert each.module in allowed, str(each)
                if each.module == "prime_rl":
                    unknown = [name for name in each.names if not hasattr(prime_rl, name)]
                    assert unknown == [], str(each)


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_imports_of_others_what_its_pyproject_declares(folder: Path) -> None:
    known = set(import_names(folder)) | declared(folder) | sys.stdlib_module_names
    for file in sorted((folder / "src").rglob("*.py")):
        for each in imports(file):
            assert each.module.partition(".")[0] in known, str(each)


def test_core_imports_of_others_what_its_pyproject_declares() -> None:
    known = declared(ROOT / "core") | {"prime_rl"} | sys.stdlib_module_names
    for file in files():
        for each in imports(file):
            assert each.module.partition(".")[0] in known, str(each)


def test_the_slim_core_imports_nothing_of_its_extra_when_a_plugin_is_written() -> None:
    """``prime_rl`` and its test kit import where only the base dependencies are installed."""
    extra = declared(ROOT / "core") - declared(ROOT / "core", extras=False)
    assert {"torch", "verifiers", "zmq", "renderers", "matplotlib"} <= extra
    loaded = modules_loaded_by("import prime_rl, prime_rl.testing")
    assert loaded & extra == set()


def declared(folder: Path, extras: bool = True) -> set[str]:
    """Import names of what a distribution requires, its extras included."""
    project = pyproject(folder)
    required = list(project.get("dependencies", []))  # type: ignore[call-overload]
    if extras:
        optional: dict[str, list[str]] = project.get("optional-dependencies", {})  # type: ignore[assignment]
        required += [each for group in optional.values() for each in group]
    names = [re.split(r"[\s\[<>=!~;]", each, maxsplit=1)[0] for each in required]
    return {MODULES_OF.get(name, name.replace("-", "_")) for name in names}


# -- 5: one adapter ------------------------------------------------------------------------------


def test_verifiers_lives_behind_one_adapter() -> None:
    """Its types may be named where its objects pass through; only ``env`` imports it to use.

    ``orchestrator/__main__.py`` imports it for the time that takes, and uses nothing of it.
    """
    found = {
        each.file.relative_to(CORE).as_posix()
        for f in files()
        for each in imports(f)
        if each.inside("verifiers") and not each.typing_only
    }
    assert found <= {"env/loading.py", "env/rendering.py", "orchestrator/__main__.py"}
    lines = (CORE / "orchestrator/__main__.py").read_text().splitlines()
    mentions = [line.strip() for line in lines if "verifiers." in line or "vf." in line]
    assert all(line.startswith("import verifiers.v1  # noqa: F401") for line in mentions), mentions


def test_the_loop_knows_no_trace() -> None:
    """Of a verifiers trace, only the adapter's modules read anything; all others pass it on."""
    readers = [
        path.relative_to(CORE).as_posix()
        for path in files("orchestrator", "rollout.py", "plugins", "monitor", "wire")
        if re.search(r"\btrace\.\w", path.read_text())
    ]
    assert set(readers) <= {"env/episode.py", "env/traces.py"}


# -- 6: config -----------------------------------------------------------------------------------


def test_config_imports_no_run_time_module() -> None:
    allowed = ("prime_rl.config", "prime_rl.errors", "pydantic")
    for file in files("config"):
        for each in imports(file):
            own = each.module.partition(".")[0] in sys.stdlib_module_names
            assert own or each.inside(*allowed), str(each)


# -- 7: quick commands ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["plugins", "list"], ["plugins", "list", "--json"]],
    ids=" ".join,
)
def test_a_quick_command_imports_nothing_heavy(arguments: list[str]) -> None:
    loaded = modules_loaded_by(
        f"""
import sys
sys.argv = ["prime-rl", *{arguments!r}]
from prime_rl.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    )
    assert (
        loaded & {"torch", "verifiers", "transformers", "renderers", "zmq", "matplotlib"} == set()
    )


def test_the_orchestrators_loop_loads_without_torch_and_without_verifiers() -> None:
    loaded = modules_loaded_by("import prime_rl.orchestrator.loop")
    assert loaded & {"torch", "verifiers", "transformers", "prime_rl.trainer"} == set()


def modules_loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after ``code``."""
    tail = "\nimport sys\nprint('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED ")[2].split())
