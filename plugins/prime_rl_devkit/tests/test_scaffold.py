"""``prime-rl plugins new``: what is written, what is refused, and that it works at once."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner
from waiting import LIMIT

from prime_rl import ConfigError
from prime_rl.registry.manager import GROUPS
from prime_rl.registry.offers import KINDS as OFFER_KINDS
from prime_rl_app.cli.app import app
from prime_rl_devkit.scaffold import KINDS, write_package
from prime_rl_devkit.scaffold.names import OFFERED_AS, core_range, names_for
from prime_rl_devkit.scaffold.write import WITHOUT_A_RUN


def test_a_package_is_eight_files(tmp_path):
    package = write_package("my-algo", "algorithm", tmp_path / "new")
    assert sorted(str(path.relative_to(tmp_path / "new")) for path in package.files) == [
        ".github/workflows/test.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "src/prime_rl_my_algo/__init__.py",
        "src/prime_rl_my_algo/py.typed",
        "tests/test_my_algo.py",
        "train.toml",
    ]
    assert all(path.exists() for path in package.files)


def test_the_project_has_its_entry_point_its_group_and_its_contract(tmp_path):
    write_package("my-algo", "algorithm", tmp_path / "algo")
    project = tomllib.loads((tmp_path / "algo/pyproject.toml").read_text())["project"]
    assert project["name"] == "prime-rl-my-algo"
    assert {"prime-rl-core", "prime-rl-contract>=2,<4"} < {*project["dependencies"]}
    assert project["entry-points"] == {"prime_rl": {"my_algo": "prime_rl_my_algo"}}
    write_package("my-loss", "loss", tmp_path / "loss")
    project = tomllib.loads((tmp_path / "loss/pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"prime_rl.trainer": {"my_loss": "prime_rl_my_loss"}}


@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_of_the_template_is_left(kind, tmp_path):
    for path in write_package("plum-tree", kind, tmp_path / "new").files:
        text = path.read_text()
        assert "@@" not in text and "my_algo" not in text, path
        assert all(len(line) <= 132 for line in text.splitlines()), path


@pytest.mark.parametrize("kind", KINDS)
def test_the_readme_has_toml_that_reads_and_names_the_plugin(kind, tmp_path):
    write_package("plum-tree", kind, tmp_path / "new")
    readme = (tmp_path / "new/README.md").read_text()
    block = readme.partition("```toml\n")[2].partition("```")[0]
    assert "plum_tree" in str(tomllib.loads(block))


def test_every_kind_has_a_template_except_those_for_a_few_authors():
    without = {"view", "trainer_observer", "tuning"}
    offered = {OFFERED_AS.get(kind, kind) for kind in {*KINDS} - {"wrapper", "command"}}
    assert offered == {kind.name for kind in OFFER_KINDS} - without
    assert set(KINDS.values()) == set(GROUPS)


def test_an_environment_is_a_module_that_verifiers_finds_by_its_id(tmp_path):
    files = write_package("plum-tree", "environment", tmp_path / "new").files
    names = {str(path.relative_to(tmp_path / "new")) for path in files}
    assert {"src/plum_tree/__init__.py", "train.toml", "tests/test_plum_tree.py"} <= names
    assert not any("@@" in path.read_text() for path in files)
    run = tomllib.loads((tmp_path / "new/train.toml").read_text())
    assert run["orchestrator"]["train"]["env"][0]["id"] == "plum-tree"
    assert (
        "entry-points"
        not in tomllib.loads((tmp_path / "new/pyproject.toml").read_text())["project"]
    )


def test_a_package_of_an_algorithm_and_its_loss_names_both(tmp_path):
    package = write_package("plum-pair", "algorithm+loss", tmp_path / "new")
    assert not any("@@" in path.read_text() for path in package.files)
    names = {str(path.relative_to(package.folder)) for path in package.files}
    module = "src/prime_rl_plum_pair"
    assert {f"{module}/__init__.py", f"{module}/algorithm.py", f"{module}/loss.py"} < names
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {
        "prime_rl": {"plum_pair": "prime_rl_plum_pair.algorithm"},
        "prime_rl.trainer": {"plum_pair": "prime_rl_plum_pair.loss"},
    }
    commands = [*package.next_commands()]
    assert commands[2] == "prime-rl plugins check prime-rl-plum-pair"
    assert 'losses = ("plum_pair",)' in (package.folder / module / "algorithm.py").read_text()


def test_a_transport_is_loaded_by_both_sides_and_requires_what_it_builds_on(tmp_path):
    write_package("plum-road", "transport", tmp_path / "new")
    project = tomllib.loads((tmp_path / "new/pyproject.toml").read_text())["project"]
    point = {"plum_road": "prime_rl_plum_road"}
    assert project["entry-points"] == {"prime_rl": point, "prime_rl.trainer": point}
    assert project["dependencies"][0] == "prime-rl-broadcast"


@pytest.mark.slow
def test_an_algorithm_and_its_loss_pass_their_check_and_their_tests(tmp_path, monkeypatch):
    package = write_package("plum-pair", "algorithm+loss", tmp_path / "new")
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = CliRunner().invoke(app, ["plugins", "check", str(package.folder)])
    assert done.exit_code == 0, done.stdout
    assert "algorithm plum_pair" in done.stdout and "loss plum_pair" in done.stdout
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    path = os.environ | {"PYTHONPATH": str(package.folder / "src")}
    ran = subprocess.run(tests, cwd=package.folder, env=path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_two_plugins_of_one_group_have_two_names_and_no_kind_comes_twice(tmp_path):
    write_package("plum-twins", "sampler+filter", tmp_path / "new")
    project = tomllib.loads((tmp_path / "new/pyproject.toml").read_text())["project"]
    assert project["entry-points"]["prime_rl"] == {
        "plum_twins": "prime_rl_plum_twins.sampler",
        "plum_twins_filter": "prime_rl_plum_twins.filter",
    }
    for kind in ("filter+filter", "filter+environment", "filter+"):
        with pytest.raises(ConfigError, match="--kind: expected one of"):
            names_for("plum-twins", kind)


@pytest.mark.parametrize("name", ["my-algo", "my_algo", "prime-rl-my-algo"])
def test_a_name_may_be_spelt_in_three_ways(name):
    names = names_for(name, "algorithm")
    assert (names.name, names.distribution, names.module, names.class_name) == (
        "my_algo", "prime-rl-my-algo", "prime_rl_my_algo", "MyAlgo",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["", "My-Algo", "2fast", "my algo", "my--algo", "-algo", "../x", "añb"]
)
def test_an_invalid_name_is_refused(name):
    with pytest.raises(ConfigError, match="name: expected small letters and digits"):
        names_for(name, "algorithm")


def test_the_name_of_a_class_of_prime_rl_is_refused():
    with pytest.raises(ConfigError, match="'Filter' is a class of prime_rl itself"):
        names_for("filter", "algorithm")
    with pytest.raises(ConfigError, match="'PluginConfig' is a class of prime_rl itself"):
        names_for("plugin", "algorithm")


def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError) as caught:
        write_package("my-algo", "teapot", tmp_path / "new")
    assert str(caught.value) == (
        "--kind: expected one of algorithm, filter, loss, head, engine, sampler, renderer, source, "
        "monitor, launcher, model, wrapper, observer, command, optimizer, kernel, transport, "
        "environment, got 'teapot'"
    )


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"exists and is not empty\. Give a new folder"):
        write_package("my-algo", "algorithm", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_empty_folder_is_used(tmp_path):
    assert write_package("my-algo", "algorithm", tmp_path).folder == tmp_path


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.1.0", ">=0.1,<0.2"), ("0.12.3", ">=0.12,<0.13"), ("1.4.0", ">=1.4,<2"),
     ("2.0.0rc1", ">=2.0,<3")],
)  # fmt: skip
def test_the_range_is_from_the_installed_version_to_the_next_that_may_break(version, expected):
    assert core_range(version) == expected


def test_the_command_prints_what_it_wrote_and_the_next_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["plugins", "new", "my-algo"])
    assert done.exit_code == 0
    assert done.stdout == (
        "wrote prime-rl-my-algo: the algorithm 'my_algo', 8 files\n"
        "\n"
        "Next:\n"
        "  pip install -e 'prime-rl-my-algo[test]'\n"
        "  pytest prime-rl-my-algo\n"
        "  prime-rl plugins check my_algo\n"
        "  prime-rl run prime-rl-my-algo/train.toml\n"
    )


@pytest.mark.slow
def test_the_last_command_trains_with_the_new_plugin(tmp_path):
    """Every kind with a ``train.toml`` builds its run; the algorithm trains one step."""
    site, runs = tmp_path / "site", list[list[str]]()
    for kind in (*(kind for kind in KINDS if kind not in WITHOUT_A_RUN), "algorithm+loss"):
        name = f"plum-{kind.replace('+', '-')}"
        package = write_package(name, kind, tmp_path / name)
        command = [*package.next_commands()][-1]
        assert command == f"prime-rl run {package.folder}/train.toml"
        more = ["--dry-run"] if kind != "algorithm" else ["--max-steps", "1"]
        runs.append([*command.split()[1:], *more, "--run.name", name])
        install = ["-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--target"]
        subprocess.run([sys.executable, *install, str(site), str(package.folder)], check=True)
    path = os.environ | {"PYTHONPATH": str(site)}
    for run in runs:
        command = [sys.executable, "-m", "prime_rl", *run]
        done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
        assert done.returncode == 0, f"{run}\n{done.stdout}\n{done.stderr}"
        resolved = tmp_path / "outputs" / run[-1] / "configs/run.json"
        used = json.loads(resolved.read_text()) | {"run": None}
        assert run[-1].replace("-", "_") in json.dumps(used) or run[-1] == "plum-wrapper"
    assert (tmp_path / "outputs/plum-algorithm/weights/model.safetensors").is_file()


# -- it works at once, in a venv that has prime-rl-core and pytest and nothing else ---------------


ROOT = Path(__file__).parents[3]
SOURCES = {
    "prime-rl-app": "app/src/prime_rl_app",
    "prime-rl-core": "core/src/prime_rl",
    "prime-rl-devkit": "plugins/prime_rl_devkit/src/prime_rl_devkit",
    "prime-rl-broadcast": "plugins/prime_rl_broadcast/src/prime_rl_broadcast",
    "prime-rl-engine-kit": "plugins/prime_rl_engine_kit/src/prime_rl_engine_kit",
}
"""Where the packages are of which only the metadata is installed here."""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A folder that holds what ``pip install prime-rl-devkit`` would bring, and no more."""
    site = tmp_path_factory.mktemp("bare")
    for name in closure("prime-rl-devkit"):
        if name in SOURCES:
            package = ROOT / SOURCES[name]
            (site / package.name).symlink_to(package)
        for path in distribution(name).files or ():
            top = site / path.parts[0]
            source = Path(str(distribution(name).locate_file(path.parts[0])))
            if path.parts[0] not in ("..", "__pycache__") and source.exists() and not top.exists():
                top.symlink_to(source)
    return site


