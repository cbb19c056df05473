"""Every distribution builds a wheel; core and an algorithm work where nothing else is."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from waiting import LIMIT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
META = "prime_rl"
FOLDERS = {
    META: ".",
    "prime_rl_contract": "contract",
    "prime_rl_core": "core",
    "prime_rl_app": "app",
    "prime_rl_grpo": "prime_rl_grpo",
    "prime_rl_echo": "prime_rl_echo",
    "prime_rl_distill": "prime_rl_distill",
    "prime_rl_samplers": "plugins/prime_rl_samplers",
    "prime_rl_clip_losses": "plugins/prime_rl_clip_losses",
    "prime_rl_ppo": "plugins/prime_rl_ppo",
    "prime_rl_baselines": "plugins/prime_rl_baselines",
    "prime_rl_preference": "plugins/prime_rl_preference",
    "prime_rl_credit": "plugins/prime_rl_credit",
    "prime_rl_wandb": "plugins/prime_rl_wandb",
    "prime_rl_tensorboard": "plugins/prime_rl_tensorboard",
    "prime_rl_prometheus": "plugins/prime_rl_prometheus",
    "prime_rl_ray": "plugins/prime_rl_ray",
    "prime_rl_vllm": "plugins/prime_rl_vllm",
    "prime_rl_filters": "plugins/prime_rl_filters",
    "prime_rl_renderers": "plugins/prime_rl_renderers",
    "prime_rl_losses": "plugins/prime_rl_losses",
    "prime_rl_embedded": "plugins/prime_rl_embedded",
    "prime_rl_environments": "plugins/prime_rl_environments",
    "prime_rl_env_workers": "plugins/prime_rl_env_workers",
    "prime_rl_evals": "plugins/prime_rl_evals",
    "prime_rl_tools": "plugins/prime_rl_tools",
    "prime_rl_devkit": "plugins/prime_rl_devkit",
    "prime_rl_engine_kit": "plugins/prime_rl_engine_kit",
    "prime_rl_broadcast": "plugins/prime_rl_broadcast",
    "prime_rl_observers": "plugins/prime_rl_observers",
    "prime_rl_lora": "plugins/prime_rl_lora",
    "prime_rl_kernels": "plugins/prime_rl_kernels",
    "prime_rl_optimizers": "plugins/prime_rl_optimizers",
    "prime_rl_reasoning_gym": "plugins/prime_rl_reasoning_gym",
    "prime_rl_math": "plugins/prime_rl_math",
    "prime_rl_smollm2": "plugins/prime_rl_smollm2",
    "prime_rl_plan": "plugins/prime_rl_plan",
    "prime_rl_agents": "plugins/prime_rl_agents",
    "prime_rl_gateway": "plugins/prime_rl_gateway",
}
ALGORITHMS = ("grpo", "echo", "distill")
APART = {
    *("prime-rl-echo", "prime-rl-distill", "prime-rl-clip-losses", "prime-rl-ppo"),
    *("prime-rl-baselines", "prime-rl-preference", "prime-rl-credit"),
    *("prime-rl-ray", "prime-rl-wandb", "prime-rl-tensorboard", "prime-rl-prometheus"),
    *("prime-rl-vllm", "prime-rl-reasoning-gym", "prime-rl-math"),
    *("prime-rl-smollm2", "prime-rl-agents", "prime-rl-gateway"),
}
"""First-party distributions that a user adds by name."""
HEAVY = {"torch", "transformers", "verifiers", "renderers", "vllm", "pyzmq", "matplotlib"}
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, ok=True, more=None, **kwargs):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=CLEAN | (more or {}),
        **kwargs,
    )
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


BUILD = """
import os, sys
from hatchling.build import build_wheel
for source in sys.argv[2:]:
    os.chdir(source)
    build_wheel(sys.argv[1])
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """All wheels in one folder, built by one process: the front end takes a second each."""
    folder, sources = tmp_path_factory.mktemp("dist"), [ROOT / each for each in FOLDERS.values()]
    for source in sources:
        backend = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]
        assert backend == {"requires": ["hatchling"], "build-backend": "hatchling.build"}
    run(sys.executable, "-c", BUILD, folder, *sources)
    return folder


