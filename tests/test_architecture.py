"""The direction of imports, read from the source: an import inside a function counts too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from source_imports import (
    APPLICATION,
    CORE,
    PLUGINS,
    ROOT,
    declared,
    files,
    forbidden,
    import_names,
    imports,
    pyproject,
)

import prime_rl
from prime_rl.entries import OF_OURS, OF_PLUGINS
from prime_rl.registry.manager import GROUPS, load_plugins
from prime_rl.registry.offers import KINDS, collect

PUBLIC = {"prime_rl", "prime_rl.testing"}
"""Modules of core that every plugin may import."""

EXEMPT = {
    # An engine's or a worker's process is a child of a run: it reports its state and ends with it.
    # Rewards of a group are code of an env in the orchestrator, which no exit of it may end.
    ("prime_rl_embedded", "prime_rl_engine_kit", "prime_rl_environments", "prime_rl_vllm"): (
        "prime_rl.env.environment",
        "prime_rl.errors",
        "prime_rl.rundir.launch",
        "prime_rl.rundir.logs",
        "prime_rl.rundir.machine",
        "prime_rl.rundir.processes",
        "prime_rl.rundir.status",
    ),
    # A weight transport reads and writes the versions that core announces.
    ("prime_rl_broadcast",): (
        "prime_rl.plugins.weight_transports",
        "prime_rl.proxies",
        "prime_rl.rundir.attempts",
        "prime_rl.rundir.launch",
        "prime_rl.rundir.polls",
        "prime_rl.rundir.status",
        "prime_rl.weights.tensors",
        "prime_rl.weights.versions",
    ),
    # A launcher starts and ends processes as the application does.
    ("prime_rl_ray",): ("prime_rl.rundir.machine", "prime_rl.variables", "prime_rl_app.children"),
    # Kernels, adapters and observers of the trainer see its rows and tensors.
    ("prime_rl_kernels", "prime_rl_lora", "prime_rl_observers"): (
        "prime_rl.env.traces",
        "prime_rl.orchestrator.buffer",
        "prime_rl.registry.calls",
        "prime_rl.registry.components",
        "prime_rl.rollout",
        "prime_rl.rundir.status",
        "prime_rl.streams",
        "prime_rl.trainer",
        "prime_rl.weights",
        "prime_rl.wire.micro_batch",
    ),
    # Tools are a floor above the application: they read all of both but the trainer.
    (
        "prime_rl_devkit",
        "prime_rl_env_workers",
        "prime_rl_evals",
        "prime_rl_plan",
        "prime_rl_tools",
    ): ("prime_rl", "prime_rl_app"),
}
"""Modules of core and of the application that packages released with them import beside the public
names."""

CALLS_THE_TRAINER = (
    "prime_rl_devkit/algorithms/gradient.py",
    "prime_rl_devkit/lab/updates.py",
    "prime_rl_plan/fake.py",
    "prime_rl_plan/measure.py",
)
"""The modules of the author's kit that call its loss, and those of plan that let it take a step, in
a process of their own."""


# -- 1: contract <- core <- application <- tools; a plugin sees public names -----------------------


CONTRACT = (
    "config/base.py",
    "config/contract.py",
    "errors.py",
    "plugins",
    "rewards.py",
    "rollout.py",
    "streams.py",
)
"""The floor that a newcomer reads first, alone."""


def test_the_contract_imports_nothing_of_the_machine_not_for_types_either() -> None:
    allowed = [f"prime_rl.{path.removesuffix('.py').replace('/', '.')}" for path in CONTRACT]
    found = [
        str(each)
        for file in files(*CONTRACT)
        for each in imports(file)
        if each.inside("prime_rl") and not each.inside(*allowed)
    ]
    assert found == []


def test_no_import_circle_in_the_contract_with_types_counted() -> None:
    edges = edges_between(_module_name, files(*CONTRACT), typing_too=True)
    assert circles(edges) == []


def test_the_public_names_are_those_that_a_type_checker_sees() -> None:
    named = dict(prime_rl._MODULES)
    typed = [each for each in imports(CORE / "__init__.py") if each.typing_only]
    seen = {name: each.module for each in typed for name in each.names}
    assert named == seen
    assert sorted(prime_rl.__all__) == sorted(named)


def plugin_names() -> list[str]:
    return [name for folder in PLUGINS for name in import_names(folder)]


def test_core_imports_no_plugin_and_nothing_of_the_application() -> None:
    names = plugin_names()
    assert {"prime_rl_grpo", "prime_rl_embedded", "text_reversal", "in_process"} <= set(names)
    assert forbidden(files(), *names, "prime_rl_app", typing_too=True) == []


def test_the_application_imports_no_plugin() -> None:
    application = sorted(APPLICATION.rglob("*.py"))
    assert application
    assert forbidden(application, *plugin_names(), typing_too=True) == []


def test_core_names_no_algorithm() -> None:
    found = [
        f"{path.relative_to(CORE)}: {line.strip()}"
        for path in files()
        for line in path.read_text().splitlines()
        if re.search("grpo|max_?rl", line, re.IGNORECASE)
    ]
    assert found == []


# -- 2: the two sides ----------------------------------------------------------------------------

TORCH_FREE = ("weights/__init__.py", "weights/versions.py")
SHARED = ("wire", "config", "rollout.py", "plugins", "registry", *TORCH_FREE)
ORCHESTRATOR_SIDE = (
    "orchestrator",
    "inference",
    "testing",
)


def test_the_orchestrator_side_imports_neither_trainer_nor_torch() -> None:
    side = files(*ORCHESTRATOR_SIDE, *SHARED, "env", "rundir", "__init__.py")
    assert forbidden(side, "torch") == []
    assert forbidden(side, "prime_rl.trainer", "prime_rl.weights.tensors", typing_too=True) == []
    assert {
        each.file.name for file in side for each in imports(file) if each.inside("transformers")
    } <= {"rendering.py"}


def test_the_trainer_side_imports_no_orchestrator_no_environment_and_no_inference() -> None:
    others = ("orchestrator", "inference", "env", "testing")
    names = [f"prime_rl.{other}" for other in others]
    assert forbidden(files("trainer"), *names, "verifiers", "renderers", typing_too=True) == []


def test_the_trainer_uses_no_scoring_hook_and_no_algorithm() -> None:
    """It loads plugins of its own group. Of the contract's classes it uses losses only."""
    foreign = {"Algorithm", "Filter", "Sampler", "Engine", "Monitor", "ModelMaker", "ALGORITHM"}
    for file in files("trainer"):
        for each in imports(file):
            assert not foreign & set(each.names), f"{each}: {each.names}"


