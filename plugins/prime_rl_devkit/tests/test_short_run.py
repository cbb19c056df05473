"""`prime_rl.testing.run`: the config that it makes, and a run of one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.testing import run
from prime_rl_devkit.short_run import short_config

ROOT = Path(__file__).parents[3]


def test_what_a_config_leaves_out_is_small():
    table = short_config({"orchestrator": {"algo": {"type": "rloo"}}}, 3, Path("out"))
    config = RunConfig.model_validate(table)
    assert (config.model.name, config.max_steps, str(config.output_dir)) == (
        "tiny-reverse", 3, "out",
    )  # fmt: skip
    orchestrator = config.orchestrator
    assert (orchestrator.algo.type, orchestrator.group_size, orchestrator.batch_size) == (
        "rloo", 4, 8,
    )  # fmt: skip
    assert [env.id for env in orchestrator.train.env] == ["reverse-text"]


def test_what_takes_long_is_left_out_and_what_is_said_stays():
    table = short_config(ROOT / "configs/reverse_text/grpo.toml", 1, Path("out"))
    assert "eval" not in table["orchestrator"] and "scheduler" not in table["trainer"]
    assert (table["orchestrator"]["group_size"], table["orchestrator"]["batch_size"]) == (8, 16)
    assert table["trainer"]["optim"]["lr"] == 7e-4 and table["trainer"]["optim"]["beta2"] == 0.99


@pytest.mark.parametrize(
    ("sizes", "batch"), [((None,), 8), ((4, 6), 12), ((3, 5), 15), ((8, 2), 16)]
)
def test_the_groups_of_every_env_divide_the_batch(sizes, batch):
    envs = [
        {"id": "reverse-text", "name": f"e{n}"} | ({"group_size": size} if size else {})
        for n, size in enumerate(sizes)
    ]
    table = short_config({"orchestrator": {"train": {"env": envs}}}, 1, Path("out"))
    assert table["orchestrator"]["batch_size"] == batch


def test_no_steps_and_no_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="steps: expected at least 1"):
        run(steps=0)
    with pytest.raises(ConfigError, match=r"gone.toml"):
        run(tmp_path / "gone.toml")


@pytest.mark.slow
def test_a_run_of_one_step(tmp_path):
    done = run({"orchestrator": {"algo": {"type": "grpo"}}}, 1, folder=tmp_path)
    assert (done.step, done.state) == (1, "done")
    (weights,) = {tuple(each.reward_weights.items()) for each in done.rollouts(step=1)}
    assert weights == (("positions", 1.0),)
