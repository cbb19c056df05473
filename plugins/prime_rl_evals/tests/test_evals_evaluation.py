"""Evaluations as an observer: what and when they sample, and how training keeps its engines."""

import asyncio
import json
import os
import resource
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import SharedDisk
from waiting import LIMIT, until

from prime_rl import PluginConfig
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import ExampleFailed
from prime_rl.env.episode import ModelEndpoint, RolloutResult
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.policy import LivePolicy
from prime_rl.orchestrator.records import decode_rollouts
from prime_rl.rundir.checkpoints import retain, whole_steps
from prime_rl_app.resume import rewind
from prime_rl_evals.evaluation import EvalLog, Evaluation, free_slots
from prime_rl_evals.figures import EvalResult

ENDPOINT = ModelEndpoint("m", "http://127.0.0.1:1/v1")


@dataclass
class FakeEnvironment:
    """Rewards by example id; a negative one fails. With a gate, rollouts wait for it."""

    rewards: list[float]
    calls: list[tuple] = field(default_factory=list)
    metrics: list[dict[str, float]] | None = None
    """By example id; None: the reward as ``m``."""
    gate: asyncio.Event | None = None
    error: BaseException | None = None
    """Raised instead of a result: not a failed rollout but a bug."""
    inflight: int = 0
    most: int = 0

    is_open: bool = False

    async def __aenter__(self):
        self.is_open = True

    async def __aexit__(self, *exc):
        self.is_open = False

    @property
    def num_examples(self):
        return len(self.rewards)

    @property
    def examples(self):
        return list(range(len(self.rewards)))

    async def run(self, example, *, model, sampling, group_id, cache_salt, seed):
        self.calls.append((example, group_id, cache_salt, seed))
        self.inflight += 1
        self.most = max(self.most, self.inflight)
        try:
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        finally:
            self.inflight -= 1
        if self.error is not None:
            raise self.error
        reward = self.rewards[example]
        if reward < 0:
            return [RolloutResult(ok=False, reward=9.0, error="broke", error_type="TaskError")]
        metrics = {"m": reward} if self.metrics is None else self.metrics[example]
        return [RolloutResult(ok=True, reward=reward, metrics=metrics)]


class World:
    """A run with one held-out env. ``began_with``: the version that the run began with."""

    def __init__(
        self, run_dir, rewards, *, version=0, began_with=0, last_version=100, interval=2,
        max_hold_seconds=300.0, slots=8, num_examples=100, group_size=1, again=False, **tables,
    ):  # fmt: skip
        env = {
            "id": "held", "num_examples": num_examples, "group_size": group_size,
            "interval": interval,
        }  # fmt: skip
        table = {"max_hold_seconds": max_hold_seconds, "env": [env], "retrigger_on_resume": again}
        config = self.config = RunConfig(
            model={"name": "m"}, max_steps=last_version, seed=1000,
            orchestrator={"max_inflight_rollouts": slots, "eval": table}, **tables,
        )  # fmt: skip
        if began_with != version:
            attempt = run_dir / "configs/launch.attempt_1.json"
            attempt.parent.mkdir(parents=True, exist_ok=True)
            attempt.write_text(json.dumps({"first_step": began_with + 1}))
        self.shares, self.logged, self.num_training = [], [], 0
        self.gates = []
        status = SimpleNamespace(report=lambda text, progress: self.shares.append(progress))
        run = SimpleNamespace(
            config=config,
            run_dir=run_dir,
            status=status,
            launch=SimpleNamespace(first_step=version + 1),
        )
        self.environment = FakeEnvironment(rewards)
        self.policy = LivePolicy(version)
        host = SimpleNamespace(
            shared=SimpleNamespace(
                run=run,
                engines=SimpleNamespace(policy=self.policy),
                router=SimpleNamespace(run=lambda key, episode: episode(ENDPOINT)),
            ),
            log=lambda step, metrics: self.logged.append((step, metrics)),
            num_inflight=lambda: self.num_training,
            max_inflight=lambda: slots,
            environment=lambda env, harness: self.environment,
            evaluated=lambda version, metrics: self.gates.append((version, metrics)),
        )
        self.evaluation = Evaluation(PluginConfig(), host)

    @property
    def during(self):
        return self.evaluation.eval_log.results["during"]

    async def __aenter__(self):
        self.task = asyncio.create_task(self.evaluation.run())
        return self

    async def __aexit__(self, *exc):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def serve(self, version):
        """What the watcher does: wait for the evaluation of the present version, serve the next."""
        await asyncio.wait_for(self.evaluation.version_pending(version), LIMIT)
        self.policy.version = version
        self.evaluation.version_served(version)


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