def test_what_both_sides_share_imports_neither_side() -> None:
    both = ("prime_rl.orchestrator", "prime_rl.trainer", "prime_rl.inference")
    assert forbidden(files(*SHARED), *both, "verifiers", "renderers", typing_too=True) == []


def test_the_run_directory_imports_config_and_contract_only() -> None:
    contract = ("prime_rl.errors", "prime_rl.plugins")
    allowed = ("prime_rl.config", "prime_rl.rundir", *contract)
    for file in files("rundir"):
        for each in imports(file):
            assert not each.inside("prime_rl") or each.inside(*allowed), str(each)


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


def test_losses_heads_transports_observers_tunings_and_kernels_are_offered_to_the_trainer() -> None:
    groups = {folder.name: pyproject(folder).get("entry-points", {}) for folder in PLUGINS}
    offering = [name for name, found in groups.items() if "prime_rl.trainer" in found]  # type: ignore[operator]
    assert offering == [
        *("prime_rl_baselines", "prime_rl_broadcast", "prime_rl_clip_losses", "prime_rl_credit"),
        *(
            "prime_rl_kernels",
            "prime_rl_lora",
            "prime_rl_losses",
            "prime_rl_observers",
            "prime_rl_optimizers",
        ),
        *("prime_rl_ppo", "prime_rl_preference"),
    ]


# -- 4: plugins ----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_imports_of_core_what_is_public(folder: Path) -> None:
    exempt = next((modules for names, modules in EXEMPT.items() if folder.name in names), ())
    is_tool = "prime_rl_app" in exempt
    for file in sorted((folder / "src").rglob("*.py")):
        may_train = not is_tool or file.as_posix().endswith(CALLS_THE_TRAINER)
        for each in imports(file):
            if not each.inside("prime_rl", "prime_rl_app"):
                continue
            assert may_train or not each.inside("prime_rl.trainer"), str(each)
            assert each.module in PUBLIC or each.inside(*exempt), str(each)
            if each.module == "prime_rl":
                unknown = [name for name in each.names if not hasattr(prime_rl, name)]
                assert unknown == [], str(each)


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_imports_of_others_what_its_pyproject_declares(folder: Path) -> None:
    known = set(import_names(folder)) | declared(folder) | sys.stdlib_module_names
    for file in sorted((folder / "src").rglob("*.py")):
        for each in imports(file):
            assert each.module.partition(".")[0] in known, str(each)


