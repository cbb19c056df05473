"""From engine calls to samples, through verifiers and our pipeline: best-effort interleaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import (
    END,
    Ask,
    Engine,
    Message,
    Plan,
    Studio,
    assert_faithful,
    interleaved,
    samples_of,
)
from interleaving import settings as env_settings
from renderers import DefaultRendererConfig, Qwen3RendererConfig

from prime_rl.env.environment import Environment
from prime_rl_environments.tiny.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
KEEPING = Qwen3RendererConfig(thinking_retention="all")
STRIPPING = Qwen3RendererConfig()
"""Qwen3's own template: what was thought before the last user message is taken out of the
prompt."""


def ids(text: str, stop: bool = True) -> list[int]:
    tokens: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return [*tokens, END] if stop else tokens


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": text}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    runner = await engine.start()
    yield engine
    await runner.cleanup()


@pytest.fixture
def studio(engine: Engine, tmp_path: Path) -> Any:
    """``await studio(renderer, plans, replies)``: the results of one episode."""

    async def play(renderer: Any, plans: list[Plan], replies: list[Any], env_id: str) -> Any:
        async with Environment(env_settings(renderer, tmp_path / "t", env_id)) as env:
            return await Studio(env, engine).play(plans, replies)

    async def with_defaults(renderer: Any, plan: Any, replies: Any, env_id: str = "planned") -> Any:
        plans = plan if isinstance(plan, list) else [plan]
        return await play(renderer, plans, replies, env_id)

    return with_defaults


def trained(samples: Any) -> list[list[str]]:
    """The replies each sample trains."""
    texts = [
        TOKENIZER.decode(sample.token_ids[sample.loss_mask], skip_special_tokens=False)
        for sample in samples
    ]
    return [text.split("<|im_end|>")[:-1] for text in texts]


async def test_five_steps_whose_fourth_breaks_the_prefix_give_two_samples(
    studio: Any, engine: Engine
) -> None:
    """The seeds' example. Tool responses extend; the user's second word has the thoughts before it
    stripped from the prompt."""

    async def plan(ask: Ask) -> None:
        talk = [user("one")]
        for word in (tool("r1"), tool("r2"), user("two"), tool("r3"), None):
            talk.append(await ask(talk))
            talk += [word] if word else []

    thoughts = [f"<think>\nt{n}\n</think>\n\na{n}" for n in range(1, 6)]
    samples = samples_of(await studio(STRIPPING, plan, [ids(text) for text in thoughts]))
    assert trained(samples) == [thoughts[:3], thoughts[3:]]
    assert_faithful(samples, engine.calls)
    assert len(interleaved(engine.calls)) == 2


async def test_with_thoughts_kept_the_same_five_steps_are_one_sample(
    studio: Any, engine: Engine
) -> None:
    async def plan(ask: Ask) -> None:
        talk = [user("one")]
        for word in (tool("r1"), tool("r2"), user("two"), tool("r3"), None):
            talk.append(await ask(talk))
            talk += [word] if word else []

    thoughts = [f"<think>\nt{n}\n</think>\n\na{n}" for n in range(1, 6)]
    samples = samples_of(await studio(KEEPING, plan, [ids(text) for text in thoughts]))
    assert trained(samples) == [thoughts]
    assert_faithful(samples, engine.calls)


async def test_two_interleaved_agents_give_two_samples(studio: Any, engine: Engine) -> None:
    """[a1, a2, b1, a3, b2]."""

    async def plan(ask: Ask) -> None:
        a, b = [user("to a")], [user("to b")]
        for talk in (a, a, b, a, b):
            talk.append(await ask(talk))
            talk.append(user("go on"))

    replies = [ids(text) for text in ("a1", "a2", "b1", "a3", "b2")]
    samples = samples_of(await studio(KEEPING, plan, replies))
    assert trained(samples) == [["a1", "a2", "a3"], ["b1", "b2"]]
    assert_faithful(samples, engine.calls)


async def test_the_longest_prefix_wins(studio: Any, engine: Engine) -> None:
    """The fourth request continues the second; the first and the third are prefixes no longer."""

    async def plan(ask: Ask) -> None:
        talk = [user("x")]
        talk.append(await ask(talk))
        longer = [*talk, user("y")]
        longer.append(await ask(longer))
        await ask([*talk, user("z")])
        await ask([*longer, user("w")])

    replies = [ids(text) for text in ("one", "two", "three", "four")]
    samples = samples_of(await studio(KEEPING, plan, replies))
    assert sorted(trained(samples)) == [["one", "three"], ["two", "four"]]  # "one" is in both, once
    assert_faithful(samples, engine.calls)
    expected = interleaved(engine.calls)
    assert sorted(sample.token_ids.tolist() for sample in samples) == sorted(expected)
    assert len(samples) == 2


async def test_a_request_made_twice_is_two_samples(studio: Any, engine: Engine) -> None:
    async def plan(ask: Ask) -> None:
        await ask([user("x")])
        await ask([user("x")])

    samples = samples_of(await studio(KEEPING, plan, [ids("same"), ids("same")]))
    assert trained(samples) == [["same"], ["same"]]
    assert_faithful(samples, engine.calls)


async def test_a_sub_agent_s_turns_are_a_sample_of_their_own(studio: Any, engine: Engine) -> None:
    """A hand-over: the main agent goes on with the summary; the sub-agent's two turns merge."""

    async def plan(ask: Ask) -> None:
        main = [user("task")]
        main.append(await ask(main))
        sub = [user("part")]
        sub.append(await ask(sub))
        sub.append(user("sure?"))
        summary = await ask(sub)
        await ask([*main, user(str(summary["content"]))])

    replies = [ids(text) for text in ("delegate", "draft", "final", "done")]
    samples = samples_of(await studio(KEEPING, plan, replies))
    assert trained(samples) == [["delegate", "done"], ["draft", "final"]]
    assert_faithful(samples, engine.calls)