# -- one evaluation ---------------------------------------------------------------------------


async def test_every_rollout_of_an_evaluation_is_kept_and_a_rewind_removes_later_ones(tmp_path):
    rewards = [1.0, -1.0, 0.5, 0.25, 0.75]
    world = World(tmp_path, rewards, group_size=2, interval=2)
    await world.evaluation.before_training()
    async with world:
        await world.serve(2)
        await world.evaluation._idle.wait()
    at_0, at_2 = (tmp_path / f"eval_rollouts/step_{v}/held.msgpack" for v in (0, 2))
    record = decode_rollouts(at_0)
    kept = [
        (each.rollout.example_id, each.rollout.episode_id, each.rollout.reward, each.dropped_by)
        for each in record["rollouts"]
    ]
    assert record["step"] == 0
    assert kept == [
        (example, member, max(reward, 0.0), "TaskError" if reward < 0 else None)
        for example, reward in enumerate(rewards)
        for member in (0, 1)
    ]
    assert record["rollouts"][2].rollout.info == {"error": "broke"}
    versions = {each.rollout.policy_version for each in decode_rollouts(at_2)["rollouts"]}
    assert versions == {2}
    rewind(tmp_path, 1)
    assert at_0.exists() and not at_2.exists()


async def test_a_failed_rollout_counts_as_reward_zero(tmp_path):
    world = World(tmp_path, [1.0, -1.0, 0.5, 0.5])
    await world.evaluation.before_training()
    (found,) = world.evaluation.eval_log.results["before"]
    assert (found.reward, found.num_rollouts, found.num_failed) == (0.5, 4, 1)
    assert found.metrics == {"m": pytest.approx(2 / 3)}
    assert world.shares == [0.0, 0.25, 0.5, 0.75, 1.0] and world.policy.evaluated is None
    assert world.logged == [(0, found.as_metrics())]
    assert EvalLog(tmp_path).results["before"] == [found]


async def test_the_first_examples_are_sampled_each_with_its_own_seed_at_one_version(tmp_path):
    world = World(tmp_path, [0.0, 1.0, 0.5], version=7, num_examples=2, group_size=2)
    await world.evaluation.after_training()
    assert sorted(world.environment.calls) == [
        (0, 0, "7", 1000), (0, 0, "7", 1001), (1, 1, "7", 1002), (1, 1, "7", 1003)
    ]  # fmt: skip
    (found,) = world.evaluation.eval_log.results["after"]
    assert [shown["reward"] for shown in found.shown] == [0.0, 1.0]  # one per example


async def test_seeds_after_the_largest_of_a_run_begin_at_zero(tmp_path):
    world = World(tmp_path, [0.0, 1.0], num_examples=2)
    config = world.config.model_copy(update={"seed": 2**63 - 1})
    world.evaluation.context.config = config
    await world.evaluation.before_training()
    assert sorted(seed for *_, seed in world.environment.calls) == [0, 2**63 - 1]


async def test_rollouts_in_flight_are_bounded(tmp_path):
    world = World(tmp_path, [0.0] * 9, slots=2)
    await world.evaluation.before_training()
    assert world.environment.most == 2


def test_training_keeps_its_slots():
    assert free_slots(128, 0) == 128  # before and after training: all of them
    assert free_slots(128, 100) == 32  # never less than a quarter more
    assert free_slots(128, 128) == 32
    assert free_slots(128, 20) == 108  # what training leaves
    assert free_slots(1, 1) == 1


async def test_slots_that_training_leaves_are_used(tmp_path):
    world = World(tmp_path, [1.0] * 6, slots=4)
    world.num_training, world.environment.gate = 3, asyncio.Event()
    task = asyncio.create_task(world.evaluation.after_training())
    await settle()
    assert world.environment.inflight == 1
    world.num_training = 0
    await until(lambda: world.environment.inflight >= 4)
    world.environment.gate.set()
    await asyncio.wait_for(task, LIMIT)
    assert world.environment.most == 4


async def test_environments_are_open_from_setup_to_close(tmp_path):
    world = World(tmp_path, [1.0])
    await world.evaluation.setup()
    assert world.environment.is_open
    await world.evaluation.close()
    assert not world.environment.is_open


