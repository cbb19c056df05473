# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers environment ``reversal-judge``: a writer, and a judge that is trained too.

    writer: user abqr   assistant rqba
    judge:  user abqr   assistant rqab      its key

The writer reverses a word, and the judge writes what it takes for the right answer. The writer's
reward is ``verdict``, the positional score of its reply by the judge's key: a writer is as good as
its judge. The judge's reward is ``right``, the score of its key by the truth, which only the judge
is measured by. Metrics: ``positions`` and ``exact`` of each by the truth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from in_process import InProcessHarness
from prime_rl_environments.reversal import ReversalTask
from prime_rl_environments.words import position_score
from prime_rl_environments.wordset import WordsConfig, first


class ReversalJudgeConfig(WordsConfig):
    """``args`` of the taskset."""


class ReversalJudgeTaskset(vf.Taskset[ReversalTask, ReversalJudgeConfig]):
    """Words of one split, the same for the same seed."""

    RUNS_IN_PROCESS = True

    def __init__(self, config: ReversalJudgeConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[ReversalTask]:
        task = self.config.task
        return first((ReversalTask.of(word, task) for word in self.config.words()), self.config)


class ReversalJudgeEnvConfig(vf.EnvConfig):
    """The two agents."""

    writer: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class ReversalJudgeEnv(vf.Env[ReversalJudgeEnvConfig]):
    """One reply, one key."""

    async def run(self, task: ReversalTask, agents: Any) -> None:
        await agents.writer.run(task)
        await agents.judge.run(task)

    async def finalize(self, task: ReversalTask, episode: vf.Episode) -> None:
        """The judge's key decides for the writer, the truth for the judge."""
        by_name = {trace.agent.name: trace for trace in episode.traces}
        writer = by_name.get("writer")
        judge = by_name.get("judge")
        if writer is None or judge is None:
            return  # one of them has failed, and so has the episode
        writer.record_reward("verdict", position_score(writer.last_reply, judge.last_reply))
        judge.record_reward("right", position_score(judge.last_reply, task.data.answer))


__all__ = ["InProcessHarness", "ReversalJudgeEnv", "ReversalJudgeTaskset"]