@pytest.mark.parametrize(("folder", "source"), [(ROOT / "core", CORE), (ROOT / "app", APPLICATION)])
def test_a_floor_imports_of_others_what_its_pyproject_declares(folder: Path, source: Path) -> None:
    known = {source.name, "prime_rl"} | declared(folder) | sys.stdlib_module_names
    for file in sorted(source.rglob("*.py")):
        for each in imports(file):
            assert each.module.partition(".")[0] in known, str(each)


def test_the_slim_core_imports_nothing_of_its_extra_when_a_plugin_is_written() -> None:
    """``prime_rl`` and its test kit can be imported with the base dependencies alone."""
    extra = declared(ROOT / "core") - declared(ROOT / "core", extras=False)
    assert {"torch", "verifiers", "renderers", "psutil"} <= extra
    loaded = modules_loaded_by("import prime_rl, prime_rl.testing")
    assert loaded & extra == set()


# -- core is tested alone -------------------------------------------------------------------------

TOOLS_OF_TESTS = {"pytest", "hypothesis", "aiohttp", "tokenizers"}
"""What runs the tests, and what verifiers and transformers bring: aiohttp serves the engines of the
tests, and tokenizers makes their tokenizer."""


def files_of_cores_tests() -> list[Path]:
    """The files below ``core/tests``, and the shared modules of ``tests`` that these import."""
    todo = sorted((ROOT / "core/tests").rglob("*.py"))
    seen: list[Path] = []
    while todo:
        file = todo.pop()
        seen.append(file)
        shared = [ROOT / "tests" / f"{each.module}.py" for each in imports(file)]
        todo += [path for path in shared if path.exists() and path not in (*seen, *todo)]
    return seen


def test_a_test_of_core_imports_what_core_declares() -> None:
    """Its losses and optimizers are in ``core/tests/parts``; a test that needs another distribution
    belongs to that one, or to ``tests``. ``warm.py`` also forks whole command lines."""
    found = files_of_cores_tests()
    assert len(found) > 90
    assert {"waiting.py", "trainer_fixtures.py", "env_cases.py"} <= {file.name for file in found}
    own = {file.stem for file in found}
    ours = {name for folder in PLUGINS for name in import_names(folder)} | {"prime_rl_app"}
    known = own | {"prime_rl"} | declared(ROOT / "core") | TOOLS_OF_TESTS
    known = (known | sys.stdlib_module_names) - ours
    strange = [
        str(each)
        for file in found
        for each in imports(file)
        if each.module.partition(".")[0] not in known and file.name != "warm.py"
    ]
    assert strange == []
    started = [str(file) for file in found if "prime_rl_app" in file.read_text("utf-8")]
    assert [name for name in started if not name.endswith("tests/warm.py")] == []


# -- 5: one adapter ------------------------------------------------------------------------------


def test_verifiers_lives_behind_one_adapter() -> None:
    """Other modules may use its types in annotations only.

    ``orchestrator/__main__.py`` imports it early because that takes seconds, and uses nothing.
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
    """Only the adapter's modules read a verifiers trace; the others pass it on."""
    readers = [
        path.relative_to(CORE).as_posix()
        for path in files("orchestrator", "rollout.py", "plugins", "wire")
        if re.search(r"\btrace\.\w", path.read_text())
    ]
    assert set(readers) <= {"env/episode.py", "env/traces.py"}


# -- 6: config -----------------------------------------------------------------------------------


def test_config_imports_no_run_time_module() -> None:
    allowed = ("prime_rl.config", "prime_rl.entries", "prime_rl.errors", "pydantic")
    for file in files("config"):
        for each in imports(file):
            own = each.module.partition(".")[0] in sys.stdlib_module_names
            assert own or each.inside(*allowed), str(each)


