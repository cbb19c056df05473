"""Whole episodes of every environment with a scripted engine, up to the trainer's samples."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from renderers import Qwen3RendererConfig
from waiting import LIMIT

from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl.env.traces import build_rollout, build_samples
from prime_rl.rollout import ROLES
from prime_rl_environments.tasks import book_entry
from prime_rl_environments.tiny.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
Play = Callable[..., Awaitable[list[RolloutResult]]]


@pytest.fixture
def play(engine: Any, tokenizer_path: Path) -> Play:
    """``await play("env-id", args={...}, ...)``: the results of one episode on the first row."""

    async def episode(env_id: str, seed: int | None = None, **fields: Any) -> list[RolloutResult]:
        settings = EnvSettings(
            default_harness={"id": "in-process"},
            id=env_id,
            renderer=Qwen3RendererConfig(enable_thinking=False),
            tokenizer_path=tokenizer_path,
            timeout=LIMIT,
            **fields,
        )
        async with Environment(settings) as env:
            return await env.run(
                env.examples[0],
                model=ModelEndpoint("scripted", engine.base_url),
                sampling=SamplingSettings(),
                seed=seed,
            )

    return episode


def said(prompt: str) -> list[str]:
    """The messages of user and tool, in order."""
    return re.findall(r"<\|im_start\|>user\n(?!<tool_response>)(.*?)<\|im_end\|>", prompt, re.S)


def texts(result: RolloutResult) -> list[str]:
    """Each sample's text."""
    samples = build_samples(result.branches, 1.0)
    return [TOKENIZER.decode(sample.token_ids, skip_special_tokens=False) for sample in samples]


def trained(result: RolloutResult) -> list[list[str]]:
    """The trained text of each sample, split into replies."""
    columns = [s.token_ids[s.loss_mask] for s in build_samples(result.branches, 1.0)]
    return [
        TOKENIZER.decode(c, skip_special_tokens=False).split("<|im_end|>")[:-1] for c in columns
    ]


# -- reverse-retry --------------------------------------------------------------------------


async def test_a_wrong_try_gets_feedback_and_another_try(engine: Any, play: Play) -> None:
    def script(prompt: str) -> str:
        word, *heard = said(prompt)
        return word[::-1] if heard else "?" + word[::-1][1:]

    engine.script = script
    (result,) = await play("reverse-retry", args={"min_letters": 4, "max_letters": 4})
    word, heard = said(texts(result)[0])
    assert heard == "?" + word[::-1][1:]
    assert (result.reward, result.rewards) == (1.0, {"last_try": 1.0})
    assert result.metrics == {"first_try": 0.75, "exact": 1.0, "tries": 2.0}
    assert trained(result) == [[heard, word[::-1]]]  # one sample: the second try extends the first
    rollout = build_rollout(
        result, env="e", example_id=0, group_id=0, policy_version=0, temperature=1.0
    )
    assert [(turn.role, turn.reward) for turn in rollout.turns] == [
        *(("user", None), ("assistant", 0.75), ("user", None), ("assistant", 1.0))
    ]
    ids = rollout.samples[0].token_ids
    said_in = [TOKENIZER.decode(ids[turn.start : turn.end]) for turn in rollout.turns]
    assert [text.split("\n")[-1] for text in said_in[1::2]] == [
        *(f"{heard}<|im_end|>", f"{word[::-1]}<|im_end|>")
    ]


@pytest.mark.parametrize(("args", "tries"), [({}, 3), ({"tries": 1}, 1), ({"tries": 5}, 5)])
async def test_the_env_limits_the_number_of_tries(
    engine: Any, play: Play, args: dict[str, int], tries: int
) -> None:
    engine.script = lambda prompt: "-"
    (result,) = await play("reverse-retry", args=args)
    assert (result.ok, result.reward, result.metrics["tries"]) == (True, 0.0, tries)


async def test_a_right_first_try_ends_the_conversation(engine: Any, play: Play) -> None:
    engine.script = lambda prompt: said(prompt)[0][::-1]
    (result,) = await play("reverse-retry")
    assert result.metrics == {"first_try": 1.0, "exact": 1.0, "tries": 1.0}


# -- word-lookup ----------------------------------------------------------------------------


def call(key: str) -> str:
    return f'<tool_call>\n{{"name": "get", "arguments": {{"k": "{key}"}}}}\n</tool_call>'


