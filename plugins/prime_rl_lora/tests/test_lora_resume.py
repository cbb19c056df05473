"""Which model and which adapter a run goes on with, and what resume refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.config.trainer import OptimConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_optimizer
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.rundir.launch import Launch
from prime_rl_app.models import model_path
from prime_rl_app.resume import check_optimizer, check_tuning
from prime_rl_lora.tuning import Lora, LoraConfig

LORA: dict[str, Any] = {"rank": 16, "alpha": 32, "target_modules": None, "modules_to_save": []}


FILES = ("adapter_config.json", "adapter_model.safetensors")


def checkpoint_of(run_dir: Path, *files: str) -> Checkpoint:
    """Of step 5, with these weights."""
    checkpoint = Checkpoint(run_dir / "checkpoints" / "step_5")
    checkpoint.weights.mkdir(parents=True)
    for file in files:
        (checkpoint.weights / file).touch()
    return checkpoint


def launch_from(run_dir: Path, *files: str) -> Launch:
    """One that goes on from step 5, whose checkpoint has these weights."""
    return Launch(
        model_path=str(run_dir / "base"),
        served_model_name="m",
        engine_urls=[],
        transport_type="zmq",
        transport_host="",
        transport_ports=[],
        first_step=6,
        resume_from=str(checkpoint_of(run_dir, *files).directory),
    )


def test_engines_begin_with_the_base_and_are_brought_to_the_adapter(tmp_path: Path) -> None:
    """They say version 0, the target is the adapter's folder at version 5."""
    launch = launch_from(tmp_path, *FILES)
    assert launch.adapter == launch.first_weights == tmp_path / "checkpoints/step_5/weights"
    assert (launch.engine_version, launch.first_step - 1) == (0, 5)


def test_engines_begin_with_a_whole_checkpoint_at_its_version(tmp_path: Path) -> None:
    launch = launch_from(tmp_path, "model.safetensors")
    assert launch.adapter is None
    assert launch.first_weights == tmp_path / "base"
    assert launch.engine_version == 5


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (LORA, LORA | {"rank": 8}, "trainer.lora.rank: 16 then, 8 now"),
        (LORA, LORA | {"modules_to_save": ["norm"]}, r"modules_to_save: \[\] then, \[\"norm\"\]"),
        (LORA, None, "an adapter then, all weights now"),
        (None, LORA, r"all weights then, an adapter now: \[trainer.lora\]"),
    ],
)
def test_another_adapter_than_the_checkpoints_is_refused(
    before: Any, now: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"--resume: what trains has changed .*{said}"):
        check(before, now, tmp_path)


def test_the_adapter_of_the_checkpoint_continues_however_the_table_spells_it(
    tmp_path: Path,
) -> None:
    """``run.json`` of an older version writes ``null`` without LoRA, and each key of it with."""
    check(None, None, tmp_path / "a")
    check(LORA, {"rank": 16}, tmp_path / "b")
    check({}, LORA, tmp_path / "c")


def check(before: Any, now: Any, run_dir: Path) -> None:
    """Two tables ``[trainer.lora]``: the checkpoint's, and the resumed run's."""
    files = FILES if before is not None else ("model.safetensors",)
    tuning = None if now is None else Lora(LoraConfig.model_validate(now))
    check_tuning({"trainer": {"lora": before}}, tuning, checkpoint_of(run_dir, *files))


def test_an_adapter_is_not_offered_as_a_model(tmp_path: Path) -> None:
    then = {"trainer": {"lora": {}, "optim": {"type": "adamw"}}}
    muon = make_optimizer(OptimConfig(type="muon"), load_plugins(TRAINER_GROUP))
    with pytest.raises(ConfigError, match=r"Set it back, or start a new run\.$"):
        check_optimizer(then, muon, checkpoint_of(tmp_path, *FILES))


def test_a_run_cannot_start_from_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    config = RunConfig.model_validate({"max_steps": 1, "model": {"name": str(tmp_path)}})
    assert model_path(config, load_plugins()) == (str(tmp_path.resolve()), False)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="holds a LoRA adapter without its base"):
        model_path(config, load_plugins())
    (tmp_path / "model.safetensors").touch()
    assert model_path(config, load_plugins()) == (str(tmp_path.resolve()), False)
