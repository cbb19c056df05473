"""The algorithms of docs/plugins.md that sample in a hook: their numbers, and a run with both."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from waiting import LIMIT

from prime_rl import Algorithm, PluginConfig
from prime_rl.testing import FakeHost, FakeReference, check_algorithm, make_rollout, score
from prime_rl_app.saved_rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]
ENVS = """
[[orchestrator.train.env]]
id = "reverse-text"
name = "branching"
algo.type = "branching"

[[orchestrator.train.env]]
id = "reverse-text"
name = "judged"
algo.type = "judged"
"""
OFFER = """
from prime_rl import hookimpl

@hookimpl
def register_algorithms():
    return [Branching, Judged]
"""


def shown() -> str:
    """The section's code."""
    section = (ROOT / "docs/plugins.md").read_text().partition("## Sampling in a hook\n")[2]
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.S | re.M)
    )


def algorithm(name: str) -> type[Algorithm]:
    names: dict[str, Any] = {}
    exec(compile(shown(), "plugins.md", "exec", dont_inherit=True), names)
    found: type[Algorithm] = names[name]
    return found


def test_a_half_gets_the_difference_of_the_values_around_it() -> None:
    """From the prompt 1 of 4 branches is right, from the middle 3 of 4; the rollout is right."""

    def reply(ids: list[int], seed: int) -> list[int]:
        right = seed % 4 < (1 if ids == [63] else 3)
        return [ord(letter) for letter in ("abcd" if right else "no")[len(ids) - 1 :]]

    rollout = make_rollout(0.0, prompt=1, completion=4)
    rollout.samples[0].token_ids = np.array([ord(letter) for letter in "?abcd"], np.int32)
    rollout.task["answer"] = "abcd"
    host = FakeHost(policy=FakeReference(reply=reply))
    score(algorithm("Branching")(PluginConfig()), [rollout], host=host)
    assert len(rollout.samples) == 9
    credit = [
        s.advantages[s.loss_mask].tolist() for s in rollout.samples if s.advantages is not None
    ]
    assert credit[0] == [0.5, 0.5, 0.25, 0.25]
    assert credit[1:5] == [[0.75] * 4, [-0.25] * 2, [-0.25] * 2, [-0.25] * 2]
    assert credit[5:] == [[0.25] * 2, [0.25] * 2, [0.25] * 2, []]


def test_a_judges_yes_is_credit_above_the_groups_mean() -> None:
    def reply(ids: list[int], seed: int) -> list[int]:
        return [ord(letter) for letter in ("yes" if seed % 4 < ids[0] else "no")]

    group = [make_rollout(0.0, group_id=3) for _ in range(2)]
    for rollout, good in zip(group, (1, 4), strict=True):
        rollout.samples[0].token_ids[0] = good
    judged = algorithm("Judged")
    host = FakeHost(policy=FakeReference(reply=reply))
    score(judged(judged.config_class()), group, host=host)
    assert [rollout.metrics["yes"] for rollout in group] == [0.25, 1.0]
    assert [set(np.asarray(rollout.advantages)) for rollout in group] == [{-0.375}, {0.375}]


def test_an_algorithm_that_appends_branches_conforms() -> None:
    def rollouts(rewards: Any) -> list[Any]:
        group = [make_rollout(reward, group_id=1) for reward in rewards]
        for number, rollout in enumerate(group):
            rollout.task["answer"], rollout.episode_id = "yes", number
        return group

    check_algorithm(algorithm("Branching")(PluginConfig()), make_group=rollouts)


@pytest.mark.slow
def test_a_run_trains_on_branches_and_by_a_judges_verdict(
    tmp_path: Path, model_cache: Path
) -> None:
    site = tmp_path / "plugin"
    info = site / "sampling_hooks-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "sampling_hooks.py").write_text(shown() + OFFER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sampling-hooks\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[prime_rl]\nsampling_hooks = sampling_hooks\n")
    (tmp_path / "envs.toml").write_text(ENVS)
    process = warm.Popen(
        [
            *(*CLI, "run", str(ROOT / "configs/reverse_text/grpo.toml")),
            *(str(tmp_path / "envs.toml"), "--max_steps", "3"),
            *("--output_dir", str(tmp_path), "--run.name", "hooks", "--seq_len", "256"),
            *("--model.warmup_exact", "0.3", "--trainer.scheduler.warmup_steps", "0"),
            *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
            *("--orchestrator.max_off_policy_steps", "0", "--orchestrator.eval.env", "[]"),
            *("--orchestrator.post_batch_filters", "[]", "--trainer.micro_batch_tokens", "1024"),
        ],
        env=os.environ | {"PRIME_RL_CACHE": str(model_cache), "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output = process.communicate(timeout=LIMIT)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    check_run(tmp_path / "hooks")


def check_run(run_dir: Path) -> None:
    """Branches are in the batch with credit that sums to zero per prefix, and the trainer finds the
    logprobs that the engine reported of them."""
    rollouts = [
        each
        for step in (1, 2, 3)
        for each in read_rollouts(run_dir / f"rollouts/step_{step}.msgpack")[1]
    ]
    branching = [rollout for rollout in rollouts if rollout.env == "branching"]
    assert branching and all(len(rollout.samples) == 9 for rollout in branching)
    for rollout in branching:
        for four in (rollout.samples[1:5], rollout.samples[5:]):
            assert sum(s.advantages[-1] for s in four) == pytest.approx(0.0, abs=1e-6)
            for sample in four:
                assert set(sample.policy_versions[sample.loss_mask]) == {rollout.policy_version}
    different = {tuple(s.token_ids) for r in branching for s in r.samples[1:]}
    assert len(different) > len(branching)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    total = {
        name: sum(line.get(f"scoring/{name}", 0) for line in lines)
        for name in ("branching/requests", "branching/sampled_tokens", "judged/requests")
    }
    judged = [rollout for rollout in rollouts if rollout.env == "judged"]
    assert total["branching/requests"] >= 2 * len(branching)
    assert total["judged/requests"] >= len(judged) > 0
    sampled = sum(s.num_trainable_tokens for r in branching for s in r.samples[1:])
    assert total["branching/sampled_tokens"] >= sampled > 0
    trained = [json.loads(line) for line in (run_dir / "trainer.jsonl").read_text().splitlines()]
    assert len(trained) == 3
    assert all(step["metrics"]["logprob_gap/max"] < 1e-3 for step in trained)
