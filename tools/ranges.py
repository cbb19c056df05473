"""``python -m tools.ranges newest|lowest``: the tests that depend most on other projects, with the
newest or the lowest versions.

``newest`` takes the newest release that the registry has, inside the declared range or not;
``lowest`` takes the lowest release of the declared range. An environment of its own
(``.venv-newest``, ``.venv-lowest``) has the distributions that differ; all others come from the
environment that runs this, whose packages the new one sees behind its own.

torch takes part where the registry has a CPU build: any other build for Linux has gigabytes of CUDA
libraries.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tools.version import pyprojects
from tools.wheel_sources import NoRegistry, versions

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = ("transformers", "verifiers", "renderers", "torch")
TESTS = (
    *("plugins/prime_rl_embedded/tests", "plugins/prime_rl_kernels/tests"),
    *("plugins/prime_rl_renderers/tests", "plugins/prime_rl_lora/tests"),
    *("core/tests/trainer", "core/tests/env", "tests/test_model_families.py"),
    *("tests/test_ranks.py", "tests/test_fake_cuda.py", "plugins/prime_rl_optimizers/tests"),
    "plugins/prime_rl_environments/tests/test_in_process_env.py",
    "tests/test_first_run.py",
)
"""The engine, the kernels, the renderers, LoRA, the trainer, the environments, the first run."""


def requirements(folder: Path = ROOT) -> Iterator[tuple[Path, Requirement]]:
    """Every requirement of every ``pyproject.toml``, extras included."""
    for path in pyprojects(folder):
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        extras = project.get("optional-dependencies", {}).values()
        for lines in (project.get("dependencies", []), *extras):
            for line in lines:
                yield path, Requirement(line)


def declared(name: str) -> Requirement:
    """What core requires."""
    for path, requirement in requirements():
        if path.parent.name == "core" and canonicalize_name(requirement.name) == name:
            return requirement
    raise LookupError(f"core/pyproject.toml does not require {name}")


@dataclass(frozen=True)
class Choice:
    """The version of a distribution to test with, or why it is not tested."""

    name: str
    version: str
    skipped: str = ""


def choose(end: str, requirement: Requirement, available: list[str], installed: str) -> Choice:
    """``end`` is "newest" or "lowest"; ``available`` is what the registry has; ``installed`` is the
    version of the environment that runs this."""
    name = requirement.name
    releases = [Version(each) for each in available]
    releases = [each for each in releases if not each.is_prerelease]
    declared_releases = [*requirement.specifier.filter(releases)]
    if not declared_releases:
        raise NoRegistry(
            f"{name}: no release within {requirement.specifier} (newest: {max(releases)})"
        )
    chosen = max(releases) if end == "newest" else min(declared_releases)

    public = chosen.public
    builds = [each for each in releases if each.public == public]
    if name == "torch" and platform.system() == "Linux" and public != Version(installed).public:
        cpu = [each for each in builds if each.local == "cpu"]
        if not cpu:
            reason = f"the registry has no CPU build of it, so {installed} stays"
            return Choice(name, public, reason)
        return Choice(name, str(cpu[0]))
    return Choice(name, public)


def installed_versions(python: Path | str, names: tuple[str, ...] = DISTRIBUTIONS) -> list[str]:
    """What an interpreter imports."""
    code = (
        "import json, sys; from importlib.metadata import version;"
        "print(json.dumps([version(name) for name in sys.argv[1:]]))"
    )
    done = subprocess.run(
        [str(python), "-c", code, *names], capture_output=True, text=True, check=True
    )
    installed: list[str] = json.loads(done.stdout)
    return installed


def make_environment(folder: Path, choices: list[Choice]) -> Path:
    """Its interpreter. Packages of the environment that runs this lie behind its own."""
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin/python"
    (packages,) = folder.glob("lib/python*/site-packages")
    behind = [each for each in sys.path if each.endswith("site-packages")]
    # addsitedir, because a .pth file of that folder (an editable install) counts too.
    lines = [f"import site; site.addsitedir({each!r})\n" for each in behind]
    (packages / "behind.pth").write_text("".join(lines), "utf-8")

    wanted = [f"{each.name}=={each.version}" for each in choices if not each.skipped]
    options = (
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--quiet",
        "--no-warn-conflicts",
    )
    if wanted:
        subprocess.run([str(python), "-m", "pip", "install", *options, *wanted], check=True)
    return python


def new_distributions(folder: Path) -> list[str]:
    """What the environment has of its own, as ``name version``."""
    pattern = re.compile(r"(.+)-([^-]+)\.dist-info")
    matches = [pattern.fullmatch(each.name) for each in folder.glob("lib/python*/site-packages/*")]
    return sorted(f"{match[1]} {match[2]}" for match in matches if match)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools.ranges", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("end", choices=("newest", "lowest"))
    parser.add_argument("--only-set-up", action="store_true", help="make the environment, no tests")
    args, more = parser.parse_known_args()

    choices = []
    try:
        for name, version in zip(DISTRIBUTIONS, installed_versions(sys.executable), strict=True):
            choices.append(choose(args.end, declared(name), versions(name), version))
    except NoRegistry as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = ROOT / f".venv-{args.end}"
    python = make_environment(folder, choices)

    print(f"{datetime.date.today()}, Python {platform.python_version()}, {args.end}:")
    for choice, version in zip(choices, installed_versions(python), strict=True):
        skipped = f"; {choice.version} is skipped: {choice.skipped}" if choice.skipped else ""
        bounds = str(declared(choice.name).specifier)
        print(f"    {choice.name} {version} (declared {bounds}){skipped}")
    print(f"    of its own: {', '.join(new_distributions(folder)) or 'none'}", flush=True)

    if args.only_set_up:
        return 0
    names_files = any(".py" in each for each in more)
    tests = [] if names_files else [*TESTS]
    command = [str(python), "-m", "pytest", "-m", "not vllm", *tests, *more]
    return subprocess.run(command, cwd=ROOT, env=os.environ).returncode


if __name__ == "__main__":
    sys.exit(main())
