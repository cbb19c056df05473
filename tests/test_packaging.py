"""Every distribution builds a wheel; core and an algorithm work where nothing else is."""

import os
import re
import subprocess
import sys
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
META = "prime_rl"
FOLDERS = {
    META: ".",
    "prime_rl_core": "core",
    "prime_rl_grpo": "prime_rl_grpo",
    "prime_rl_echo": "prime_rl_echo",
    "prime_rl_distill": "prime_rl_distill",
    "prime_rl_samplers": "plugins/prime_rl_samplers",
    "prime_rl_clip_losses": "plugins/prime_rl_clip_losses",
    "prime_rl_filters": "plugins/prime_rl_filters",
    "prime_rl_renderers": "plugins/prime_rl_renderers",
    "prime_rl_losses": "plugins/prime_rl_losses",
    "prime_rl_embedded": "plugins/prime_rl_embedded",
    "prime_rl_environments": "plugins/prime_rl_environments",
}
ALGORITHMS = ("grpo", "echo", "distill")
APART = {"prime-rl-echo", "prime-rl-distill", "prime-rl-clip-losses"}
"""First-party distributions that a user adds by name."""
HEAVY = {"torch", "transformers", "verifiers", "renderers", "vllm", "pyzmq", "matplotlib"}
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command, ok=True, **kwargs):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=CLEAN, **kwargs
    )
    assert not ok or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """All wheels in one folder."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source: run(*build, ROOT / source), FOLDERS.values()))
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


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_its_package_and_nothing_else(dist, name):
    with zipfile.ZipFile(wheel(dist, name)) as archive:
        files = [entry for entry in archive.namelist() if ".dist-info/" not in entry]
    assert not [entry for entry in files if "tests/" in entry or "/test_" in entry]
    assert not [entry for entry in files if entry.endswith((".safetensors", ".bin", ".pt"))]
    if name == META:
        assert files == []
    else:
        package = "prime_rl" if name == "prime_rl_core" else name
        assert f"{package}/py.typed" in files


def test_the_slim_contract_needs_nothing_heavy(dist):
    slim = requirements(dist, "prime_rl_core")
    assert slim == {"httpx", "msgspec", "numpy", "pluggy", "pydantic", "rich", "typer"}
    assert requirements(dist, "prime_rl_core", "run") >= {"torch", "verifiers", "transformers"}
    assert requirements(dist, "prime_rl_grpo") == {"prime-rl-core", "pydantic"}


def test_the_batteries_bring_every_first_party_distribution(dist):
    others = {name.replace("_", "-") for name in FOLDERS} - {"prime-rl"}
    assert requirements(dist, META) == others - APART


@pytest.fixture(scope="module")
def bare(dist, tmp_path_factory):
    """A venv with the wheels of core and the algorithms, and what runs their tests."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=True)
    pip = folder / "bin" / "pip"
    wheels = [wheel(dist, f"prime_rl_{name}") for name in ("core", *ALGORITHMS)]
    tools = ["pytest", "pytest-asyncio", "hypothesis"]
    run(pip, "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt",
        "--find-links", dist, *wheels, *tools)  # fmt: skip
    return folder / "bin"


def installed(bare):
    listed = run(bare / "pip", "list", "--format=freeze", "--disable-pip-version-check").stdout
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


def test_plugins_are_listed_there(bare, tmp_path):
    shown = run(bare / "prime-rl", "plugins", "list", "--json", cwd=tmp_path).stdout
    assert '"prime-rl-grpo"' in shown and '"max_rl"' in shown


def test_an_uninstalled_algorithm_is_named_with_the_package_that_brings_it(bare, dist, tmp_path):
    """Last: it takes the algorithm away, and puts it back."""
    command = [bare / "prime-rl", "run", ROOT / "configs/reverse_text/grpo.toml", "--dry-run"]
    run(bare / "pip", "uninstall", "--yes", "--quiet", "prime-rl-echo", "prime-rl-grpo")
    done = run(*command, cwd=tmp_path, ok=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: env 'reverse-text': algo: no installed plugin offers the algorithm 'grpo' "
        "(installed: opd, opsd, sft). Check the spelling, or install the package that brings it "
        "(by convention prime-rl-grpo).\n"
    )
    assert list(tmp_path.iterdir()) == []
    run(bare / "pip", "install", "--quiet", "--no-index", "--find-links", dist, "prime-rl-grpo")
    assert "algorithm" not in run(*command, cwd=tmp_path, ok=False).stderr