# -- before training --------------------------------------------------------------------------


async def test_a_resumed_run_does_not_measure_its_first_weights_again(tmp_path):
    await World(tmp_path, [1.0]).evaluation.before_training()
    again = World(tmp_path, [1.0])
    await again.evaluation.before_training()
    later = World(tmp_path, [1.0], version=1)
    await later.evaluation.before_training()
    assert again.environment.calls == later.environment.calls == []


# -- while training goes on -------------------------------------------------------------------


async def test_the_next_version_waits_until_the_present_one_is_measured(tmp_path):
    async with World(tmp_path, [1.0, 0.0, 1.0, 0.0], slots=2) as world:
        world.environment.gate = asyncio.Event()
        await world.serve(2)
        await settle()
        pending = asyncio.create_task(world.evaluation.version_pending(3))
        await settle()
        assert not pending.done() and world.policy.evaluated == 0.0
        metrics = world.evaluation.take_metrics()
        assert metrics["dispatcher/inflight/eval"] == 2.0
        assert metrics["dispatcher/queued/eval"] == 2.0
        world.environment.gate.set()
        await asyncio.wait_for(pending, LIMIT)
        assert world.during[0].policy_version == 2 and world.during[0].reward == 0.5
        assert {salt for _, _, salt, _ in world.environment.calls} == {"2"}
        assert world.evaluation.take_metrics()["time/hold_weights_for_eval"] > 0
        assert world.policy.evaluated is None
        await world.serve(3)  # nothing to wait for


async def test_an_evaluation_that_takes_too_long_is_cut_short(tmp_path, caplog):
    async with World(tmp_path, [1.0, 0.0, 1.0, 0.0], slots=2, max_hold_seconds=0.05) as world:
        gate = world.environment.gate = asyncio.Event()
        gate.set()
        await world.serve(2)
        while len(world.environment.calls) < 2:
            await asyncio.sleep(0)
        gate.clear()
        while world.environment.inflight != 2 or len(world.environment.calls) != 4:
            await asyncio.sleep(0)  # two are done, two hang
        await asyncio.wait_for(world.evaluation.version_pending(3), LIMIT)
        (result,) = world.during
        assert (result.num_rollouts, result.num_failed) == (2, 0)
        assert result.as_metrics()["eval/held/cancelled"] == 2.0
        assert world.environment.inflight == 0
        assert "the evaluation of version 2 is cut short: 2 of 4 rollouts are left out" in (
            caplog.text
        )
        gate.set()
        await world.serve(4)
        await until(lambda: len(world.during) == 2)  # the next evaluation is complete again
        assert world.during[1].num_rollouts == 4 and world.during[1].policy_version == 4


async def test_an_evaluation_that_ends_as_its_time_is_up_does_not_cut_the_next(
    tmp_path, monkeypatch
):
    async with World(tmp_path, [1.0, 0.0]) as world:
        gate = world.environment.gate = asyncio.Event()
        await world.serve(2)

        @asynccontextmanager
        async def late(timeout):
            gate.set()
            yield
            raise TimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "timeout", late)
            await world.evaluation.version_pending(3)
        await world.serve(4)
        await until(lambda: len(world.during) == 2)
        assert [result.num_rollouts for result in world.during] == [2, 2]


async def test_an_evaluation_that_raises_ends_the_run_while_a_version_waits_for_it(tmp_path):
    """As in the loop: the watcher and the evaluation are tasks of one group."""
    world = World(tmp_path, [1.0, 0.0])
    gate = world.environment.gate = asyncio.Event()

    async def loop():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.evaluation.run())
            world.evaluation.version_served(2)
            await until(lambda: world.environment.inflight == 2)
            waiting = tasks.create_task(forever(world.evaluation))
            await settle()
            world.environment.error = ZeroDivisionError("a bug")
            gate.set()
            await asyncio.wait([waiting])

    async def forever(evaluation):
        await evaluation.version_pending(3)
        await asyncio.Event().wait()

    task = asyncio.create_task(loop())
    await asyncio.wait([task], timeout=LIMIT)
    assert task.done()
    failed = task.exception()
    assert isinstance(failed, ExceptionGroup)
    assert failed.exceptions == (world.environment.error,)