async def test_the_tools_response_is_in_the_rollout_and_its_body_is_marked(
    engine: Any, play: Play
) -> None:
    def script(prompt: str) -> str:
        (key,) = said(prompt)
        return book_entry(key)[::-1] if "<tool_response>" in prompt else call(key)

    engine.script = script
    (result,) = await play("word-lookup")
    (key,) = said(texts(result)[0])
    tokens = result.metrics.pop("get_total_tool_response_tokens")
    assert (result.reward, result.metrics) == (1.0, {"exact": 1.0, "tool_calls": 1.0})
    assert trained(result) == [[call(key), book_entry(key)[::-1]]]
    (sample,) = build_samples(result.branches, 1.0)
    assert sample.roles is not None and sample.is_content is not None
    response = sample.roles == ROLES.index("tool")
    assert response.sum() == tokens
    body = response & sample.is_content
    assert TOKENIZER.decode(sample.token_ids[body]) == book_entry(key)


async def test_without_the_tool_only_the_letters_of_the_key_can_be_right(
    engine: Any, play: Play
) -> None:
    engine.script = lambda prompt: "???" + said(prompt)[0][::-1]
    (result,) = await play("word-lookup")
    assert (result.reward, result.metrics["tool_calls"]) == (0.5, 0.0)


async def test_a_policy_that_only_calls_tools_is_stopped(engine: Any, play: Play) -> None:
    engine.script = lambda prompt: call("abc")
    (result,) = await play("word-lookup")
    assert (result.ok, result.reward, result.stop_condition) == (True, 0.0, "turns_are_up")
    assert len(engine.bodies) == 3


# -- reverse-relay --------------------------------------------------------------------------


def relay(prompt: str) -> str:
    """Main agent: hand each word over, then join the answers. Sub-agent: reverse."""
    task, *summaries = said(prompt)
    words = task.split()
    if len(words) == 1:
        return task[::-1]
    return "@" + words[len(summaries)] if len(summaries) < len(words) else " ".join(summaries)


async def test_the_sub_agent_has_a_separate_context_and_returns_only_its_answer(
    engine: Any, play: Play
) -> None:
    engine.script = relay
    (result,) = await play("reverse-relay")
    main, *subs = texts(result)  # in the order of their first turn
    task, *_ = said(main)
    words = task.split()
    assert said(main) == [task, *(word[::-1] for word in words)]
    assert [said(sub) for sub in subs] == [[word] for word in words]
    assert (result.reward, result.metrics) == (1.0, {"exact": 1.0, "hand_overs": 2.0})
    assert trained(result) == [
        [f"@{words[0]}", f"@{words[1]}", f"{words[0][::-1]} {words[1][::-1]}"],
        [words[0][::-1]],
        [words[1][::-1]],
    ]


async def test_a_main_agent_without_hand_overs_gives_one_sample(engine: Any, play: Play) -> None:
    engine.script = lambda prompt: " ".join(word[::-1] for word in said(prompt)[0].split())
    (result,) = await play("reverse-relay", args={"num_words": 3})
    assert (result.reward, result.metrics["hand_overs"]) == (1.0, 0.0)
    assert len(texts(result)) == 1


async def test_a_hand_over_beyond_the_limit_is_the_answer(engine: Any, play: Play) -> None:
    engine.script = relay
    (result,) = await play("reverse-relay", harness={"id": "reverse-relay", "hand_overs": 1})
    assert (result.ok, result.metrics["hand_overs"]) == (True, 1.0)
    assert result.reward < 1
    assert len(texts(result)) == 2


async def test_the_same_hand_over_twice_is_sampled_twice_and_trained_twice(
    engine: Any, play: Play
) -> None:
    """Equal prompts share a node, but each has its own sampled reply."""
    engine.script = lambda prompt: "@ab" if " " in said(prompt)[0] else "ba"
    (result,) = await play("reverse-relay")
    replies = [reply for sample in trained(result) for reply in sample]
    assert sorted(replies) == ["@ab", "@ab", "@ab", "ba", "ba"]


# -- propose-solve --------------------------------------------------------------------------


async def test_a_proposal_is_solved_several_times_and_both_agents_get_a_reward(
    engine: Any, play: Play
) -> None:
    attempts = iter(["right", "wrong", "right", "right"])

    def script(prompt: str) -> str:
        (task,) = said(prompt)
        if task.startswith("+"):
            return task[1:] + "xyz"
        return task[::-1] if next(attempts) == "right" else task

    engine.script = script
    proposer, *solvers = await play("propose-solve", seed=7)
    assert proposer.agent == "proposer" and {each.agent for each in solvers} == {"solver"}
    assert proposer.metrics == {"valid": 1.0, "letters": 5.0, "solved": 0.75}
    assert (proposer.reward, proposer.rewards) == (0.5, {"difficulty": 0.5})
    assert [solver.metrics["exact"] for solver in solvers] == [1.0, 0.0, 1.0, 1.0]
    assert all(len(texts(each)) == 1 for each in (proposer, *solvers))
    seeds = {body["sampling_params"]["seed"] for body in engine.bodies}
    assert len(seeds) == 5  # each agent of an episode has its own seed


