# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers environment ``reverse-retry``: reverse a word, get feedback, try again.

    user hello   assistant olxeh   user ol?eh   assistant olleh

The environment is the user. After a wrong try it repeats the answer with ``?`` for every letter
that the try got wrong (``tasks.feedback``), up to ``tries`` tries. The reward is the positional
score of the last try; that of each try is the reward of its turn. Metrics: ``exact``, ``first_try``
(its score), ``tries``. The policy can learn to keep the confirmed letters and change the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import PositiveInt

from in_process import InProcessHarness
from prime_rl_environments.tasks import feedback
from prime_rl_environments.words import position_score
from prime_rl_environments.wordset import WordsConfig, first


class ReverseRetryConfig(WordsConfig):
    """``args`` of the taskset."""


class ReverseRetryData(vf.TaskData):
    """One example: ``prompt`` is the word."""

    answer: str


class ReverseRetryTask(vf.Task[ReverseRetryData]):
    """Scores the tries of one conversation."""

    @vf.reward
    async def last_try(self, trace: vf.Trace) -> float:
        tries = [str(message.content or "").strip() for message in trace.assistant_messages]
        trace.info["turn_rewards"] = [position_score(word, self.data.answer) for word in tries]
        return position_score(trace.last_reply, self.data.answer)

    @vf.metric
    async def first_try(self, trace: vf.Trace) -> float:
        replies = trace.assistant_messages
        return position_score(str(replies[0].content or ""), self.data.answer) if replies else 0.0

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def tries(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class ReverseRetryTaskset(vf.Taskset[ReverseRetryTask, ReverseRetryConfig]):
    """Words of one split, the same for the same seed."""

    RUNS_IN_PROCESS = True

    def __init__(self, config: ReverseRetryConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[ReverseRetryTask]:
        for word in first(self.config.words(), self.config):
            data = ReverseRetryData(prompt=word, answer=word[::-1])
            yield ReverseRetryTask(data, self.config.task)


class ReverseRetryEnvConfig(vf.SingleAgentEnvConfig):
    """The agent, and the number of its tries."""

    tries: PositiveInt = 3


class ReverseRetryEnv(vf.SingleAgentEnv, vf.Env[ReverseRetryEnvConfig]):
    """Plays the user."""

    async def run(self, task: ReverseRetryTask, agents: Any) -> None:
        answer = task.data.answer
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(1, self.config.tries):
                if segment.terminated or segment.last_reply == answer:
                    break
                segment = await talk.turn(feedback(segment.last_reply, answer))


__all__ = ["InProcessHarness", "ReverseRetryEnv", "ReverseRetryTaskset"]