async def test_a_rollout_that_its_environment_cancels_fails_and_the_evaluation_goes_on(tmp_path):
    async with World(tmp_path, [1.0, 0.0]) as world:
        world.environment.error = asyncio.CancelledError()
        await world.serve(2)
        await world.serve(3)
        world.environment.error = None
        await world.serve(4)
        await world.serve(5)
        assert [(result.num_failed, result.reward) for result in world.during] == [
            (2, 0.0), (0, 0.5)
        ]  # fmt: skip


async def test_an_example_that_its_environment_cannot_make_fails_and_the_evaluation_goes_on(
    tmp_path, monkeypatch
):
    class Stumbling(list):
        def __getitem__(self, index):
            if index == 1:
                raise ExampleFailed("the environment cannot make example 1: KeyError: 'answer'")
            return super().__getitem__(index)

    async with World(tmp_path, [1.0, 1.0, 1.0, 1.0]) as world:
        monkeypatch.setattr(type(world.environment), "examples", Stumbling(range(4)))
        await world.serve(2)
        await world.serve(3)
        (result,) = world.during
        assert (result.num_rollouts, result.num_failed, result.reward) == (4, 1, 0.75)


async def test_an_evaluation_before_training_shows_before_its_first_rollout_ends(tmp_path):
    world = World(tmp_path, [1.0])
    world.environment.gate = asyncio.Event()
    task = asyncio.create_task(world.evaluation.before_training())
    await settle()
    assert world.policy.evaluated == 0.0 and world.shares == [0.0]  # the watchdog lets it work
    world.environment.gate.set()
    await task
    assert world.policy.evaluated is None


async def test_a_line_that_a_full_disk_tears_does_not_spoil_the_next(tmp_path, caplog):
    results = EvalLog(tmp_path), EvalResult("held", 1, 0.5, 8, 0)
    results[0].append("during", results[1])
    path, (soft, hard) = tmp_path / "evals.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    whole = path.read_text()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
    try:
        results[0].append("during", results[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot write" in caplog.text
    assert path.read_text() == whole
    results[0].append("during", results[1])
    assert len(EvalLog(tmp_path).results["during"]) == 2


async def test_the_last_version_is_not_evaluated_between_steps(tmp_path):
    async with World(tmp_path, [1.0], last_version=6) as world:
        for version in (1, 3, 6, 7):
            await world.serve(version)
        assert [result.policy_version for result in world.during] == [3]


async def test_a_resumed_run_makes_up_for_an_evaluation_that_was_cut_off(tmp_path):
    async with World(tmp_path / "none", [1.0], version=4, began_with=4) as world:
        await world.evaluation.before_training()
        assert world.policy.evaluated is None  # nothing is due
    async with World(tmp_path, [1.0], version=4, began_with=2) as world:
        await world.evaluation.before_training()
        for version in (5, 6):
            await world.serve(version)
        assert [result.policy_version for result in world.during] == [4]


# -- the log ----------------------------------------------------------------------------------


def held_out(reward, version):
    return EvalResult("held", version, reward, 8, 1, {"lcs": 0.5}, [{"reward": reward}])


async def test_a_resumed_run_measures_its_weights_again_if_asked(tmp_path):
    """Also between two multiples of the interval, and without counting against its patience."""
    stop = {"metric": "eval/held/all/reward/mean", "patience": 1}
    world = World(tmp_path, [0.5], interval=2, stop=stop)
    await world.evaluation.before_training()
    async with world:
        await world.serve(4)
        await world.evaluation._idle.wait()
    again = World(tmp_path, [0.5], version=4, began_with=0, again=True, stop=stop)
    async with again:
        await again.evaluation.setup()
        await again.evaluation.before_training()
        await again.evaluation._idle.wait()
    assert [result.policy_version for result in again.during] == [4, 4]
    odd = World(tmp_path, [0.5], version=5, began_with=0, again=True, stop=stop)
    async with odd:
        await odd.evaluation.before_training()
        await odd.evaluation._idle.wait()
    assert [result.policy_version for result in odd.during] == [4, 4, 5]


async def test_a_new_run_has_nothing_to_measure_again(tmp_path):
    world = World(tmp_path, [0.5], again=True)
    async with world:
        await world.evaluation.before_training()
        await world.evaluation._idle.wait()
    assert len(world.evaluation.eval_log.results["before"]) == 1 and not world.during


async def test_an_evaluation_that_holds_nothing_back_goes_on_under_newer_weights(tmp_path):
    """What is due meanwhile follows once, at the version of then."""
    world = World(tmp_path, [0.5] * 3, interval=2, max_hold_seconds=0, slots=2)
    await world.evaluation.before_training()
    world.environment.calls.clear()
    world.environment.gate = asyncio.Event()
    async with world:
        await world.serve(2)
        await until(lambda: world.environment.inflight == 2)
        for version in range(3, 8):
            await world.serve(version)  # none waits
        world.environment.gate.set()
        await world.evaluation._idle.wait()
        await until(lambda: len(world.during) == 2)
        await world.evaluation.after_training()
    assert [result.policy_version for result in world.during] == [2, 7]
    assert all(result.num_rollouts == 3 for result in world.during)
    salts = [salt for _, _, salt, _ in world.environment.calls]
    assert salts[:2] == ["2", "2"] and set(salts[2:]) == {"7"}
    assert world.evaluation.take_metrics()["time/hold_weights_for_eval"] == 0.0


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"ckpt": {"best": "eval/held/avg@1", "interval": 2}},
            "measures a mixture of versions, and ckpt.best",
        ),
        ({"deployment": {"colocated": True}}, "deployment.colocated the engines sleep"),
    ],
)
def test_holding_nothing_back_is_refused_where_one_version_is_needed(tmp_path, tables, said):
    config = World(tmp_path, [0.5], max_hold_seconds=0, **tables).config
    with pytest.raises(ConfigError, match=said):
        Evaluation.check(config)