def closure(*names: str) -> set[str]:
    """Distributions that some need, and these need, without extras."""
    found, todo = set(), list(names)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for text in requires(name) or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                todo.append(need.name)
    return found


def in_bare(site: Path, *arguments: str, cwd: Path, path: Path | None = None):
    """Run Python with the standard library, ``site`` and one package, and nothing else."""
    base = sysconfig.get_paths()["stdlib"]
    assert Path(base).is_dir()
    folders = [str(each) for each in (path, site) if each]
    environment = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=cwd,
        env=environment | {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_the_test_environment_has_core_and_no_torch(bare, tmp_path):
    names = "('torch', 'transformers', 'verifiers', 'renderers', 'prime_rl_grpo')"
    code = (
        "import prime_rl.testing; from importlib.util import find_spec; "
        f"print([name for name in {names} if find_spec(name)])"
    )
    done = in_bare(bare, "-c", code, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


SKIPS = {"loss": 2, "head": 2, "renderer": 1, "model": 2, "optimizer": 3, "kernel": 3}
"""Tests that need torch, or the renderers package."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_own_tests_pass_at_once_without_torch(kind, bare, tmp_path):
    folder = tmp_path / "new"
    write_package(f"plum-{kind}", kind, folder)
    done = in_bare(bare, "-m", "pytest", "-q", "-W", "error", cwd=folder, path=folder / "src")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert " passed" in summary, done.stdout
    assert (f"{SKIPS[kind]} skipped" in summary) if kind in SKIPS else ("skipped" not in summary)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_the_check_before_it_is_installed(kind, bare, tmp_path):
    folder = tmp_path / "new"
    write_package(f"plum-{kind}", kind, folder)
    code = "import sys; from prime_rl_app.cli import main; sys.argv[0] = 'prime-rl'; main()"
    done = in_bare(bare, "-c", code, "plugins", "check", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"plugin plum_{kind}" in done.stdout and "failed" not in done.stdout.split()


@pytest.mark.slow
def test_every_kind_is_formatted_linted_and_typed(tmp_path):
    for kind in KINDS:
        write_package(f"plum-{kind}", kind, tmp_path / kind)
    settings = tmp_path / "algorithm/pyproject.toml"
    sources = [str(tmp_path / kind / "src") for kind in KINDS]
    tools, core = Path(sys.executable).parent, Path(__file__).parents[1] / "src"
    cache = ROOT / ".mypy_cache/scaffold"  # core takes half a minute without it
    for command in (
        [tools / "ruff", "check", "."],
        [tools / "ruff", "format", "--check", "."],
        [tools / "mypy", "--config-file", settings, "--cache-dir", cache, *sources],
    ):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"MYPYPATH": str(core)},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_wheel_of_it_is_found_by_its_entry_point(bare, tmp_path):
    folder, site = tmp_path / "new", tmp_path / "site"
    write_package("plum-tree", "algorithm", folder)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run(
        [*install, "--no-build-isolation", "--disable-pip-version-check", "--target", site, folder],
        check=True,
        timeout=LIMIT,
    )
    code = (
        "import sys; from prime_rl_app.cli import main; "
        "sys.argv = ['prime-rl', 'plugins', 'show', 'plum_tree']; main()"
    )
    done = in_bare(bare, "-c", code, cwd=tmp_path, path=site)
    assert done.returncode == 0, done.stderr
    assert 'algo.type = "plum_tree"' in done.stdout
    assert "prime-rl-plum-tree 0.1.0" in done.stdout
