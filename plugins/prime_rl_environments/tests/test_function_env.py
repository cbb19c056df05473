"""The taskset ``function``: whole episodes with a scripted engine, and group rewards."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import new_class
from typing import Any

import numpy as np
import pytest
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig
from waiting import LIMIT

import prime_rl
from function import travel
from function.env_hooks import GroupReward
from function.groups import GroupRewards, _terms
from function.load import load_functions
from function.rewards import reward_functions
from prime_rl import ConfigError, Rollout, Sample
from prime_rl.config.orchestrator import EnvConfig
from prime_rl.env import loading
from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl.env.loading import check_taskset
from prime_rl.env.traces import build_rollout
from prime_rl.testing import logged_metrics

ROWS = [
    {"prompt": "2+3?", "answer": "5", "id": 7, "name": None, "image": "x.png"},
    {"prompt": "1+1?", "answer": "2", "id": 8, "name": "b", "image": "y.png"},
]
Play = Callable[..., Awaitable[RolloutResult]]


@pytest.fixture
def play(engine: Any, tokenizer_path: Path, tmp_path: Path) -> Play:
    """``await play(reward)``: the result of one episode on a row, by ``prime_rl.function_env``."""

    async def episode(reward: Any, rows: Any = ROWS, row: int = 0, **options: Any) -> RolloutResult:
        table = prime_rl.function_env(rows, reward, output_dir=tmp_path, **options)
        env_config = EnvConfig.model_validate(table)
        settings = EnvSettings.of(
            env_config,
            default_harness={"id": "in-process"},
            renderer=Qwen3RendererConfig(enable_thinking=False),
            tokenizer_path=tokenizer_path,
        )
        async with Environment(settings) as env:
            (result,) = await env.run(
                env.examples[row],
                model=ModelEndpoint("scripted", engine.base_url, timeout=LIMIT),
                sampling=SamplingSettings(),
            )
        return result

    return episode


async def test_a_reward_gets_reply_row_conversation_and_tokens(engine: Any, play: Play) -> None:
    engine.script = lambda prompt: "it is 5"

    def seen(reply, prompt, messages, completion_ids, answer, id, name, image):
        assert (reply, prompt, answer) == ("it is 5", "2+3?", "5")
        assert (id, name, image) == (7, None, "x.png")
        assert [(m["role"], m["content"]) for m in messages] == [
            *(("system", "Add."), ("user", "2+3?"), ("assistant", "it is 5"))
        ]
        return {"right": float(answer in reply), "tokens": len(completion_ids)}

    result = await play(seen, system_prompt="Add.", weights={"right": 2.0, "tokens": -0.1})
    assert result.error is None
    assert result.rewards == {"right": 1.0, "tokens": 8.0}  # seven bytes and the end of the turn
    assert result.reward == pytest.approx(2.0 - 0.8)


async def test_several_functions_sync_and_async_add_up(engine: Any, play: Play) -> None:
    engine.script = lambda prompt: "5"

    async def exact(reply: str, answer: str) -> bool:
        return reply == answer

    def short(reply: str) -> Any:
        return np.float32(0.5)

    result = await play([exact, short])
    assert (result.rewards, result.reward) == ({"exact": 1.0, "short": 0.5}, 1.5)


async def test_a_rollout_tells_prompt_reply_and_messages(engine: Any, play: Play) -> None:
    engine.script = lambda prompt: "two"
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    result = await play(lambda reply: 1, [{"prompt": messages}])
    rollout = build_rollout(
        result, env="e", example_id=0, group_id=0, policy_version=0, temperature=1.0
    )
    rollout.task = result.task_fields
    assert rollout.reply == "two"
    assert rollout.messages == [*messages, {"role": "assistant", "content": "two"}]
    assert [each["content"] for each in rollout.prompt] == ["Add.", "1+1?"]


class Textless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class NoException(BaseException):
    """As the panic of a library in Rust."""


ERRORS = {
    SystemExit(0): "SystemExit: 0",
    SystemExit("bye"): "SystemExit: bye",
    KeyboardInterrupt(): "KeyboardInterrupt",
    asyncio.CancelledError(): "CancelledError",
    NoException("a"): "NoException: a",
    Textless(): r"Textless: \(its text cannot be made: ZeroDivisionError\)",
}


def raising(error: BaseException, parameter: str) -> list[Callable[..., Any]]:
    """A function of ``reply`` or ``replies`` that raises: sync, async, and in a task of its own."""

    async def judge() -> float:
        raise error

    def one(reply: str) -> float:
        raise error

    async def one_later(reply: str) -> float:
        raise error

    async def one_in_a_task(reply: str) -> float:
        return await asyncio.create_task(judge())

    def group(replies: list[str]) -> float:
        raise error

    async def group_later(replies: list[str]) -> float:
        raise error

    async def group_in_a_task(replies: list[str]) -> float:
        return await asyncio.create_task(judge())

    of_one = [one, one_later, one_in_a_task]
    return of_one if parameter == "reply" else [group, group_later, group_in_a_task]


def raises(reply: str, answer: str) -> float:
    return float({"5": 1.0}[answer])


@pytest.mark.parametrize(
    ("reward", "row", "message"),
    [
        (
            raises,
            1,
            r"row 2: reward raises raised KeyError: '2' \(line \d+ of the script or cell\)",
        ),
        (lambda reply: math.nan, 0, "row 1: reward returned nan; expected a finite number"),
        (lambda reply: None, 0, "row 1: reward returned NoneType None; expected a number"),
        (lambda reply: [1.0], 1, "row 2: reward returned list .* names 'replies'"),
        ([lambda reply: {"a": 1}, lambda reply: {"a": 2}], 0, "two rewards have a term 'a'"),
    ],
)
async def test_a_wrong_reward_fails_its_rollout_and_names_row_and_function(
    engine: Any, play: Play, reward: Any, row: int, message: str
) -> None:
    engine.script = lambda prompt: "5"
    result = await play(reward, row=row)
    assert not result.ok and result.error is not None
    assert re.search(message, result.error), result.error


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("error", ERRORS)
async def test_a_reward_may_raise_anything_and_is_named(
    engine: Any, play: Play, error: BaseException, place: int
) -> None:
    engine.script = lambda prompt: "5"
    reward = raising(error, "reply")[place]
    result = await play(reward)
    expected = rf"row 1: reward {reward.__name__} raised {ERRORS[error]} ?\(line \d+ of the script"
    assert re.search(expected, str(result.error)), result.error


async def test_a_weight_of_a_term_that_nothing_returns_fails_the_rollout(play: Play) -> None:
    result = await play(lambda reply: {"a": 1}, weights={"b": 1.0})
    assert not result.ok and "weights names 'b', which no reward returned" in str(result.error)


# -- group rewards -------------------------------------------------------------------------------


def rollouts(env_table: dict[str, Any], replies: list[str], row: int = 0) -> list[Rollout]:
    env = Environment(
        EnvSettings(id="function", args=env_table["args"], default_harness={"id": "in-process"})
    )
    task = env.examples[row].fields
    return [
        Rollout(
            env="e",
            example_id=row,
            group_id=3,
            reward=0.5,
            rewards={"own": 0.5},
            samples=[Sample(token_ids=[1, 2], loss_mask=[0, 1], inference_logprobs=[0, -1])],
            messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": reply}],
            task=dict(task),
        )
        for reply in replies
    ]


async def score_group(group: list[Rollout]) -> None:
    """As in the scope of the env."""
    await GroupReward().score_group(group)


def relative(replies: list[str], answer: str, completion_ids: list[list[int]]) -> list[float]:
    assert answer == "5" and completion_ids == [[2]] * len(replies)
    longest = max(len(reply) for reply in replies)
    return [len(reply) / longest for reply in replies]


async def later(replies: list[str]) -> list[dict[str, float]]:
    return [{"first": float(place == 0)} for place in range(len(replies))]


async def test_a_group_reward_is_added_before_the_algorithm_compares(tmp_path: Path) -> None:
    weights = {"relative": 2.0, "first": 1.0, "own": 1.0}
    own = lambda reply: {"own": 0.5}  # noqa: E731
    table = prime_rl.function_env(
        ROWS, [own, relative, later], weights=weights, output_dir=tmp_path
    )
    group = rollouts(table, ["ab", "a"])
    with logged_metrics():
        await score_group(group)
    assert [each.rewards for each in group] == [
        {"own": 0.5, "relative": 1.0, "first": 1.0},
        {"own": 0.5, "relative": 0.5, "first": 0.0},
    ]
    assert [each.reward for each in group] == [3.5, 1.5]


async def test_a_saved_group_is_scored_again_without_its_functions(tmp_path: Path) -> None:
    from function import groups

    table = prime_rl.function_env(ROWS, relative, output_dir=tmp_path)
    group = rollouts(table, ["ab", "a"])
    with logged_metrics():
        await score_group(group)
    for rollout in group:
        rollout.reward = 0.5  # as core restores it
    groups._REGISTERED.clear()
    await score_group(group)
    assert [each.reward for each in group] == [1.5, 1.0]


@pytest.mark.parametrize(
    "reward",
    [
        lambda replies: [1.0],
        lambda replies: 1.0,
        lambda replies: [math.nan] * len(replies),
        lambda replies: 1 / 0,
    ],
)
async def test_a_group_whose_reward_fails_does_not_train(
    tmp_path: Path, reward: Any, caplog: pytest.LogCaptureFixture
) -> None:
    group = rollouts(prime_rl.function_env(ROWS, reward, output_dir=tmp_path), ["ab", "a"], row=1)
    with logged_metrics():
        await score_group(group)
    assert "group 3 (row 2): it will not train: reward" in caplog.text
    for rollout in group:
        weights = rollout.samples[0].rl_weights
        assert rollout.reward == 0.0 and weights is not None and weights.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("error", ERRORS)
async def test_a_group_reward_may_raise_anything_and_its_group_does_not_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException, place: int
) -> None:
    reward = raising(error, "replies")[place]
    group = rollouts(prime_rl.function_env(ROWS, reward, output_dir=tmp_path), ["ab", "a"])
    with logged_metrics() as logged:
        await score_group(group)
    said = rf"it will not train: reward {reward.__name__} raised {ERRORS[error]} ?\(line \d+ of"
    assert re.search(said, caplog.text), caplog.text
    assert [each.reward for each in group] == [0.0, 0.0]
    assert logged == {"plugin/test/group_reward_failed": 1.0}


@pytest.mark.parametrize("place", [0, 1])
async def test_a_group_reward_that_waits_can_be_cancelled(tmp_path: Path, place: int) -> None:
    started = threading.Event()
    released = threading.Event()

    def waits(replies: list[str]) -> list[float]:
        started.set()
        released.wait()
        return [0.0] * len(replies)

    async def waits_later(replies: list[str]) -> list[float]:
        started.set()
        await asyncio.Event().wait()
        return []

    functions = reward_functions([waits, waits_later])
    rewards = GroupRewards([functions[place]], {}, ROWS)
    group = rollouts(prime_rl.function_env(ROWS, relative, output_dir=tmp_path), ["ab", "a"])
    task = asyncio.create_task(_terms(rewards, group))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()


@pytest.mark.parametrize(
    ("rewards", "num_hooks"),
    [(relative, 1), ([later], 1), (lambda reply: 1.0, 0), ([lambda reply: 1.0, relative], 1)],
)
def test_only_an_env_with_a_group_reward_has_a_hook_for_groups(
    tmp_path: Path, rewards: Any, num_hooks: int
) -> None:
    table = prime_rl.function_env(ROWS, rewards, output_dir=tmp_path)
    assert len(loading.env_hooks(table["id"], table["args"])) == num_hooks


@pytest.mark.parametrize("env_id", ["reverse-text", "word-lookup", "gsm8k-v1", "no-such-env"])
def test_other_envs_bring_no_hooks(env_id: str) -> None:
    assert loading.env_hooks(env_id, {}) == []


def test_saved_rollouts_are_scored_again_without_the_functions() -> None:
    (hooks,) = loading.env_hooks("function", None)
    assert isinstance(hooks, GroupReward)


async def test_other_envs_groups_are_left_alone() -> None:
    sample = Sample(token_ids=[1], loss_mask=[1], inference_logprobs=[-1])
    rollout = Rollout(env="e", example_id=0, group_id=0, reward=0.5, samples=[sample])
    await score_group([rollout])
    assert rollout.reward == 0.5


# -- refused before the start --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"reward": "my_rewards.exact"}, None),
        ({"reward": ["my_rewards.exact", "my_rewards:short"]}, None),
        ({"reward": "my_rewards.py:exact"}, None),
        ({"reward": "my_rewards.py:exactt"}, "has no 'exactt', .*. Did you mean 'exact'"),
        ({"reward": "gone.py:exact"}, "there is no file gone.py"),
        (
            {"reward": "broken.py:exact"},
            r"importing broken.py failed: ZeroDivisionError: division by zero \(line 1 of .*Fix it",
        ),
        ({"reward": "my_rewards.exactt"}, "'my_rewards' has no 'exactt', .*. Did you mean 'exact'"),
        ({"reward": "my_rewardz.exact"}, "there is no module 'my_rewardz', neither installed nor"),
        ({"reward": "exact"}, "expected 'module.function'"),
        ({"reward": "my_rewards.wrong"}, "'anser' is no column of the data.*Did you mean 'answer'"),
        ({}, "set the import path of a reward function"),
        ({"reward": "my_rewards.exact", "prompt_column": "q"}, "row 1 has no column 'q'"),
        ({"reward": "my_rewards.exact", "data": "gone.jsonl"}, "gone.jsonl does not exist"),
        ({"reward": "my_rewards.exact", "system_prompt": "Be brief."}, "the key 'system'"),
        (
            {"reward": "broken.exact"},
            r"importing it failed: ZeroDivisionError: division by zero \(line 1 of .*Fix it",
        ),
    ],
)
def test_the_args_of_a_toml_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "my_rewards.py").write_text(
        "def exact(reply, answer): return float(reply == answer)\n"
        "def short(reply): return 1\n"
        "def wrong(reply, anser): return 1\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0")
    load_functions.cache_clear()
    monkeypatch.delitem(__import__("sys").modules, "my_rewards", raising=False)
    table = {"data": "questions.jsonl", **args}
    if message is None:
        check_taskset("function", "env.0.id", table)
        return
    with pytest.raises(ConfigError, match=f"(?s)env.0.args: .*{message}"):
        check_taskset("function", "env.0.id", table)


# -- functions that travel -----------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "some.functions"
    path.write_bytes(travel.packed([lambda reply: 0.25]))
    return path


def test_functions_travel_with_the_key_only(sealed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (function,) = travel.unpacked(sealed)
    assert function("x") == 0.25
    monkeypatch.setenv(travel.KEY, "another")
    with pytest.raises(ConfigError, match="were not sealed with the key of this run"):
        travel.unpacked(sealed)
    monkeypatch.delenv(travel.KEY)
    with pytest.raises(ConfigError, match=r"the key that they were sealed with .* has ended"):
        travel.unpacked(sealed)


def test_a_changed_file_is_refused_unread(sealed: Path) -> None:
    data = sealed.read_bytes()
    for changed in (data[:-1], data + b"x", data[:40] + b"?" + data[41:], b"", data[32:]):
        sealed.write_bytes(changed)
        with pytest.raises(ConfigError, match="they are not read"):
            travel.unpacked(sealed)


def test_a_function_that_cannot_travel_is_named() -> None:
    import threading

    lock = threading.Lock()

    def guarded(reply: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"reward\[1\] \(guarded\): it cannot travel.*lock"):
        travel.packed([lambda reply: 1, guarded])


def test_a_module_beside_the_script_travels_with_the_function(tmp_path: Path) -> None:
    """A fresh process, without the script's folder, loads a function of such a module."""
    import os
    import subprocess
    import sys

    (tmp_path / "helper_beside.py").write_text("BONUS = 0.5\ndef right(a, b): return a == b\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib\n"
        "import helper_beside\n"
        "from function import travel\n"
        "def exact(a, b): return helper_beside.right(a, b) + helper_beside.BONUS\n"
        "pathlib.Path(sys.argv[1]).write_bytes(travel.packed([exact, helper_beside.right]))\n"
    )
    reader = (
        "import sys, pathlib; from function import travel\n"
        "exact, right = travel.unpacked(pathlib.Path(sys.argv[1]))\n"
        "assert exact('5', '5') == 1.5 and right(1, 1), exact('5', '5')\n"
    )
    file = str(tmp_path / "f.functions")
    env = os.environ | {travel.KEY: "k"}
    subprocess.run([sys.executable, str(script), file], check=True, env=env)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-c", reader, file], check=True, env=env, cwd=elsewhere)