def test_the_settings_of_a_plugin_live_in_its_package() -> None:
    for group in GROUPS:
        for kind in KINDS:
            for offered in collect(load_plugins(group), kind).values():
                modules = (offered.cls.__module__, offered.cls.config_class.__module__)
                packages = {module.partition(".")[0] for module in modules} - {"prime_rl"}
                assert len(packages) <= 1, offered


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
from prime_rl_app.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    )
    assert (
        loaded & {"torch", "verifiers", "transformers", "renderers", "zmq", "matplotlib"} == set()
    )
    assert "pydantic" not in loaded or arguments != ["--help"]


def test_the_orchestrators_loop_loads_without_torch_and_without_verifiers() -> None:
    loaded = modules_loaded_by("import prime_rl.orchestrator.loop")
    assert loaded & {"torch", "verifiers", "transformers", "prime_rl.trainer"} == set()


def test_what_plugins_offer_is_listed_without_anything_heavy() -> None:
    loaded = modules_loaded_by(
        "import prime_rl.testing, prime_rl_app.cli.app, prime_rl_app.resolve\n"
        "from prime_rl.registry.manager import GROUPS, load_plugins\n"
        "from prime_rl.registry.offers import KINDS, collect\n"
        "assert all([collect(load_plugins(g), kind) for kind in KINDS] for g in GROUPS)"
    )
    assert (
        loaded & {"torch", "transformers", "verifiers", "renderers", "matplotlib", "zmq"} == set()
    )


def modules_loaded_by(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after ``code``."""
    tail = "\nimport sys\nprint('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED ")[2].split())


# -- 8: no circles -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [CORE, APPLICATION], ids=["core", "application"])
def test_no_import_circle_between_files_with_types_counted(source: Path) -> None:
    edges = edges_between(_module_name, sorted(source.rglob("*.py")), typing_too=True)
    assert len(edges) > 20
    assert circles(edges) == []


def test_no_import_circle_between_folders_of_core_with_types_counted() -> None:
    """A module beside the folders (``rollout.py``) counts as a folder of its own."""
    assert circles(edges_between(_folder_name, typing_too=True)) == []


def test_a_circle_is_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str](), "e": {"a"}}
    assert circles(edges) == [["b", "c"]]


def edges_between(
    name: Callable[[Path], str], sources: Sequence[Path] | None = None, typing_too: bool = False
) -> dict[str, set[str]]:
    """The imports of core's files, or of ``sources``, with the files merged by name. Typing-only
    imports are left out unless ``typing_too``."""
    sources = files() if sources is None else sources
    by_module = {_module_name(file): file for file in sources}
    edges: dict[str, set[str]] = {name(file): set() for file in sources}
    for file in sources:
        for each in imports(file):
            if each.module in by_module and (typing_too or not each.typing_only):
                edges[name(file)] |= {name(by_module[each.module])} - {name(file)}
    return edges


def _module_name(file: Path) -> str:
    floor = CORE if file.is_relative_to(CORE) else APPLICATION
    path = file.relative_to(floor.parent).with_suffix("")
    return ".".join(path.parent.parts if path.name == "__init__" else path.parts)


def _folder_name(file: Path) -> str:
    first, *rest = file.relative_to(CORE).parts
    return first if rest else file.name


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that all reach each other."""
    reached = {start: _reached(start, edges) for start in edges}
    found = {
        tuple(sorted(other for other in reached[start] if start in reached[other]))
        for start in edges
        if start in reached[start]
    }
    return sorted(map(list, found))


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """Nodes on a path of at least one edge from ``start``."""
    seen: set[str] = set()
    todo = list(edges[start])
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += edges[node]
    return seen


@pytest.mark.parametrize(
    "word", ["sampler", "rollout", "algorithm", "filters", "packer", "wire", "trainer", "weights"]
)
def test_the_loop_names_the_words_of_the_flow(word):
    assert word in (CORE / "orchestrator/loop.py").read_text()


@pytest.mark.parametrize("page", ["map.md", "tour.md"])
def test_every_file_that_the_map_and_the_tour_name_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`((?:app|plugins|[a-z_]+)/[\w/]+\.py)`", text)
    assert len(named) > 20

    def exists(path: str) -> bool:
        if path.startswith("app/"):
            return (APPLICATION / path.removeprefix("app/")).exists()
        if path.startswith("prime_rl/"):
            return (CORE / path.removeprefix("prime_rl/")).exists()
        return (CORE / path).exists() or (ROOT / path).exists()

    assert [path for path in named if not exists(path)] == []


def files_of_the_flow() -> list[str]:
    """The documented list, in its order."""
    section = (ROOT / "docs/map.md").read_text("utf-8").partition("## The flow in twelve files")[2]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section.partition("\n## ")[0], re.MULTILINE)