@pytest.mark.parametrize("word", ["zz", "no word", "", "abcdefghijklmnop"])
async def test_an_invalid_proposal_has_reward_0_and_no_attempts(
    engine: Any, play: Play, word: str
) -> None:
    engine.script = lambda prompt: word
    (proposer,) = await play("propose-solve")
    assert (proposer.ok, proposer.reward) == (True, 0.0)
    assert proposer.metrics == {"valid": 0.0, "letters": len(word), "solved": 0.0}


async def test_the_env_sets_the_number_of_attempts(engine: Any, play: Play) -> None:
    engine.script = lambda prompt: said(prompt)[0].lstrip("+") + "a"
    results = await play("propose-solve", args={"attempts": 2})
    assert [each.agent for each in results] == ["proposer", "solver", "solver"]


# -- reversal-duel and reversal-judge -------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "won"), [({4}, 1.0), ({5}, -1.0), ({4, 5}, 0.0), (set(), 0.0)], ids=str
)
async def test_the_better_reply_wins_what_the_other_loses(
    engine: Any, play: Play, right: set[int], won: float
) -> None:
    """``right``: the lengths of the words that are reversed. White has four letters, black five."""

    def script(prompt: str) -> str:
        (word,) = said(prompt)
        return word[::-1] if len(word) in right else "_" * len(word)

    engine.script = script
    white, black = await play("reversal-duel", args={"min_letters": 4, "max_letters": 4})
    assert (white.agent, black.agent) == ("white", "black")
    assert (white.rewards, black.rewards) == ({"won": won}, {"won": -won})
    assert [each.metrics["exact"] for each in (white, black)] == [4 in right, 5 in right]
    word = white.task_fields["prompt"]
    assert black.task_fields["prompt"] == word + word[0]


async def test_the_judges_key_decides_for_the_writer_and_the_truth_for_the_judge(
    engine: Any, play: Play
) -> None:
    replies = iter(["right", "one wrong"])

    def script(prompt: str) -> str:
        answer = said(prompt)[0][::-1]
        return answer if next(replies) == "right" else "_" + answer[1:]

    engine.script = script
    writer, judge = await play("reversal-judge", args={"min_letters": 4, "max_letters": 4})
    assert (writer.agent, judge.agent) == ("writer", "judge")
    # The writer is right, and the key differs from it in one place of four.
    assert (writer.rewards, judge.rewards) == ({"verdict": 0.75}, {"right": 0.75})
    assert (writer.metrics["exact"], judge.metrics["exact"]) == (1.0, 0.0)


# -- every environment ------------------------------------------------------------------------

IDS = (
    *("text-reversal", "reverse-retry", "word-lookup", "reverse-relay", "propose-solve"),
    *("reversal-duel", "reversal-judge"),
)


@pytest.mark.parametrize("env_id", IDS)
def test_rows_are_seeded_and_the_splits_share_no_word(env_id: str) -> None:
    def words(**args: Any) -> list[str]:
        settings = EnvSettings(
            default_harness={"id": "in-process"}, id=env_id, args={"num_examples": 150} | args
        )
        examples = Environment(settings).examples
        prompts = [str(examples[index].task.data.prompt) for index in range(150)]
        return [word for prompt in prompts for word in prompt.lstrip("+").split()]

    train = words()
    assert train == words() != words(seed=1)
    assert not set(words(seed=2)) & set(words(split="held_out"))
    assert (
        Environment(
            EnvSettings(
                default_harness={"id": "in-process"}, id=env_id, args={"num_examples": None}
            )
        ).num_examples
        is None
    )


def test_a_row_of_text_reversal_has_an_experts_reply() -> None:
    data = (
        Environment(EnvSettings(default_harness={"id": "in-process"}, id="text-reversal"))
        .examples[0]
        .task.data
    )
    assert data.demonstration == data.answer == data.prompt[::-1]


def test_swapped_lengths_are_refused_with_the_name_of_the_env() -> None:
    settings = EnvSettings(
        default_harness={"id": "in-process"}, id="word-lookup", args={"min_letters": 9}
    )
    with pytest.raises(Exception, match="word-lookup: min_letters = 9 exceeds max_letters = 3"):
        Environment(settings)