# -- names that shadow verifiers' own ------------------------------------------------------------


class ShadowData(vf.TaskData):
    answer: str = ""


@pytest.mark.parametrize("name", ["score", "setup", "finalize", "hooks"])
def test_a_reward_with_a_name_of_the_base_class_is_refused(
    taskset_module: Callable[..., None], name: str
) -> None:
    async def reward(self: Any, trace: vf.Trace) -> float:
        return 1.0

    reward.__name__ = name
    body = {name: vf.reward(reward)}
    task: Any = new_class(
        "ShadowTask", (vf.Task[ShadowData],), exec_body=lambda ns: ns.update(body)
    )

    class ShadowTaskset(vf.Taskset[task, vf.TasksetConfig]):  # type: ignore[valid-type]
        def load(self) -> Any:
            yield task(ShadowData(prompt="a"))

    taskset_module("shadow_env", ShadowTaskset)
    settings = EnvSettings(id="shadow-env", default_harness={"id": "in-process"})
    with pytest.raises(ConfigError, match=rf"ShadowTask.{name} is a @vf.reward, and replaces"):
        Environment(settings)


async def test_terms_in_float32_add_up_as_if_they_were_exact(tmp_path: Path) -> None:
    def single(values: list[float], name: str) -> list[dict[str, float]]:
        return [{name: float(np.float32(value))} for value in values]

    def first(replies: list[str]) -> list[dict[str, float]]:
        return single([0.1, 0.3], "first")

    def second(replies: list[str]) -> list[dict[str, float]]:
        return single([0.2, 0.0], "second")

    table = prime_rl.function_env(ROWS, [first, second], output_dir=tmp_path)
    group = rollouts(table, ["ab", "a"])
    for rollout in group:
        rollout.reward = 0.0
    with logged_metrics():
        await score_group(group)
    assert [each.reward for each in group] == [0.3, 0.3]