def test_a_resumed_run_has_the_results_before_its_first_step(tmp_path):
    for when, step in (("before", 0), ("during", 2), ("after", 4)):
        EvalLog(tmp_path).append(when, held_out(0.1 * step, step))
    rewind(tmp_path, 2)
    found = EvalLog(tmp_path).results
    assert found == {"before": [held_out(0.0, 0)], "during": [held_out(0.2, 2)], "after": []}


def test_a_result_after_an_attempt_is_one_during_the_resumed_run(tmp_path):
    EvalLog(tmp_path).append("after", held_out(0.5, 4))
    rewind(tmp_path, 4)
    found = {"before": [], "during": [held_out(0.5, 4)], "after": []}
    assert EvalLog(tmp_path).results == found
    assert EvalLog(tmp_path / "none").results == {"before": [], "during": [], "after": []}


# -- what the best value decides ----------------------------------------------------------------


async def test_the_best_checkpoint_stays_and_the_run_ends_when_nothing_gets_better(tmp_path):
    metric = "eval/held/all/reward/mean"
    tables = {
        "ckpt": {"best": metric, "interval": 2, "keep_last": 1},
        "stop": {"metric": metric, "patience": 2},
    }
    world = World(tmp_path, [0.0], **tables)
    await world.evaluation.before_training()
    links, folder = [], tmp_path / "checkpoints"
    async with world:
        for version, reward in ((2, 0.2), (4, 0.7), (6, 0.5), (8, 0.7)):
            step = folder / f"step_{version}"
            step.mkdir(parents=True)
            (step / "STABLE").touch()
            assert not (tmp_path / "STOP").exists()
            world.environment.rewards[0] = reward
            await world.serve(version)
            await world.serve(version + 1)  # waits for the evaluation
            retain(tmp_path, world.evaluation.context.config.ckpt)
            links.append((os.readlink(folder / "best"), whole_steps(tmp_path)))
    assert links == [
        ("step_2", [2]), ("step_4", [4]), ("step_4", [4, 6]), ("step_4", [4, 8])
    ]  # fmt: skip
    stopped = (tmp_path / "STOP").read_text()
    assert "0.7000 at step 8, no new best in 2 evaluations; best 0.7000 at step 4" in stopped

    resumed = World(tmp_path, [0.6], version=9, **tables)
    await resumed.evaluation.setup()
    assert (folder / "best").readlink() == Path("step_4")  # from evals.jsonl


async def test_the_run_ends_when_the_metric_reaches_its_goal(tmp_path):
    world = World(tmp_path, [0.9], stop={"metric": "eval/held/avg@1", "reach": 0.9})
    await world.evaluation.before_training()
    assert not (tmp_path / "STOP").exists()  # nothing is trained yet
    async with world:
        await world.serve(2)
        await world.serve(3)
    assert "reached 0.9" in (tmp_path / "STOP").read_text()