def wheel(dist, name):
    (path,) = dist.glob(f"{name}-*.whl")
    return path


def metadata(dist, name):
    with zipfile.ZipFile(wheel(dist, name)) as archive:
        (entry,) = [e for e in archive.namelist() if e.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(entry).decode())


def requirements(dist, name, extra=None):
    """The names a wheel requires: without an extra, or by this extra."""
    wanted = []
    for line in metadata(dist, name).get_all("Requires-Dist") or []:
        marker = re.search(r"extra == ['\"](\w+)['\"]", line)
        if (marker.group(1) if marker else None) == extra:
            wanted.append(re.match(r"[\w.-]+", line).group())
    return set(wanted)


def test_no_distribution_is_left_out():
    found = [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]
    assert {path.parent for path in found} == {ROOT / each for each in FOLDERS.values()} - {ROOT}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_its_package_and_nothing_else(dist, name):
    with zipfile.ZipFile(wheel(dist, name)) as archive:
        files = [entry for entry in archive.namelist() if ".dist-info/" not in entry]
    assert not [entry for entry in files if "tests/" in entry or "/test_" in entry]
    assert not [entry for entry in files if entry.endswith((".safetensors", ".bin", ".pt"))]
    if name == META:
        assert files == ["prime_rl_defaults/defaults.toml"]
    else:
        package = {"prime_rl_core": "prime_rl", "prime_rl_math": "math_problems"}.get(name, name)
        assert f"{package}/py.typed" in files


def test_the_slim_contract_needs_nothing_heavy(dist):
    slim = requirements(dist, "prime_rl_core")
    libraries = {"httpx", "msgspec", "numpy", "pluggy", "pydantic", "rich", "typer"}
    assert slim == libraries | {"prime-rl-contract"}
    assert requirements(dist, "prime_rl_core", "run") >= {"torch", "verifiers", "transformers"}
    assert requirements(dist, "prime_rl_grpo") == {"numpy", "prime-rl-core", "pydantic"}


def test_the_batteries_bring_every_first_party_distribution(dist):
    others = {name.replace("_", "-") for name in FOLDERS} - {"prime-rl"}
    assert requirements(dist, META) == others - APART


