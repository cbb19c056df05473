"""Weights and gates of training envs: which examples a run samples over its steps, and again after
a resume."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from waiting import LIMIT

from prime_rl import Algorithm, ConfigError, PluginConfig, RunError, SampledEnv
from prime_rl.config.curriculum import env_of
from prime_rl.config.orchestrator import EnvConfig, TrainConfig
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.checkpoint import Checkpointing
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.rundir.checkpoints import unfinished
from prime_rl.testing import make_rollout
from prime_rl_app.saved_rollouts import read_step, step_files
from prime_rl_samplers.standard import StandardSampler

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]

Env = Mapping[str, Any]
EASY = "train/easy/all/reward/mean"
GROUPS = 4
"""Of a batch; a group has two rollouts."""


def envs_of(*tables: Env) -> tuple[EnvConfig, ...]:
    return TrainConfig.model_validate({"env": [{"id": "words", **each} for each in tables]}).env


# -- the schedule ---------------------------------------------------------------------------------

WEIGHTS = st.floats(0.0, 100.0)
POINTS = st.dictionaries(st.integers(0, 60), WEIGHTS, min_size=1, max_size=5).map(
    lambda points: sorted(points.items())
)
SOME_POINTS = POINTS.filter(lambda points: any(weight for _, weight in points))


@given(SOME_POINTS, st.integers(0, 80))
def test_a_weight_is_linear_between_two_points_and_constant_outside(points, step):
    weight = envs_of({"weight": points}, {"name": "other"})[0].weight_at(step)
    before = [each for each in points if each[0] <= step]
    after = [each for each in points if each[0] >= step]
    if not before or not after:
        assert weight == (points[0] if not before else points[-1])[1]
        return
    (start, first), (end, last) = before[-1], after[0]
    if start == end:
        assert weight == first
    else:
        slope = (last - first) / (end - start)
        assert weight == pytest.approx(first + slope * (step - start), abs=1e-9)


def test_without_a_schedule_a_weight_is_a_ratio():
    tables = [{"weight": 3, "name": "a"}, {"ratio": 3, "name": "b"}, {"name": "c"}]
    assert [each.weight_at(7) for each in envs_of(*tables)] == [3.0, 3.0, 1.0]
    assert [each.first_ratio for each in envs_of(*tables)] == [3.0, 3.0, None]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"weight": 2, "ratio": 2}, "both set its share"),
        ({"weight": 0}, "greater than 0"),
        ({"weight": []}, "at least one with a weight above 0"),
        ({"weight": [[1, 0.0], [5, 0]]}, "at least one with a weight above 0"),
        ({"weight": [[5, 1.0], [5, 2.0]]}, "rising steps"),
        ({"weight": [[5, 1.0], [2, 2.0]]}, "rising steps"),
        ({"weight": [[1, float("inf")]]}, "finite"),
        ({"weight": [[1, -1.0]]}, "greater than or equal to 0"),
        ({"weight": 2, "measure_every": 5}, "measure_every says that it trains nothing"),
        ({"opens": {"from_step": 5}, "measure_every": 5}, "and opens is for envs"),
        ({"opens": {}}, "either metric or from_step"),
        ({"opens": {"metric": EASY, "at_least": 1, "from_step": 3}}, "either metric or from_step"),
        ({"opens": {"metric": EASY}}, "one bound"),
        ({"opens": {"metric": EASY, "at_least": 0.1, "at_most": 0.5}}, "one bound"),
        ({"opens": {"from_step": 4, "at_least": 0.1}}, "from_step has none"),
        ({"opens": {"from_step": 4, "over": 3}}, "from_step has none"),
        ({"opens": {"metric": "validation/loss", "at_most": 1}}, "a validation loss is neither"),
        ({"opens": {"metric": "train/esay/all/reward/mean", "at_least": 1}}, "easy, hard"),
        ({"opens": {"metric": "train/hard/all/reward/mean", "at_least": 1}}, "metric of itself"),
        ({"opens": {"metric": "batch/hard/seen", "at_least": 1}}, "metric of itself"),
    ],
)
def test_what_contradicts_is_refused_before_the_start(table, says):
    with pytest.raises(ValidationError, match=re.escape(says)):
        envs_of({"name": "easy"}, {"name": "hard", **table})


def gate(env: str, at_least: float = 0.5, over: int = 1) -> dict[str, Any]:
    metric = f"train/{env}/all/reward/mean"
    return {"opens": {"metric": metric, "at_least": at_least, "over": over}}


@given(st.permutations(["a", "b", "c", "d"]), st.integers(2, 4))
def test_a_circle_of_gates_is_refused_wherever_it_is(names, size):
    circle = names[:size]
    tables = [{"name": "start"}]
    for number, name in enumerate(names):
        reads = circle[(number + 1) % size] if name in circle else circle[0]
        tables.append({"name": name, **gate(reads)})
    with pytest.raises(ValidationError, match="its gate never opens") as refused:
        envs_of(*tables)
    named = re.search(r"env '(.)': .* a metric of (.*)\. Read", str(refused.value))
    assert named and {named[1], *named[2].split(" -> ")} == {*circle}


@given(st.permutations(["a", "b", "c", "d"]))
def test_gates_may_open_one_after_another(names):
    chain = [{"name": b, **gate(a)} for a, b in pairwise(names)]
    assert len(envs_of({"name": names[0]}, *chain)) == 4


ANY_ENV = st.fixed_dictionaries(
    {},
    optional={
        "weight": SOME_POINTS,
        "opens": st.one_of(
            st.just({"metric": "progress/total_tokens", "at_least": 9}),
            st.integers(1, 70).map(lambda step: {"from_step": step}),
        ),
    },
)


@given(st.lists(ANY_ENV, min_size=1, max_size=4))
@example([{"weight": [[1, 1.0], [50, 0.0]]}, {"opens": {"from_step": 50}}])
@example([{"weight": [[1, 1.0], [49, 0.0]]}, {"opens": {"from_step": 50}}])
@example([{"opens": {"metric": "progress/total_tokens", "at_least": 9}}])
def test_a_config_is_accepted_if_each_step_has_an_env_that_is_sure_to_be_open(tables):
    def is_sampled(env: EnvConfig, step: int) -> bool:
        opens = env.opens.from_step if env.opens else 1
        return opens is not None and step >= opens and env.weight_at(step) > 0

    alone = [EnvConfig(id="words", name=f"env {i}", **each) for i, each in enumerate(tables)]
    is_sure = all(any(is_sampled(each, step) for each in alone) for step in range(1, 100))
    try:
        TrainConfig(env=tuple(alone))
    except ValidationError as refused:
        assert not is_sure and "no env is sure to be sampled at step" in str(refused)
    else:
        assert is_sure


def test_the_env_of_a_metric_is_the_longest_name_in_it():
    names = ["a", "a/b", "mean"]
    assert env_of("train/a/all/reward/mean", names) == "a"
    assert env_of("train/a/b/all/reward/mean", names) == "a/b"
    assert env_of("dispatcher/cancelled/a", names) == "a"
    assert env_of("train/agg/all/reward/mean", names) is None


# -- the gates ------------------------------------------------------------------------------------


@given(
    st.lists(st.none() | st.floats(0, 1), max_size=30),
    st.floats(0, 1),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 30),
)
def test_a_gate_opens_once_by_the_mean_of_the_last_batches_also_over_a_resume(
    values, bound, over, upper, resumed_after
):
    opens = {"metric": EASY, "at_most" if upper else "at_least": bound, "over": over}
    tables = envs_of({"name": "easy"}, {"name": "hard", "opens": opens})
    curriculum = Curriculum(tables, step=lambda: 1)
    reported: list[float] = []
    is_open = False
    for step, value in enumerate(values, start=1):
        of_easy = {} if value is None else {EASY: value, "batch/easy/seen": 8.0}
        curriculum.measured(step, {"batch/agg/seen": 8.0, **of_easy})
        reported += [] if value is None else [value]
        if len(reported) >= over:
            mean = sum(reported[-over:]) / over
            if abs(mean - bound) > 1e-9:
                is_open |= mean <= bound if upper else mean >= bound
            else:
                is_open |= curriculum.is_open("hard")
        assert curriculum.is_open("hard") == is_open
        if step == resumed_after:
            with TemporaryDirectory() as folder:
                curriculum.save(Path(folder))
                curriculum = Curriculum(tables, step=lambda: 1)
                curriculum.load(Path(folder))


def test_a_metric_that_nothing_reports_is_named_with_the_closest_at_the_first_batch():
    wrong = {"metric": "train/easy/reward/mean", "at_least": 0.5}
    curriculum = Curriculum(
        envs_of({"name": "easy"}, {"name": "hard", "opens": wrong}), step=lambda: 1
    )
    others = {"batch/agg/seen": 4.0, "batch/other/seen": 4.0, "train/other/all/reward/mean": 0.1}
    curriculum.measured(1, others)  # it may come with the first rollout of its env
    with pytest.raises(RunError, match=r"env 'hard'.*step 2 has no such metric.*" + EASY):
        curriculum.measured(2, {EASY: 0.1, "batch/easy/seen": 4.0})


HELD_OUT = "eval/held-out/all/reward/mean"


def gated_by_evaluation(over: int = 1) -> tuple[EnvConfig, ...]:
    opens = {"metric": HELD_OUT, "at_least": 0.5, "over": over}
    return envs_of({"name": "easy"}, {"name": "held-out", "opens": opens})


def test_a_gate_reads_the_evaluation_of_a_version_two_batches_later():
    curriculum = Curriculum(gated_by_evaluation(), step=lambda: 1)
    curriculum.evaluated(3, {HELD_OUT: 0.5})
    curriculum.evaluated(3, {"eval/other/all/reward/mean": 0.9})
    for step, is_open in ((3, False), (4, False), (5, True)):
        curriculum.measured(step, {})  # a batch says nothing of it
        assert curriculum.is_open("held-out") == is_open


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_evaluations_count_once_each_also_over_a_resume(rewards, over, interval, resumed_after):
    """A run that continues is given all earlier results again, and those of lost steps anew."""
    tables = gated_by_evaluation(over)
    curriculum = Curriculum(tables, step=lambda: 1)
    results = {number * interval: reward for number, reward in enumerate(rewards)}
    opened_at = []
    for step in range(1, 40):
        if step - 1 in results:
            curriculum.evaluated(step - 1, {HELD_OUT: results[step - 1]})
        curriculum.measured(step, {})
        if curriculum.is_open("held-out"):
            opened_at.append(step)
        if step == resumed_after:
            with TemporaryDirectory() as folder:
                curriculum.save(Path(folder))
                curriculum = Curriculum(tables, step=lambda: 1)
                curriculum.load(Path(folder))
            for version, reward in results.items():
                curriculum.evaluated(version, {HELD_OUT: reward})

    means = [sum(rewards[end - over : end]) / over for end in range(over, len(rewards) + 1)]
    passed = [number for number, mean in enumerate(means) if mean >= 0.5 + 1e-9]
    near = [number for number, mean in enumerate(means) if abs(mean - 0.5) <= 1e-9]
    if passed and not near:
        assert opened_at[0] == (passed[0] + over - 1) * interval + 2
    elif not near:
        assert not opened_at


def test_an_evaluation_without_the_metric_of_a_gate_ends_the_run_with_the_closest():
    opens = {"metric": "eval/held-out/reward/mean", "at_least": 0.5}
    tables = envs_of({"name": "easy"}, {"name": "hard", "opens": opens})
    curriculum = Curriculum(tables, step=lambda: 1)
    curriculum.evaluated(0, {"eval/held-out/cancelled": 8.0})  # no rollout finished
    curriculum.evaluated(0, {"eval/other/all/reward/mean": 0.5})
    with pytest.raises(RunError, match=r"env 'hard'.*version 1 has no such metric.*" + HELD_OUT):
        curriculum.evaluated(1, {HELD_OUT: 0.5, "eval/held-out/num_failed": 0.0})


@pytest.mark.parametrize(
    ("evaluated", "says"),
    [
        ([], "ENV one of: none"),
        ([{"name": "other", "interval": 5}], "ENV one of: other"),
        ([{"name": "held-out"}], "Give this eval env an interval"),
    ],
)
def test_a_gate_needs_an_evaluation_that_is_repeated(evaluated, says):
    opens = {"metric": HELD_OUT, "at_least": 0.5}
    train = [{"id": "words"}, {"id": "words", "name": "hard", "opens": opens}]
    evaluated = [{"id": "words", **each} for each in evaluated]

    def made(evaluated: list[Env]) -> RunConfig:
        orchestrator = {"batch_size": 4, "train": {"env": train}, "eval": {"env": evaluated}}
        return RunConfig.model_validate(
            {"model": {"name": "m"}, "max_steps": 9, "orchestrator": orchestrator}
        )

    with pytest.raises(ValidationError, match=re.escape(says)):
        made(evaluated)
    assert made([{"id": "words", "name": "held-out", "interval": 5}])


def test_saved_gates_that_do_not_fit_are_refused_or_begin_afresh(tmp_path):
    tables = envs_of({"name": "easy"}, {"name": "hard", **gate("easy", over=2)})
    with pytest.raises(ConfigError, match="not the saved gates"):
        Curriculum(tables, step=lambda: 1).load(tmp_path)
    (tmp_path / "gates.json").write_text('{"open": 3}')
    with pytest.raises(ConfigError, match="not the saved gates"):
        Curriculum(tables, step=lambda: 1).load(tmp_path)

    first = Curriculum(tables, step=lambda: 1)
    first.measured(1, {EASY: 1.0})
    first.save(tmp_path)
    other = {"metric": "batch/easy/seen", "at_least": 0.5, "over": 2}
    second = Curriculum(envs_of({"name": "easy"}, {"name": "hard", "opens": other}), lambda: 1)
    second.load(tmp_path)
    second.measured(2, {"batch/easy/seen": 1.0})
    assert not second.is_open("hard")  # one batch of two


# -- what a run samples ---------------------------------------------------------------------------


class Plain(Algorithm):
    name = "plain"


class World:
    """The real sampler, dispatcher, buffer, gates and checkpoints, whose rollouts end at once."""

    def __init__(self, tables: Sequence[Env], lag: int, run_dir: Path | None = None) -> None:
        self.version = 0
        self.names = [table["name"] for table in tables]
        config = RunConfig.model_validate(
            {
                "model": {"name": "m"},
                "max_steps": 1000,
                "orchestrator": {
                    "batch_size": 2 * GROUPS,
                    "group_size": 2,
                    "max_off_policy_steps": lag,
                    "max_inflight_rollouts": 100,
                    "train": {"env": [{"id": "words", **table} for table in tables]},
                },
            }
        )
        self.curriculum = Curriculum(
            config.orchestrator.train.env,
            step=lambda: self.dispatcher.next_step,
            last_sent=lambda: self.buffer.batch.step - 1,
        )
        sampled = [
            SampledEnv(
                name,
                1000,
                env.first_ratio,
                is_ready=lambda name=name: self.curriculum.is_open(name),
                scheduled=lambda name=name: self.curriculum.weight(name),
            )
            for name, env in zip(self.names, config.orchestrator.train.env, strict=True)
        ]
        self.sampler = StandardSampler(PluginConfig(), sampled, seed=7)
        self.envs = [
            SimpleNamespace(
                name=name,
                algorithm=Plain(PluginConfig()),
                source=SimpleNamespace(is_live=True),
                group_size=2,
                limits=None,
                host=SimpleNamespace(agents=("agent",)),
            )
            for name in self.names
        ]
        keeps = SimpleNamespace(objectors=lambda rollout, group: {})
        self.buffer = Buffer(
            batch_size=2 * GROUPS,
            max_off_policy_steps=lag,
            pre=keeps,
            post=keeps,
            max_empty_batches=5,
        )
        engines = SimpleNamespace(policy=self, fleet=SimpleNamespace(asleep=False, serving=[]))
        self.chosen: list[tuple[str, int]] = []
        self.dispatcher = Dispatcher(
            config, engines, self.buffer, self.envs, self.next_group, self.run_rollout
        )
        self.state = Checkpointing(
            SimpleNamespace(config=config, run_dir=run_dir),
            self.sampler,
            self.envs,
            self.dispatcher,
            self.buffer,
            curriculum=self.curriculum,
        )

    def next_group(self) -> tuple[Any, int]:
        index, number = self.sampler.next_example()
        self.chosen.append((self.names[index], number))
        return self.envs[index], number

    async def run_rollout(self, group: Any, index: int) -> list[Any]:
        rollout = make_rollout(0.0, env=group.env.name, group_id=group.group_id)
        rollout.example_id, rollout.policy_version = group.example_id, group.policy_version
        rollout.assign_advantages(1.0)
        rollout.freeze()
        return [rollout]

    async def train(
        self,
        steps: range,
        reward: Callable[[int], float] = lambda step: 0.0,
        saved: int | None = None,
    ) -> list[dict[str, float]]:
        """The metrics of each step. ``saved``: the step of which a checkpoint is written."""
        metrics = []
        task = asyncio.create_task(self.dispatcher.run())
        try:
            for step in steps:
                async with asyncio.timeout(LIMIT):
                    while not self.buffer.is_full:
                        group = await self.dispatcher.arrivals.get()
                        self.buffer.add(group.survivors)
                        self.dispatcher.taken(group)
                batch = self.buffer.take()
                if step == saved:
                    await self.state._write(step)
                seen = Counter(rollout.env for rollout in batch.kept)
                counts = {f"batch/{env}/seen": float(number) for env, number in seen.items()}
                metrics.append({**self.curriculum.take_metrics(), **counts})
                self.curriculum.measured(step, {EASY: reward(step), **counts})
                self.state.batch_sent(batch, [])
                self.dispatcher.batch_sent(step)
                self.version = step
                self.dispatcher.version_served(step)
        finally:
            await self.dispatcher.close()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return metrics


@settings(max_examples=20, deadline=None)
@given(st.lists(SOME_POINTS, max_size=2), st.integers(0, 5), st.integers(0, 10))
def test_any_ten_steps_have_the_weights_of_their_steps(schedules, lag, start):
    """To within two groups of each env, whether groups are chosen for the batch or ahead of it."""
    tables = [{"name": f"env {i}", "weight": points} for i, points in enumerate(schedules)]
    tables.append({"name": "steady", "ratio": 2.0})
    world = World(tables, lag)
    asyncio.run(world.train(range(1, 21)))
    envs = envs_of(*tables)
    ten = range(start + 1, start + 11)
    groups = world.chosen[start * GROUPS : (start + 10) * GROUPS]
    for env in envs:
        expected = sum(
            GROUPS * env.weight_at(step) / sum(each.weight_at(step) for each in envs)
            for step in ten
        )
        number = sum(name == env.label for name, _ in groups)
        assert abs(number - expected) <= 2 * len(envs)


GATED = (
    {"name": "easy", "weight": [[1, 4.0], [10, 1.0]]},
    {"name": "hard", "weight": 2.0, **gate("easy", at_least=0.55, over=3)},
    {"name": "late", "opens": {"from_step": 8}},
)


def test_gates_open_for_the_next_batch_and_the_metrics_show_it():
    world = World(GATED, lag=0)
    metrics = asyncio.run(world.train(range(1, 12), reward=lambda step: step / 10))
    is_open = [[each[f"sampler/open/{name}"] for each in metrics] for name in ("hard", "late")]
    assert is_open[0] == [0.0] * 7 + [1.0] * 4  # the mean of steps 5 to 7 is 0.6, of 4 to 6 0.5
    assert is_open[1] == [0.0] * 7 + [1.0] * 4
    assert [each["sampler/weight/easy"] for each in metrics[::3]] == [4.0, 3.0, 2.0, 1.0]
    assert world.curriculum.summary == "easy 1, hard 2, late 1"
    assert World(GATED, lag=0).curriculum.summary == "easy 4, hard closed, late closed"
    by_step = [world.chosen[i : i + GROUPS] for i in range(0, 11 * GROUPS, GROUPS)]
    assert {name for step in by_step[:7] for name, _ in step} == {"easy"}
    assert {name for step in by_step[7:] for name, _ in step} == {"easy", "hard", "late"}


def test_a_run_without_weights_and_gates_has_no_metrics_of_them():
    assert Curriculum(envs_of({"ratio": 3.0}), step=lambda: 1).take_metrics() == {}


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 10), st.lists(st.floats(0, 1), min_size=12, max_size=12))
@example(7, [step / 10 for step in range(12)])  # its own batch opens the gate
@example(6, [step / 10 for step in range(12)])
def test_a_resumed_run_draws_the_same_examples(step, rewards):
    with TemporaryDirectory() as folder:
        first = World(GATED, lag=0, run_dir=Path(folder))
        metrics = asyncio.run(first.train(range(1, 13), lambda step: rewards[step - 1], saved=step))
        second = World(GATED, lag=0, run_dir=Path(folder))
        second.state.restore(unfinished(Path(folder), step).orchestrator)
        second.buffer.batch.step, second.version = step + 1, step
        again = asyncio.run(second.train(range(step + 1, 13), lambda step: rewards[step - 1]))
    assert second.chosen == first.chosen[step * GROUPS :]
    assert again == metrics[step:]


@pytest.mark.parametrize("lag", [1, 4])
def test_what_is_chosen_by_weights_does_not_depend_on_how_far_ahead_it_is(lag):
    tables = (GATED[0], {"name": "late", "opens": {"from_step": 8}})
    worlds = [World(tables, each) for each in (0, lag)]
    for world in worlds:
        asyncio.run(world.train(range(1, 13)))
    assert worlds[1].chosen[: 12 * GROUPS] == worlds[0].chosen


CONFIG = """
max_steps = 6
seq_len = 64
[model]
name = "tiny-reverse"
warmup_exact = 0.15
[orchestrator]
batch_size = 8
group_size = 4
max_off_policy_steps = 0
post_batch_filters = []
[orchestrator.algo]
type = "grpo"
[orchestrator.renderer]
name = "qwen3"
enable_thinking = false
[[orchestrator.train.env]]
id = "text-reversal"
name = "easy"
weight = [[1, 3.0], [4, 1.0]]
[[orchestrator.train.env]]
id = "text-reversal"
name = "hard"
opens = { metric = "train/easy/all/reward/mean", at_least = 0.01, over = 2 }
"""


@pytest.mark.slow
def test_in_a_run_a_gate_opens_and_its_env_trains(tmp_path, model_cache):
    (tmp_path / "run.toml").write_text(CONFIG)
    words = ["run", tmp_path / "run.toml", "--run.name", "run", "--output_dir", tmp_path]
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache)}
    done = warm.run([*CLI, *words], env=env, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "run"
    rows: dict[int, dict[str, float]] = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        rows.setdefault(line["step"], {}).update(line)
    is_open = [rows[step]["sampler/open/hard"] for step in range(1, 7)]
    assert is_open[:2] == [0.0, 0.0] and is_open == sorted(is_open) and is_open[-1] == 1.0
    assert rows[4]["sampler/weight/easy"] == 1.0
    for step, path in step_files(run_dir).items():
        envs = {rollout.env for rollout in read_step(path).kept}
        assert "hard" not in envs or is_open[step - 1]
    assert any("batch/hard/seen" in rows[step] for step in range(3, 7))
    log = (run_dir / "logs" / "latest" / "orchestrator.log").read_text()
    assert re.search(r"env 'hard' opens after step \d: train/easy/all/reward/mean is 0\.\d", log)
