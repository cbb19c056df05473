"""Which model and which adapter a run goes on with, and what resume refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.run.models import model_path
from prime_rl.run.resume_checks import check_lora
from prime_rl.rundir.launch import Launch

LORA: dict[str, Any] = {"rank": 16, "alpha": 32, "target_modules": None, "modules_to_save": []}


def launch_from(run_dir: Path, *files: str) -> Launch:
    """One that goes on from step 5, whose checkpoint has these weights."""
    checkpoint = run_dir / "checkpoints" / "step_5"
    (checkpoint / "weights").mkdir(parents=True)
    for file in files:
        (checkpoint / "weights" / file).touch()
    return Launch(
        model_path=str(run_dir / "base"),
        served_model_name="m",
        engine_urls=[],
        transport_type="zmq",
        transport_host="",
        transport_ports=[],
        first_step=6,
        resume_from=str(checkpoint),
    )


def test_engines_begin_with_the_base_and_are_brought_to_the_adapter(tmp_path: Path) -> None:
    """They say version 0, the target is the adapter's folder at version 5."""
    launch = launch_from(tmp_path, "adapter_config.json", "adapter_model.safetensors")
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
        (None, LORA, "all weights then, an adapter now"),
    ],
)
def test_another_adapter_than_the_checkpoints_is_refused(before: Any, now: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"--resume: what trains has changed .*{said}"):
        check_lora({"trainer": {"lora": before}}, {"trainer": {"lora": now}})


def test_a_checkpoint_from_before_lora_continues_without_it() -> None:
    check_lora({"trainer": {}}, {"trainer": {"lora": None}})
    check_lora({"trainer": {"lora": LORA}}, {"trainer": {"lora": dict(LORA)}})


def test_a_run_cannot_start_from_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    config = RunConfig.model_validate({"max_steps": 1, "model": {"name": str(tmp_path)}})
    assert model_path(config) == (str(tmp_path.resolve()), False)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="holds a LoRA adapter without its base"):
        model_path(config)
    (tmp_path / "model.safetensors").touch()
    assert model_path(config) == (str(tmp_path.resolve()), False)