@pytest.fixture(scope="module")
def bare(dist, tmp_path_factory):
    """A venv with the wheels of core, the author's kit and the algorithms, and what runs their
    tests."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    wheels = [
        wheel(dist, f"prime_rl_{name}")
        for name in ("contract", "core", "app", "devkit", *ALGORITHMS)
    ]
    tools = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
    run(*pip_install(folder / "bin"), "--disable-pip-version-check",
        "-c", ROOT / "constraints.txt", "--find-links", dist, *wheels, *tools)  # fmt: skip
    return folder / "bin"


def pip(folder):
    """Our own pip for another venv: making one there takes seconds."""
    return [sys.executable, "-m", "pip", "--python", folder / "python"]


def pip_install(folder):
    """Without byte code: most of what is installed is never imported."""
    return [*pip(folder), "install", "--quiet", "--no-compile"]


def installed(bare):
    listed = run(*pip(bare), "list", "--format=freeze", "--disable-pip-version-check").stdout
    return {line.split("==")[0].lower() for line in listed.splitlines()}


def test_core_and_an_algorithm_install_without_anything_heavy(bare):
    names = installed(bare)
    assert {"prime-rl-core", "prime-rl-grpo"} <= names
    assert not HEAVY & names and len(names) < 50


def test_contract_and_algorithm_tests_pass_there(bare):
    tests = [ROOT / "core/tests/contract", *(ROOT / f"prime_rl_{n}/tests" for n in ALGORITHMS)]
    done = run(bare / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider",
               "-c", ROOT / "pyproject.toml", *tests, cwd=ROOT)  # fmt: skip
    assert re.search(r"\d\d\d passed", done.stdout), done.stdout


def listed(folder, cwd):
    """What ``plugins list`` shows: by distribution, what it offers."""
    rows = json.loads(run(folder / "prime-rl", "plugins", "list", "--json", cwd=cwd).stdout)
    return {row["distribution"]: row["offers"] for row in rows}


def test_plugins_are_listed_there(bare, tmp_path):
    assert "max_rl" in listed(bare, tmp_path)["prime-rl-grpo"]["algorithms"]


def test_a_wheel_adds_its_algorithm_and_uninstalling_takes_it_away(bare, dist, tmp_path):
    run(*pip(bare), "uninstall", "--yes", "--quiet", "prime-rl-echo")
    assert "prime-rl-echo" not in listed(bare, tmp_path)
    run(*pip_install(bare), "--no-index", wheel(dist, "prime_rl_echo"))
    assert listed(bare, tmp_path)["prime-rl-echo"] == {"algorithms": ["echo"]}


def test_an_uninstalled_algorithm_is_named_with_the_package_that_brings_it(bare, dist, tmp_path):
    """It takes the algorithm away, and puts it back."""
    command = [bare / "prime-rl", "run", ROOT / "configs/reverse_text/grpo.toml", "--dry-run"]
    run(*pip(bare), "uninstall", "--yes", "--quiet", "prime-rl-echo", "prime-rl-grpo")
    done = run(*command, cwd=tmp_path, ok=False)
    assert done.returncode == 2
    first, *others = done.stderr.splitlines()
    assert first == (
        f"error: {ROOT}/configs/reverse_text/grpo.toml:13: env 'reverse-text': algo: no installed "
        "plugin offers the algorithm 'grpo' "
        "(installed: opd, opsd, sdft, sdpo, sft). Check the spelling, or install the package that "
        "brings it (by convention prime-rl-grpo, if there is one)."
    )
    # What else is missing there, at once.
    assert any("orchestrator.renderer.name: no installed" in line for line in others)
    assert list(tmp_path.iterdir()) == []
    run(*pip_install(bare), "--no-index", "--find-links", dist, "prime-rl-grpo")
    assert "algorithm" not in run(*command, cwd=tmp_path, ok=False).stderr


def interpreter(minor):
    """Another Python, on the path or of pyenv; None if there is none."""
    (*_, last) = None, *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
    return last or shutil.which(f"python3.{minor}")


@pytest.mark.parametrize("minor", [11, 12, 13])
def test_core_and_an_algorithm_work_on_each_python(dist, tmp_path, minor):
    """Those that it says it works on, beside the one that runs these tests."""
    assert metadata(dist, "prime_rl_core")["Requires-Python"] == ">=3.11"
    if minor == sys.version_info.minor or interpreter(minor) is None:
        pytest.skip(f"no other Python 3.{minor} here")
    run(interpreter(minor), "-m", "venv", "--without-pip", tmp_path / "venv")
    folder = tmp_path / "venv/bin"
    wheels = [wheel(dist, f"prime_rl_{name}") for name in ("core", "app", "devkit", "grpo")]
    run(*pip_install(folder), "--disable-pip-version-check",
        "--find-links", dist, *wheels)  # fmt: skip
    code = "import pkgutil, prime_rl.plugins as p; [__import__(m.name) for m in "
    code += "pkgutil.iter_modules(p.__path__, 'prime_rl.plugins.')]"
    run(folder / "python", "-W", "error", "-c", code)
    assert json.loads(run(folder / "prime-rl", "plugins", "check", "grpo", "--json").stdout)["ok"]


THIRD_PARTY = {"algorithm": "algorithms", "loss": "losses"}
"""Kinds that a third party's packages offer, as ``plugins list`` calls them."""


@pytest.fixture(scope="module")
def third_party(bare, tmp_path_factory):
    """Packages written there, and installed there from their wheels; their folders by kind."""
    made = tmp_path_factory.mktemp("third_party")
    folders = {kind: made / kind for kind in THIRD_PARTY}
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", made]
    for kind, folder in folders.items():
        new = ["plugins", "new", f"plum-{kind}", "--kind", kind, "--directory", folder]
        run(bare / "prime-rl", *new)
        run(*build, folder)
    run(*pip_install(bare), "--no-index", *made.glob("*.whl"))
    yield folders
    run(*pip(bare), "uninstall", "--yes", "--quiet", *(f"prime-rl-plum-{k}" for k in folders))


