"""Imports of upstream's documentation work, or say the right one."""

import importlib
import subprocess
import sys

import pytest

import prime_rl


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("prime_rl.trainer.rl.loss", "LossInputs"),
        ("prime_rl.trainer.rl.loss", "LossOutputs"),
        ("prime_rl.orchestrator.algo.base", "Algorithm"),
    ],
)
def test_a_name_of_upstream_is_ours_with_a_note(module, name):
    with pytest.warns(FutureWarning, match=f"Write: from prime_rl import {name}"):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(prime_rl, name)


def test_the_note_is_seen_where_a_module_imports_it(tmp_path):
    (tmp_path / "mine.py").write_text("from prime_rl.orchestrator.algo.base import Algorithm\n")
    command = [sys.executable, "-c", "import mine; print(mine.Algorithm.__name__)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "Algorithm\n"
    assert "mine.py:1: FutureWarning: prime_rl.orchestrator.algo.base is" in done.stderr


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("from prime_rl.trainer.rl.loss import compute_loss", "from prime_rl import LossInputs"),
        ("from prime_rl.orchestrator.advantage import AdvantageInputs", "docs/migrating.md"),
    ],
)
def test_a_name_without_a_counterpart_says_what_is_there(statement, expected):
    with pytest.raises(ImportError, match=expected):
        exec(statement)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("import prime_rl.configs", "from prime_rl import PluginConfig"),
        ("from prime_rl.configs.algorithm import AlgorithmConfig", "from prime_rl import Plugin"),
        ("from prime_rl.configs import trainer", "from prime_rl import PluginConfig"),
        ("import prime_rl.utils.logger", "logging.getLogger"),
        ("from prime_rl.utils.logger import get_logger", "logging.getLogger"),
        ("from prime_rl.orchestrator.algo.advantage import efficiency_shaping", "import Algorithm"),
    ],
)
def test_a_module_without_a_counterpart_says_what_to_write(statement, expected):
    with pytest.raises(ModuleNotFoundError, match=expected):
        exec(statement)