def test_the_tour_goes_through_the_twelve_files_of_the_flow_in_their_order() -> None:
    flow = files_of_the_flow()
    assert len(flow) == len({*flow}) == 12
    assert (flow[0], flow[-1]) == ("orchestrator/loop.py", "orchestrator/policy.py")
    tour = (ROOT / "docs/tour.md").read_text("utf-8")
    assert f"`{flow[0]}`" in tour.partition("\n## 1. ")[0]  # open beside the page

    stops = tour.partition("\n## 1. ")[2]
    places = [stops.find(f"`{file}`") for file in flow[3:]]
    assert -1 not in places and places == sorted(places)
    first = stops.partition("\n## 2. ")[0]
    assert all(f"`{file}`" in first for file in flow[1:3])


def helpers_above_their_use(tree: ast.Module) -> list[str]:
    """Private functions and methods of a module that are defined above their first use in it."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    wrong = []
    for body, is_method in ((tree.body, False), *((each.body, True) for each in classes)):
        for helper in body:
            if not isinstance(helper, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not re.match("_[a-z]", helper.name):
                continue

            uses = [
                node.lineno
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute if is_method else ast.Name)
                and helper.name == (node.attr if is_method else node.id)  # type: ignore[attr-defined]
                and not helper.lineno <= node.lineno <= (helper.end_lineno or 0)
            ]
            if uses and min(uses) > helper.lineno:
                wrong.append(helper.name)

    return wrong


@pytest.mark.parametrize("file", files_of_the_flow())
def test_a_file_of_the_flow_reads_from_top_to_bottom(file: str) -> None:
    assert helpers_above_their_use(ast.parse((CORE / file).read_text("utf-8"))) == []


def test_a_helper_above_its_use_is_found() -> None:
    below = "def run():\n    return _help()\n\ndef _help():\n    return _help\n"
    above = "def _help(): ...\n\ndef run():\n    return _help()\n"
    methods = "class A:\n    def _a(self): ...\n    def run(self):\n        self._a()\n"
    found = [helpers_above_their_use(ast.parse(text)) for text in (below, above, methods)]
    assert found == [[], ["_help"], ["_a"]]


ONE_IMPLEMENTATION = {
    "prime_rl.checks": "prime_rl.testing is core's, and only the author's kit brings the checks",
    "prime_rl.tracers": "a run traces hooks only where the kit is installed",
    "prime_rl.env_workers": "where it is missing, environments run in the orchestrator's process",
    "prime_rl.fits": "where it is missing, a config says itself how GPUs are divided",
    "prime_rl.machine_defaults": "another engine may be the default of a machine too",
}
"""Groups of entry points with one implementation here: why they are no import. At most five."""


def groups_of_entry_points() -> dict[str, set[str]]:
    """The groups that our distributions declare, and which do."""
    offered: dict[str, set[str]] = {}
    for folder in (ROOT, ROOT / "app", ROOT / "core", *PLUGINS):
        for group in pyproject(folder).get("entry-points", {}):  # type: ignore[attr-defined]
            offered.setdefault(group, set()).add(folder.name)
    return {group: names for group, names in offered.items() if group.startswith("prime_rl")}


GROUP_READ = re.compile(r'\b(?:entries|installed)\(\s*"(prime_rl\w*\.\w+)"')
GROUP_NAMED = re.compile(r'^[A-Z_]+ = "(prime_rl\w*\.\w+)"$', re.MULTILINE)


def groups_that_are_read() -> set[str]:
    """By a call with the group, or with a constant that names it."""
    read: set[str] = set()
    for source in (CORE, APPLICATION, *(folder / "src" for folder in PLUGINS)):
        for file in source.rglob("*.py"):
            text = file.read_text("utf-8")
            read |= {*GROUP_READ.findall(text)}
            if re.search(r"\b(entries|installed)\([A-Z_a-z]", text):
                read |= {*GROUP_NAMED.findall(text)}
    return read


def test_every_group_of_entry_points_that_is_read_is_declared() -> None:
    """Else it is empty in silence."""
    read = groups_that_are_read()
    assert {"prime_rl.known", "prime_rl.env_workers", "prime_rl.fits", "prime_rl.api"} <= read
    assert read <= groups_of_entry_points().keys()


def test_the_groups_that_a_misspelt_one_is_compared_with_are_all_that_we_declare() -> None:
    assert {*OF_PLUGINS, *OF_OURS} == groups_of_entry_points().keys()


def test_every_group_of_entry_points_is_public_or_has_two_implementations() -> None:
    public = set(
        re.findall(r'entry-points\."?(prime_rl[\w.]*)', (ROOT / "docs/plugins.md").read_text())
    )
    assert {*GROUPS, "prime_rl.known"} <= public
    single = {
        group
        for group, names in groups_of_entry_points().items()
        if len(names) < 2 and group not in public
    }
    assert single == ONE_IMPLEMENTATION.keys()
    assert len(single) <= 5


def test_a_plugin_that_adds_a_command_is_loaded_by_the_help() -> None:
    """Else ``prime-rl --help`` leaves the command out in silence."""
    adds = {
        folder.name
        for folder in PLUGINS
        for file in (folder / "src").rglob("*.py")
        if "\ndef register_commands(" in file.read_text("utf-8")
    }
    assert adds == groups_of_entry_points()["prime_rl.commands"]


# -- 9: text has an encoding ---------------------------------------------------------------------


def shipped_files() -> list[Path]:
    """Every module of ours that is no test."""
    folders = ("app", "bench", "core", "plugins", "src", "tools", *ROOT.glob("prime_rl_*"))
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if "tests" not in path.parts)


def text_without_encoding(call: ast.Call) -> bool:
    """Whether a call opens, reads or writes a text in the encoding of the user's locale."""
    name = ast.unparse(call.func).rpartition(".")[2]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) < {"read_text": 1, "write_text": 2}[name]
    if name not in ("open", "fdopen", "TextIOWrapper") or ast.unparse(call.func) == "os.open":
        return False

    is_method = isinstance(call.func, ast.Attribute) and name == "open"
    position = 0 if is_method else 1
    default = call.args[position] if len(call.args) > position else ast.Constant("r")
    mode = keywords.get("mode", default)
    # The mode of another ``open``, of a door or a socket, is no text of these letters.
    return isinstance(mode, ast.Constant) and set(str(mode.value)) <= set("rwxat+")


