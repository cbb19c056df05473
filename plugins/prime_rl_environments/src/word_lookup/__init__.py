# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers environment ``word-lookup``: ask a tool for a word, answer with the word reversed.

    user abc   assistant <tool_call> get(k="abc")   tool abcqwe   assistant ewqcba

The book's word is the key and three random letters (``tasks.book_entry``). So the answer requires
the tool, and the first half of the tool's response is predictable, which a loss on tool responses
can learn. The reward is the positional score of the last reply. Metrics: ``exact``, ``tool_calls``,
``get_total_tool_response_tokens`` (which grpo's ``tokens`` length penalty counts).

The tool is a Python function that the in-process harness calls; the policy writes Qwen3's own tool
calls. With a byte-level tokenizer the template's tools block costs some 600 tokens per prompt; with
``tiny-chat``'s tokenizer it is three.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import PositiveInt

from in_process import InProcessConfig, InProcessHarness
from prime_rl_environments.tasks import LOOKUP_SCHEMA, book_entry
from prime_rl_environments.words import position_score
from prime_rl_environments.wordset import WordsConfig, first


def get(k: str) -> str:
    """The tool: the book's word for a key."""
    return book_entry(str(k))


get.schema = LOOKUP_SCHEMA  # type: ignore[attr-defined]


class WordLookupConfig(WordsConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "word-lookup"``. The words are the keys."""

    min_letters: PositiveInt = 3
    max_letters: PositiveInt = 3


class WordLookupData(vf.TaskData):
    """One example: ``prompt`` is the key."""

    answer: str


class WordLookupTask(vf.Task[WordLookupData]):
    """One look-up, a second if the first fails, and the answer."""

    @vf.stop
    async def turns_are_up(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 3)

    @vf.reward
    async def positions(self, trace: vf.Trace) -> float:
        return position_score(trace.last_reply, self.data.answer)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))

    @vf.metric
    async def get_total_tool_response_tokens(self, trace: vf.Trace) -> float:
        tools = [node for node in trace.nodes if node.message.role == "tool"]
        return float(sum(len(node.token_ids) for node in tools))


class WordLookupTaskset(vf.Taskset[WordLookupTask, WordLookupConfig]):
    """Keys of one split, the same for the same seed."""

    RUNS_IN_PROCESS = True

    def __init__(self, config: WordLookupConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[WordLookupTask]:
        for key in first(self.config.words(), self.config):
            data = WordLookupData(prompt=key, answer=book_entry(key)[::-1])
            yield WordLookupTask(data, self.config.task)


class WordLookupHarnessConfig(InProcessConfig):
    """The in-process harness with the book's tool."""

    tools: list[str] = ["word_lookup:get"]


class WordLookupHarness(InProcessHarness, vf.Harness[WordLookupHarnessConfig]):
    """A chat loop that looks words up."""


__all__ = ["WordLookupHarness", "WordLookupTaskset"]