@pytest.mark.parametrize("name", ["reward", "reward/mean", "pass", "all/reward", "pass@1/mean"])
async def test_a_metric_that_no_evaluation_can_have_is_named_with_close_ones(tmp_path, name):
    world = World(tmp_path, [0.9], stop={"metric": f"eval/held/{name}"})
    with pytest.raises(ConfigError, match=rf"stop.metric = 'eval/held/{name}'.*Close: eval/held/"):
        Evaluation.check(world.evaluation.context.config)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.5])
async def test_every_metric_of_an_evaluation_may_decide(tmp_path, reward):
    world = World(tmp_path, [reward, 1.0], group_size=2)
    await world.evaluation.before_training()
    (found,) = world.evaluation.eval_log.results["before"]
    for name in found.as_metrics().keys() - {"eval/held/policy_version"}:
        Evaluation.check(World(tmp_path / "other", [1.0], stop={"metric": name}).config)


@pytest.mark.parametrize(
    ("metric", "lacking"),
    [
        ("eval/held/pass@1", 0.5),  # a reward that is neither 0 nor 1
        ("eval/held/effective/reward/mean", -1.0),  # every rollout failed
        ("eval/held/all/metrics/m/mean", -1.0),
    ],
)
async def test_an_evaluation_that_lacks_the_metric_decides_nothing(
    tmp_path, caplog, metric, lacking
):
    tables = {"ckpt": {"best": metric, "interval": 2}, "stop": {"metric": metric, "patience": 2}}
    world = World(tmp_path, [lacking], **tables)
    Evaluation.check(world.config)
    await world.evaluation.before_training()
    links, folder = [], tmp_path / "checkpoints"
    async with world:
        for version, reward in ((2, 1.0), (4, lacking), (6, lacking), (8, lacking)):
            world.environment.rewards[0] = reward
            await world.serve(version)
            await world.serve(version + 1)
            links.append(os.readlink(folder / "best"))
            assert json.loads((folder / "best.json").read_text()) == [2, version]
    assert links == ["step_2"] * 4
    assert not (tmp_path / "STOP").exists()
    for key in ("ckpt.best", "stop.metric"):
        said = f"{key} = {metric!r}: the evaluation at step 4 has no such metric"
        assert said in caplog.text

    resumed = World(tmp_path, [1.0], version=9, **tables)
    await resumed.evaluation.setup()
    assert os.readlink(folder / "best") == "step_2"


async def test_a_metric_that_only_some_rollouts_have_is_their_mean(tmp_path):
    world = World(tmp_path, [0.25, 0.5, 0.75])
    world.environment.metrics = [{"m": 6.0}, {}, {"m": 2.0, "n": -1.0}]
    await world.evaluation.before_training()
    (found,) = world.evaluation.eval_log.results["before"]
    assert found.metrics == {"m": 4.0, "n": -1.0}


async def test_an_evaluation_without_a_finished_rollout_is_not_one_of_reward_zero(tmp_path, caplog):
    async with World(tmp_path, [1.0, 1.0], max_hold_seconds=0.001) as world:
        world.environment.gate = asyncio.Event()
        await world.serve(2)
        await world.serve(3)
        assert world.during == []
        assert world.logged == [(2, {"eval/held/cancelled": 2.0})]
    assert "eval held at version 2: no rollout finished" in caplog.text


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            {"stop": {"metric": "eval/other/avg@1"}},
            "stop.metric = 'eval/other/avg@1'.*held with interval 2",
        ),
        ({"ckpt": {"best": "eval/held/avg@1"}}, r"multiple of ckpt.interval \(not set\)"),
        ({"ckpt": {"best": "eval/held/avg@1", "interval": 3}}, "a multiple of ckpt.interval = 3"),
    ],
)
def test_a_metric_without_evaluations_at_the_right_steps_is_refused(tmp_path, tables, said):
    world = World(tmp_path, [0.9], **tables)
    with pytest.raises(ConfigError, match=said):
        Evaluation.check(world.evaluation.context.config)


def test_a_result_that_the_disk_refuses_is_kept_in_memory(tmp_path, monkeypatch, caplog):
    results = EvalLog(tmp_path), EvalResult("held", 1, 0.5, 8, 0)
    results[0].append("during", results[1])
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing():
        results[0].append("during", results[1])
    assert "cannot write" in caplog.text
    results[0].append("during", results[1])
    assert len(results[0].results["during"]) == 3
    assert len(EvalLog(tmp_path).results["during"]) == 2
