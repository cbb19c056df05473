"""``pytest --prime-rl NAME``, in a pytest of its own."""

import os
import re
import sys

import pytest
import warm
from installed_plugins import install as install
from waiting import LIMIT

SOURCE = """
import asyncio


class Mine(Algorithm):
    name = "mine"

    @hookimpl
    async def score_group(self, group):
        for index, rollout in enumerate(group):
            rollout.assign_advantages(rollout.reward + {place})


@hookimpl
def register_algorithms():
    return [Mine]
"""

PLUGIN = "prime_rl_devkit.pytest_plugin"
OPTIONS = ("-p", PLUGIN, "-p", "no:cacheprovider", "-W", "ignore")


@pytest.fixture
def run(install, tmp_path):
    def run_pytest(*arguments, place="0.0"):
        install(SOURCE.format(place=place), plugin="mine", distribution="prime-rl-mine")
        path = os.pathsep.join([str(install.folder / "prime-rl-mine"), *sys.path])
        return warm.run(
            [sys.executable, "-m", "pytest", *OPTIONS, "--rootdir", str(tmp_path), *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            timeout=LIMIT,
        )

    return run_pytest


def test_every_check_is_a_test_with_a_name(run):
    done = run("-v", "--prime-rl", "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prime-rl::mine::permutation PASSED" in done.stdout
    assert "prime-rl::mine::reference_aligned SKIPPED" in done.stdout
    assert "assigns no ref_logprobs" in done.stdout
    assert re.search(r"\d+ passed, [45] skipped", done.stdout)  # 5: torch is not installed


def test_a_broken_promise_is_a_failure_with_its_name(run):
    done = run("--prime-rl", "prime-rl-mine", "-k", "permutation", place="index")
    assert done.returncode == 1
    assert "no rollout is favored for its place. rewards [1.0, 0.0, 0.5, 0.25]" in done.stdout
    assert "1 failed, 20 deselected" in done.stdout


def test_an_unknown_name_is_a_usage_error(run):
    done = run("--prime-rl", "nope")
    assert done.returncode == 4
    assert "--prime-rl nope: no installed plugin offers that algorithm" in done.stderr


def test_a_setting_that_does_not_fit_is_a_usage_error(run):
    done = run("--prime-rl", "mine", "--prime-rl-set", "speed=1")
    assert done.returncode == 4
    assert "speed: unknown key" in done.stderr
