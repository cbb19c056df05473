"""The verifiers adapter: results with exact columns, and every failure as data."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from aiohttp import web
from env_cases import (
    ASSISTANT,
    END,
    FORGOTTEN,
    HOOKS,
    LIMIT,
    MODEL,
    NEWLINE,
    START,
    USER,
    Data,
    EmptyTaskset,
    EndlessTaskset,
    FakeEngine,
    PairEnv,
    Plain,
    PlainTaskset,
    RaisingTaskset,
    RefusingTaskset,
    TalkEnv,
    hooked,
    ids,
    only,
    run_first,
)
from env_cases import engine as engine
from env_cases import settings as settings
from loopback import listening
from pydantic import ValidationError

from prime_rl import ConfigError
from prime_rl.env.environment import Environment, ExampleFailed, Examples, SamplingSettings
from prime_rl.env.episode import ModelEndpoint
from prime_rl.env.traces import node_versions


@pytest.fixture
def harness() -> str:
    return "small-harness"


# -- what comes back -----------------------------------------------------------------------


class VersionedTaskset(vf.Taskset[Plain, vf.TasksetConfig]):
    """Leaves the versions of node 1, as a harness does."""

    def load(self) -> Any:
        class Versioned(Plain):
            async def finalize(self, trace: vf.Trace, runtime: Any) -> None:
                trace.info["weight_versions"] = {"1": [(4, 0, 1), (5, 1, 3)]}

        yield Versioned(Data(prompt="ab", answer="ok"), self.config.task)


async def test_a_rollout_becomes_aligned_columns(settings: Any, engine: FakeEngine) -> None:
    result = await only(settings(VersionedTaskset), engine)
    (branch,) = result.branches
    a, b, o, k = ids("abok")
    assert branch.token_ids == [START, USER, a, b, END, NEWLINE, START, ASSISTANT, o, k, END]
    assert branch.sampled_mask == [False] * 8 + [True] * 3
    assert branch.logprobs == [0.0] * 8 + [-1.0, -2.0, -3.0]
    assert branch.roles == ["user"] * 6 + ["assistant"] * 5
    assert branch.is_content == [False, False, True, True] + [False] * 4 + [True] * 3
    assert branch.node_ids == [0] * 6 + [1] * 5
    assert branch.policy_versions == [-1] * 8 + [4, 5, 5]
    assert branch.trainable


async def test_an_example_with_another_prompt_is_the_same_task(
    settings: Any, engine: FakeEngine
) -> None:
    async with Environment(settings(PlainTaskset)) as env:
        hint = [{"role": "user", "content": "b"}]
        example = env.examples[0].with_prompt(hint)
        asked = {"model": ModelEndpoint(MODEL, engine.url), "sampling": SamplingSettings()}
        (result,) = await env.run(example, **asked)
        assert env.examples[0].with_prompt("ab").task is env.examples[0].task
    (branch,) = result.branches
    assert branch.token_ids[:5] == [START, USER, *ids("b"), END, NEWLINE]
    assert result.task_fields["answer"] == "ok" and result.reward == 2.0
    assert [each["content"] for each in result.task_fields["prompt"]] == ["b"]
    assert env.examples[0].fields["prompt"] == "ab"
    with pytest.raises(ValidationError, match="teapot"):
        example.with_prompt([{"role": "teapot", "content": "b"}])


async def test_rewards_metrics_and_the_rest_of_the_record(
    settings: Any, engine: FakeEngine
) -> None:
    result = await only(settings(PlainTaskset), engine, group_id=7)
    assert (result.ok, result.error, result.error_type, result.group_id) == (True, None, None, 7)
    assert (result.reward, result.rewards) == (2.0, {"right": 1.0})
    assert result.metrics == {"length": 2.0}
    assert (result.num_turns, result.is_truncated) == (1, False)
    assert result.stop_condition == "agent_completed"
    assert (result.agent, result.trainable, result.info) == ("agent", True, {})
    stages = {"setup", "agent", "agent/model", "agent/harness", "finalize", "scoring"}
    assert set(result.timing) == stages
    assert 0 < result.timing["agent/model"] <= result.timing["agent"]
    assert result.trace.nodes[1].message.content == "ok"


async def test_an_engine_that_reports_no_versions_gives_none(
    settings: Any, engine: FakeEngine
) -> None:
    result = await only(settings(PlainTaskset), engine)
    assert result.branches[0].policy_versions is None


async def test_turns_of_a_conversation_stay_one_sequence(settings: Any, engine: FakeEngine) -> None:
    result = await only(settings(PlainTaskset, TalkEnv), engine)
    (branch,) = result.branches
    assert result.num_turns == 2
    assert sorted(set(branch.node_ids)) == [0, 1, 2, 3]
    assert sum(branch.sampled_mask) == 6
    assert engine.bodies[1]["token_ids"] == branch.token_ids[:-3]


async def test_the_salt_arrives_beside_and_the_seed_inside_the_sampling_parameters(
    settings: Any, engine: FakeEngine
) -> None:
    sampling = SamplingSettings(
        temperature=0.7, top_k=5, max_completion_tokens=9, extra_body={"ignore_eos": True}
    )
    async with Environment(settings(PlainTaskset)) as env:
        model = ModelEndpoint(MODEL, engine.url)
        await env.run(env.examples[0], model=model, sampling=sampling, cache_salt="12", seed=34)
        await env.run(env.examples[0], model=model, sampling=SamplingSettings())
    salted, plain = engine.bodies
    assert salted["cache_salt"] == "12"
    assert salted["model"] == MODEL
    assert salted["sampling_params"] == {
        "temperature": 0.7,
        "top_k": 5,
        "max_tokens": 9,
        "seed": 34,
        "ignore_eos": True,
        "stop_token_ids": [END, 0],
        "logprobs": 1,
        "skip_special_tokens": False,
    }
    assert "cache_salt" not in plain
    assert "seed" not in plain["sampling_params"]


async def test_the_key_comes_from_the_environment(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        raise web.HTTPForbidden(text="no")

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    monkeypatch.setenv("ADAPTER_KEY", "s3cret")
    async with listening(app) as url, Environment(settings(PlainTaskset)) as env:
        model = ModelEndpoint(MODEL, f"{url}/v1", api_key_var="ADAPTER_KEY")
        (result,) = await env.run(env.examples[0], model=model, sampling=SamplingSettings())
    assert seen == ["Bearer s3cret"]
    assert "s3cret" not in str(result)


# -- failures are data ----------------------------------------------------------------------


async def test_an_engine_that_is_down(settings: Any) -> None:
    result = await only(settings(PlainTaskset), FakeEngine(url="http://127.0.0.1:9/v1"))
    assert (result.ok, result.error_type, result.branches) == (False, "ProviderError", [])
    assert "Connection error" in (result.error or "")


@pytest.mark.parametrize(
    "reply",
    [
        web.Response(text="<html>"),
        web.json_response({"choices": []}),
        web.json_response({"choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]}),
        web.json_response(
            {"choices": [{"token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1.0}]}}]}
        ),
    ],
    ids=["not JSON", "no choice", "no logprobs", "a logprob too few"],
)
async def test_a_malformed_reply(settings: Any, engine: FakeEngine, reply: web.Response) -> None:
    text = reply.text
    engine.reply = lambda body: web.Response(text=text, content_type="application/json")
    result = await only(settings(PlainTaskset), engine)
    assert (result.ok, result.branches) == (False, [])
    assert result.error_type in ("HarnessError", "ProviderError")
    assert result.error


async def test_the_reason_of_the_engine_is_in_the_result(settings: Any, engine: FakeEngine) -> None:
    reason = {"error": {"message": "unknown token 999"}}
    engine.reply = lambda body: web.json_response(reason, status=400)
    result = await only(settings(PlainTaskset), engine)
    assert (result.ok, result.error_type) == (False, "ProviderError")
    assert "400" in (result.error or "") and "unknown token 999" in (result.error or "")


async def test_a_prompt_longer_than_the_context_never_reaches_the_engine(
    settings: Any, engine: FakeEngine
) -> None:
    result = await only(settings(PlainTaskset, args={"prompt": "x" * LIMIT}), engine)
    assert (result.ok, result.error_type) == (False, "ProviderError")
    assert f"exceeds maximum context length ({LIMIT})" in (result.error or "")
    assert engine.bodies == []


@pytest.mark.parametrize("refusal", ["by its length", "vLLM", "embedded"])
async def test_a_conversation_that_outgrows_the_context_is_truncated_and_scored(
    settings: Any, engine: FakeEngine, refusal: str
) -> None:
    texts = {
        "vLLM": "This model's maximum context length is 128 tokens. However, you requested 130",
        "embedded": "the prompt has 128 tokens and has no room (max_model_len is 128)",
    }

    def reply(body: dict[str, Any]) -> Any:
        if len(engine.bodies) == 1:
            return {"text": "a" * (LIMIT if refusal == "by its length" else 1)}
        return web.json_response({"error": texts[refusal]}, status=400)

    engine.reply = reply
    result = await only(settings(PlainTaskset, TalkEnv), engine)
    assert (result.ok, result.num_turns, result.is_truncated) == (True, 1, True)
    assert result.stop_condition == "max_total_tokens"
    assert result.rewards == {"right": 0.0} and result.metrics["length"] > 0
    assert any(result.branches[0].sampled_mask)
    assert len(engine.bodies) == (1 if refusal == "by its length" else 2)

    engine.bodies.clear()
    result = await only(settings(PlainTaskset, TalkEnv, on_overlong="fail"), engine)
    assert (result.ok, result.error_type) == (False, "ProviderError")


async def test_another_refusal_of_a_later_turn_fails_the_rollout(
    settings: Any, engine: FakeEngine
) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if len(engine.bodies) == 1:
            return {"text": "ok"}
        return web.json_response({"error": "unknown token 999"}, status=400)

    engine.reply = reply
    result = await only(settings(PlainTaskset, TalkEnv), engine)
    assert (result.ok, result.error_type) == (False, "ProviderError")


async def test_a_reward_that_raises(settings: Any, engine: FakeEngine) -> None:
    result = await only(settings(RaisingTaskset), engine)
    assert (result.ok, result.error_type, result.branches) == (False, "TaskError", [])
    assert "the judge is on strike" in (result.error or "")


async def test_a_rollout_that_takes_too_long(settings: Any, engine: FakeEngine) -> None:
    async def sleep() -> dict[str, Any]:
        await asyncio.sleep(30)
        return {"text": "too late"}

    engine.reply = lambda body: sleep()
    result = await only(settings(PlainTaskset, timeout=0.5), engine)
    assert (result.ok, result.error_type, result.branches) == (False, "TimeoutError", [])
    assert "0.5s deadline (timeout in the env's table)" in (result.error or "")


async def test_while_engines_sleep_the_limit_of_a_rollout_is_that_of_their_awake_time(
    settings: Any, engine: FakeEngine
) -> None:
    """verifiers, which would count all time, has none then."""

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    engine.reply = lambda body: never()
    wanted = settings(PlainTaskset, timeout=600.0, engines_sleep=True)
    async with Environment(wanted) as env:
        assert env._env.config.timeout.episode is None
        assert env._env.config.timeout.finalize is None
        asked = {"model": ModelEndpoint(MODEL, engine.url), "sampling": SamplingSettings()}
        limits = []

        @contextlib.asynccontextmanager
        async def limit(seconds: float | None) -> AsyncIterator[None]:
            limits.append(seconds)
            async with asyncio.timeout(0):
                yield

        env.awake.limit = limit  # type: ignore[method-assign]
        (result,) = await env.run(env.examples[0], **asked)
    assert limits == [600.0]
    assert (result.ok, result.error_type, result.branches) == (False, "TimeoutError", [])


async def test_a_rollout_stopped_before_its_first_token(settings: Any, engine: FakeEngine) -> None:
    result = await only(settings(RefusingTaskset), engine)
    assert (result.ok, result.error_type, result.stop_condition) == (False, "NoTokens", "at_once")
    assert "no tokens were sampled" in (result.error or "")


async def test_one_failed_agent_fails_its_episode(settings: Any, engine: FakeEngine) -> None:
    def second_fails(body: dict[str, Any]) -> Any:
        return {"text": "ok"} if len(engine.bodies) == 1 else web.Response(status=500, text="oom")

    engine.reply = second_fails
    asker, solver = await run_first(settings(PlainTaskset, PairEnv), engine)
    assert (asker.agent, asker.ok, asker.branches) == ("asker", False, [])
    assert (solver.agent, solver.ok, solver.error_type) == ("solver", False, "ProviderError")
    assert asker.error == solver.error


async def test_cancelling_is_not_a_failure(settings: Any, engine: FakeEngine) -> None:
    started = asyncio.Event()

    async def hang() -> Any:
        started.set()
        await asyncio.sleep(30)

    engine.reply = lambda body: hang()
    task = asyncio.create_task(only(settings(PlainTaskset), engine))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- what is no Exception costs the rollout, too ------------------------------------------


@pytest.mark.parametrize("stage", ["setup", "finalize", "reward"])
async def test_what_an_env_raises_costs_its_rollout_only(
    settings: Any, engine: FakeEngine, stage: str
) -> None:
    for hook, expected in HOOKS.values():
        result = await only(settings(hooked(stage, hook)), engine)
        assert (result.ok, result.branches) == (False, [])
        assert expected in f"{result.error_type}: {result.error}"
    for task in FORGOTTEN:
        assert task.done() and "SystemExit" in str(task.exception())
    FORGOTTEN.clear()


async def test_an_env_that_swallows_our_cancellation_is_cancelled_all_the_same(
    settings: Any, engine: FakeEngine
) -> None:
    started = asyncio.Event()

    async def stubborn() -> None:
        started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    task = asyncio.create_task(only(settings(hooked("finalize", stubborn)), engine))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_logprob_of_the_engine_that_is_not_finite(
    settings: Any, engine: FakeEngine
) -> None:
    def reply(body: dict[str, Any]) -> Any:
        tokens = [*ids("ok"), END]
        content = [{"token": f"token_id:{token}", "logprob": math.nan} for token in tokens]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": "stop"}
        return web.json_response({"choices": [choice | {"logprobs": {"content": content}}]})

    engine.reply = reply
    result = await only(settings(PlainTaskset), engine)
    assert (result.ok, result.branches) == (False, [])
    assert "finite" in (result.error or "")


async def test_a_token_of_the_engine_that_the_model_does_not_have(
    settings: Any, engine: FakeEngine, tmp_path: Path
) -> None:
    made = settings(PlainTaskset)
    assert made.tokenizer_path is not None
    folder = shutil.copytree(made.tokenizer_path, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": max(ids("ok"))}))
    result = await only(replace(made, tokenizer_path=folder), engine)
    assert (result.ok, result.error_type) == (False, "BadResult")
    assert f"expected 0 to {max(ids('ok')) - 1}" in (result.error or "")


# -- environments with settings of their own ----------------------------------------------


async def test_every_seat_of_an_env_runs_here_and_keeps_whether_it_trains(
    settings: Any, engine: FakeEngine
) -> None:
    results = await run_first(settings(PlainTaskset, PairEnv, args={"rounds": 2}), engine)
    assert [result.agent for result in results] == ["asker", "asker", "solver"]
    assert [result.trainable for result in results] == [False, False, True]
    assert all(result.ok for result in results)
    assert results[2].trace.agent.config.max_turns == 7  # its author's setting stays


async def test_max_turns_bounds_the_conversation(settings: Any, engine: FakeEngine) -> None:
    result = await only(settings(PlainTaskset, TalkEnv, max_turns=1), engine)
    assert (result.ok, result.num_turns, result.is_truncated) == (True, 1, True)


def test_an_env_that_is_not_installed_is_named(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"env 'mine': .*taskset 'no-such-env' not found"):
        Environment(settings(PlainTaskset, id="no-such-env", name="mine"))


def test_an_unknown_setting_is_named(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"env 'adapter-env': .*promt"):
        Environment(settings(PlainTaskset, args={"promt": "ab"}))


def test_a_harness_that_is_not_installed_is_named(settings: Any) -> None:
    with pytest.raises(ConfigError, match=r"no-such-harness"):
        Environment(settings(PlainTaskset, harness={"id": "no-such-harness"}))


def test_an_empty_env_is_refused(settings: Any) -> None:
    with pytest.raises(ConfigError, match="no examples"):
        Environment(settings(EmptyTaskset))


def test_tool_servers_need_a_harness_that_can_call_them(settings: Any) -> None:
    class Tools(vf.Toolset[vf.ToolsetConfig]):
        """Never started."""

    class ToolTask(vf.Task[Data]):
        @classmethod
        def toolsets(cls, config: Any) -> list[Any]:
            return [Tools(vf.ToolsetConfig())]

    class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
        def load(self) -> Any:
            yield ToolTask(Data(prompt="ab"), self.config.task)

    with pytest.raises(ConfigError, match="tools over MCP, which harness 'small-harness' cannot"):
        Environment(settings(ToolTaskset))


# -- examples ---------------------------------------------------------------------------------


class StumblingTaskset(vf.Taskset[Plain, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Any:
        for number in range(4):
            if number == 3:
                raise ZeroDivisionError("no third row")
            yield Plain(Data(prompt=str(number)), self.config.task)


class EndingTaskset(StumblingTaskset):
    def load(self) -> Any:
        yield Plain(Data(prompt="0"), self.config.task)


def test_an_example_that_the_env_cannot_make_is_named_and_the_others_are_there(
    settings: Any,
) -> None:
    examples = Environment(settings(StumblingTaskset)).examples
    for _ in range(2):
        with pytest.raises(ExampleFailed, match="example 3: ZeroDivisionError: no third row"):
            examples[3]
        assert examples[2].fields["prompt"] == "2"
    with pytest.raises(ExampleFailed, match="ended before example 1, and it declares"):
        Environment(settings(EndingTaskset)).examples[1]


def test_a_finite_env_is_a_sequence(settings: Any) -> None:
    env = Environment(settings(PlainTaskset))
    assert (len(env.examples), env.num_examples) == (2, 2)
    assert [env.examples[i].task.data.answer for i in (1, 0)] == ["no", "ok"]
    assert env.examples[1].id == 1
    with pytest.raises(IndexError, match="example 2 of 2"):
        env.examples[2]


def test_an_endless_env_is_read_on_demand(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Examples, "KEPT", 3)
    env = Environment(settings(EndlessTaskset))
    assert env.num_examples is None
    with pytest.raises(TypeError, match="without end"):
        len(env.examples)
    for index in (0, 5, 6, 5, 1, 7):  # 1 was let go by then, and is generated again
        assert env.examples[index].task.data.prompt == str(index)
        assert len(env.examples._tasks) <= 3


@pytest.mark.parametrize(
    ("mask", "spans", "column"),
    [
        ([False, True, True], [(3, 0, 2)], [-1, 3, 3]),
        ([False, True, True], [(3, 0, 1), (4, 1, 2)], [-1, 3, 4]),
        ([True, True], [(3, 0, 1)], [3, -1]),
        ([True], [(3, 0, 5)], [3]),  # more than there is
        ([False, False], [], [-1, -1]),
    ],
)
def test_version_spans_count_sampled_tokens(
    mask: list[bool], spans: list[tuple[int, int, int]], column: list[int]
) -> None:
    assert node_versions(mask, spans) == column


async def test_a_folder_without_a_tokenizer_is_named(settings: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer '.*' cannot be loaded: FileNotFoundError"):
        await Environment(settings(PlainTaskset, tokenizer_path=tmp_path)).__aenter__()


def test_importing_the_adapter_does_not_import_verifiers() -> None:
    code = "import sys, prime_rl.env.environment; print('verifiers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout.strip().lower()) is False