# -- what failed does not train ---------------------------------------------------------------


async def test_a_rollout_that_fails_in_its_third_turn_trains_none_of_the_first_two(
    studio: Any, engine: Engine
) -> None:
    async def plan(ask: Ask) -> None:
        talk = [user("x")]
        for _ in range(3):
            talk.append(await ask(talk))
            talk.append(user("more"))

    results = await studio(KEEPING, plan, [ids("a"), ids("b"), 500])
    assert [(each.ok, each.error_type) for each in results] == [(False, "ProviderError")]
    assert len(engine.calls) == 2
    assert samples_of(results) == []
    assert all(each.branches == [] for each in results)


@pytest.mark.parametrize("failing", [0, 1])
async def test_no_sibling_of_a_failed_agent_trains(
    studio: Any, engine: Engine, failing: int
) -> None:
    async def plan(ask: Ask) -> None:
        await ask([user("x")])

    replies: list[Any] = [ids("fine"), ids("fine")]
    replies[failing] = 500
    results = await studio(KEEPING, [plan, plan], replies, "planned_pair")
    assert [each.agent for each in results] == ["first", "second"]
    assert [each.ok for each in results] == [False, False]
    assert len(engine.calls) == 1
    assert all(each.branches == [] for each in results)


async def test_a_plan_that_raises_trains_nothing(studio: Any, engine: Engine) -> None:
    async def plan(ask: Ask) -> None:
        await ask([user("x")])
        raise RuntimeError("the scaffold broke")

    (result,) = await studio(KEEPING, plan, [ids("fine")])
    assert (result.ok, result.branches) == (False, [])
    assert "the scaffold broke" in (result.error or "")


# -- any conversation ---------------------------------------------------------------------------

TEXTS = st.text(alphabet="ab \n<>", max_size=4)
REPLIES = st.builds(
    lambda thought, text, stop: ids(
        (f"<think>\n{thought}\n</think>\n\n" if thought else "") + text, stop
    ),
    st.one_of(st.none(), TEXTS),
    TEXTS,
    st.booleans(),
).filter(bool)


@st.composite
def scripts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Steps of a rollout: each goes on from an earlier one or starts anew, and may rewrite what was
    said."""
    steps = draw(st.integers(1, 6))
    return [
        {
            "parent": draw(st.sampled_from([None, *range(step), *range(step)])),
            "word": draw(st.sampled_from([user, tool]))(draw(TEXTS) + "."),
            "reply": draw(REPLIES),
            "rewrites": draw(st.integers(0, 9)) == 0,
        }
        for step in range(steps)
    ]


def plan_of(script: list[dict[str, Any]]) -> Plan:
    async def plan(ask: Ask) -> None:
        talks: list[list[Message]] = []
        for step in script:
            talk = [user("hi")] if step["parent"] is None else [*talks[step["parent"]]]
            if step["rewrites"]:
                talk[-1] = {**talk[-1], "content": "rewritten"}
            talk.append(step["word"])
            talk.append(await ask(talk))
            talks.append(talk)

    return plan


RENDERERS = {
    "keeping": KEEPING,
    "stripping": STRIPPING,
    "unthinking": Qwen3RendererConfig(enable_thinking=False),
    "rendering anew": DefaultRendererConfig(reasoning_parser="think"),
}


@pytest.fixture(scope="module", params=RENDERERS)
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """``play(script)``: samples and the engine's calls, in one environment for all scripts."""
    folder = tmp_path_factory.mktemp("stage") / "t"
    environment = Environment(env_settings(RENDERERS[request.param], folder))
    engine = Engine()
    with asyncio.Runner() as runner:
        server = runner.run(engine.start())
        runner.run(environment.__aenter__())
        studio = Studio(environment, engine)

        def play(script: list[dict[str, Any]]) -> Any:
            replies = [step["reply"] for step in script]
            results = runner.run(studio.play([plan_of(script)], replies))
            assert all(each.ok for each in results), results[0].error
            return samples_of(results), engine.calls

        yield play
        runner.run(environment.__aexit__())
        runner.run(server.cleanup())


@pytest.mark.slow
@given(script=scripts())
@settings(max_examples=60)
def test_samples_are_exactly_what_the_engine_saw_and_produced(
    stage: Any, script: list[dict[str, Any]]
) -> None:
    samples, calls = stage(script)
    assert len(calls) == len(script)
    assert_faithful(samples, calls)
    streams = [tuple(call.prompt + call.completion) for call in calls]
    if len(set(streams)) < len(streams):
        return  # two conversations of the same tokens: a later turn may extend either of them
    expected = interleaved(calls, [step["parent"] for step in script])
    assert len(samples) == len(expected)
    assert sorted(sample.token_ids.tolist() for sample in samples) == sorted(expected)