@pytest.mark.parametrize("kind", THIRD_PARTY)
def test_a_third_partys_package_is_written_installed_tested_and_checked_there(
    bare, third_party, tmp_path, kind
):
    """By its own commands, from a wheel; the README's promise is that torch is not needed."""
    name = f"prime-rl-plum-{kind}"
    done = run(bare / "python", "-m", "pytest", "-q", "-p", "no:asyncio", "-W", "error",
               cwd=third_party[kind])  # fmt: skip
    assert re.search(r"\d passed", done.stdout), done.stdout
    code = f"import {name.replace('-', '_')} as module; print(module.__file__)"
    assert "site-packages" in run(bare / "python", "-c", code, cwd=tmp_path).stdout
    report = json.loads(run(bare / "prime-rl", "plugins", "check", name, "--json").stdout)
    assert report["ok"]


def test_third_parties_packages_are_listed_there_and_bring_nothing_heavy(
    bare, third_party, tmp_path
):
    offers = listed(bare, tmp_path)
    for kind, kinds in THIRD_PARTY.items():
        assert offers[f"prime-rl-plum-{kind}"] == {kinds: [f"plum_{kind}"]}
    assert not HEAVY & installed(bare)


# -- the meta package: everything a run needs ------------------------------------------------------


def needed(dist, name, extras=()):
    """The requirement lines of one of our wheels, or of what is installed here."""
    name = canonicalize_name(name)
    ours = name.replace("-", "_") in FOLDERS
    lines = (
        metadata(dist, name.replace("-", "_")).get_all("Requires-Dist")
        if ours
        else distribution(name).requires
    )
    for line in lines or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield requirement


def third_parties(dist):
    """Every distribution that the meta package asks for, but our own; by what wheels declare."""
    seen, todo = set(), [(META, frozenset())]
    while todo:
        name, extras = todo.pop()
        for each in needed(dist, name, extras):
            found = (canonicalize_name(each.name), frozenset(each.extras))
            if found not in seen:
                seen.add(found)
                todo.append(found)
    return {name for name, _ in seen if name.replace("-", "_") not in FOLDERS}


@pytest.fixture(scope="module")
def complete(dist, tmp_path_factory):
    """A venv with the meta package from the wheels. What is not ours, several GB with torch, is
    borrowed from here, and only what the wheels ask for."""
    folder = tmp_path_factory.mktemp("complete") / "venv"
    borrowed = folder.parent / "borrowed"
    borrowed.mkdir()
    for name in third_parties(dist):
        for path in distribution(name).files or ():
            source, target = Path(path.locate()).parents[len(path.parts) - 1], path.parts[0]
            if target not in ("..", "__pycache__") and not (borrowed / target).exists():
                (borrowed / target).symlink_to(source / target)
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    run(*pip_install(folder / "bin"), "--no-index", "--find-links", dist, "prime-rl")
    return folder / "bin"


def test_the_meta_package_brings_every_default_and_no_other(complete, tmp_path):
    ours = {name for name in installed(complete) if name.startswith("prime-rl")}
    assert ours == {name.replace("_", "-") for name in FOLDERS} - APART
    code = "import prime_rl, prime_rl_grpo; print(prime_rl.__file__, prime_rl_grpo.__file__)"
    where = run(complete / "python", "-c", code, cwd=tmp_path).stdout
    assert where.count("complete0") == 2 and str(ROOT) not in where


def test_the_first_run_works_there(complete, tmp_path):
    """Two steps of an untrained policy: every process starts from what the wheels hold."""
    small = ["--model.warmup_exact", "0.0", "--max_steps", "2", "--orchestrator.batch_size", "16",
             "--orchestrator.group_size", "4", "--orchestrator.eval.env.0.num_examples", "8",
             "--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0",
             "--run.name", "first"]  # fmt: skip
    run(complete / "prime-rl", "run", ROOT / "configs/reverse_text/grpo.toml", *small,
        "--output_dir", tmp_path, cwd=tmp_path, timeout=LIMIT,
        more={"PRIME_RL_CACHE": str(tmp_path / "models")})  # fmt: skip
    lines = (tmp_path / "first/trainer.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (tmp_path / "first/weights").is_dir()