def test_every_text_that_is_read_or_written_names_its_encoding() -> None:
    files = shipped_files()
    assert len(files) > 400
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and text_without_encoding(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("call", "is_wrong"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("path.write_text(text, 'utf-8')", False),
        ("open(path)", True),
        ("open(path, 'a')", True),
        ("open(path, mode='r')", True),
        ("open(path, 'rb')", False),
        ("path.open()", True),
        ("path.open('w')", True),
        ("path.open('ab', buffering=0)", False),
        ("path.open(encoding='utf-8')", False),
        ("os.fdopen(3, 'w')", True),
        ("os.open(path, os.O_RDONLY)", False),
        ("admission.open(group, version)", False),
    ],
)
def test_a_text_without_encoding_is_seen(call: str, is_wrong: bool) -> None:
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert text_without_encoding(node) == is_wrong


# -- 10: no time limit is hidden -----------------------------------------------------------------

TIMES = re.compile(r"\w*SECONDS|\w+_MS|\w*TIMEOUT\w*|\w*GRACE\w*|LONGEST_(WAIT|PAUSE)")
"""Names of constants that are times."""


def test_every_time_constant_is_on_the_page_of_time_limits() -> None:
    page = (ROOT / "docs" / "time-limits.md").read_text("utf-8")
    listed = {
        (row[1], file, value)
        for row in re.finditer(r"^\| `(\w+)` \| (\w+/.*) \|$", page, re.MULTILINE)
        for file, value in re.findall(r"([\w/]+\.py) \((.*?)\)(?:, |$)", row[2])
    }
    found = set()
    for path in shipped_files():
        place = path.as_posix().rpartition("/src/")[2]
        if place == path.as_posix():  # benchmarks and tools judge no process
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            for target in targets:
                if isinstance(target, ast.Name) and TIMES.fullmatch(target.id):
                    assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                    found.add((target.id, place, ast.unparse(node.value)))
    assert len(found) > 80
    assert found == listed
