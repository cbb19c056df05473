"""What `.ci/run` does before the make targets, which have tests of their own."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from tools.version import main, with_bounds, with_version

ROOT = Path(__file__).parents[1]


def install_chromium(folder, apt_get=None):
    """Its outcome on a machine without a browser whose apt-get is this shell script."""
    for name in ("bash", "env", "dirname", "mktemp", "cat", "rm"):
        (folder / name).symlink_to(shutil.which(name))
    for name, script in {"id": "echo 0", "apt-get": apt_get}.items():
        if script:
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
    return subprocess.run(
        [ROOT / ".ci/install_chromium"],
        env=os.environ | {"PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("apt_get", "reason"),
    [(None, ""), ("echo E: Unable to locate package chromium >&2; exit 100", "E: Unable")],
    ids=["no apt-get", "apt-get fails"],
)
def test_where_chromium_cannot_be_installed_the_skipped_tests_are_named(tmp_path, apt_get, reason):
    done = install_chromium(tmp_path, apt_get)
    assert done.returncode == 0
    assert "(plugins/prime_rl_tools/tests/report/test_report_browser.py) are skipped" in done.stdout
    assert done.stderr.startswith(reason) and bool(done.stderr) == bool(reason)


def test_chromium_is_installed_where_apt_get_can(tmp_path):
    """The package lists come first: a fresh container has none."""
    calls = tmp_path / "calls"
    done = install_chromium(tmp_path, f'echo "$@" >> {calls}')
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout == "Installing Chromium for the browser tests\n"
    update, install = calls.read_text().splitlines()
    assert update.endswith(" update") and " --yes " in install
    assert install.endswith(" install --no-install-recommends chromium chromium-driver")


def local_requirements():
    """By folder: the folders of the distributions here that a distribution requires."""
    projects = {
        file.parent.relative_to(ROOT).as_posix(): tomllib.loads(file.read_text("utf-8"))["project"]
        for pattern in ("*/pyproject.toml", "plugins/*/pyproject.toml")
        for file in ROOT.glob(pattern)
    }
    folders = {project["name"]: folder for folder, project in projects.items()}
    return {
        folder: {
            folders[name]
            for requirement in project["dependencies"]
            if (name := re.match(r"[\w.-]+", requirement)[0]) in folders
        }
        for folder, project in projects.items()
    }


@pytest.mark.parametrize(
    "file",
    [
        *("plugins/prime_rl_vllm/setup_environment.sh", "docs/examples/cluster/Dockerfile"),
        "docs/plugins.md",
    ],
)
def test_what_is_installed_from_folders_comes_with_all_that_it_requires(file):
    """An index of packages need not have a distribution of this repository."""
    requirements = local_requirements()
    text = (
        (ROOT / file)
        .read_text("utf-8")
        .replace("\\\n", " ")
        .replace("$here", str(Path(file).parent))
    )
    commands = [
        line for line in text.splitlines() if "install" in line and re.search(r"[ /]core ", line)
    ]
    assert commands
    for command in commands:
        words = [word.removeprefix("./").rstrip("/") for word in command.split()]
        installed = {folder for folder in requirements if any(map(Path(folder).match, words))}
        missing = set().union(*(requirements[folder] for folder in installed)) - installed
        assert not missing, command


def test_every_distribution_has_the_version_of_the_root():
    """To fix: make version NEW=..."""
    assert main([]) == 0


def test_pages_get_the_version_and_the_bounds_too():
    page = '**State.** Version {}. It is\n["prime-rl-core>={},<{}"]\nnumpy>=1.26,<3\n'
    old = page.format("0.2.0", "0.2", "0.3")
    assert with_bounds(old, "1.4.0rc1") == page.format("1.4.0rc1", "1.4", "1.5")


def test_another_version_is_written_with_the_bounds_of_our_own_requirements():
    core, lora = '"prime-rl-core[run]>={0},<{1}"', '"prime-rl-lora>={0},<{1}"'
    text = f'version = "{{}}"\n{core},\n{lora},\n"numpy>=1.26"\n'
    old = text.replace("{}", "0.1.0").format("0.1", "0.2")
    assert with_version(old, "1.4.0rc1") == text.replace("{}", "1.4.0rc1").format("1.4", "1.5")
