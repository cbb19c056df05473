# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers environment ``reversal-duel``: a zero-sum game of two agents.

    white: user abqr     assistant rqba
    black: user abqra    assistant arqba

White reverses a word, black the same word with its first ``handicap`` letters once more at the end.
The better positional score wins: the reward is 1 for the winner, -1 for the other one, and 0 for
both in a draw. White has the shorter word, so its expected reward is above 0 between equals, and a
baseline has to be the role's own. Metrics: ``positions``, ``exact``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import NonNegativeInt

from in_process import InProcessHarness
from prime_rl_environments.reversal import ReversalTask
from prime_rl_environments.wordset import WordsConfig, first


class ReversalDuelConfig(WordsConfig):
    """``args`` of the taskset."""


class ReversalDuelTaskset(vf.Taskset[ReversalTask, ReversalDuelConfig]):
    """Words of one split, the same for the same seed."""

    RUNS_IN_PROCESS = True

    def __init__(self, config: ReversalDuelConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[ReversalTask]:
        task = self.config.task
        return first((ReversalTask.of(word, task) for word in self.config.words()), self.config)


class ReversalDuelEnvConfig(vf.EnvConfig):
    """The two agents, and what black has to do more."""

    white: vf.AgentConfig = vf.AgentConfig()
    black: vf.AgentConfig = vf.AgentConfig()
    handicap: NonNegativeInt = 1
    """Letters that black's word has more."""


class ReversalDuelEnv(vf.Env[ReversalDuelEnvConfig]):
    """One reply of each."""

    async def run(self, task: ReversalTask, agents: Any) -> None:
        word = str(task.data.prompt)
        await agents.white.run(task)
        await agents.black.run(ReversalTask.of(word + word[: self.config.handicap]))

    async def finalize(self, task: ReversalTask, episode: vf.Episode) -> None:
        """Compare the two scores."""
        scores = {trace.agent.name: trace.metrics.get("positions") for trace in episode.traces}
        if None in (scores.get("white"), scores.get("black")):
            return  # one of them has failed, and so has the episode
        lead = scores["white"] - scores["black"]
        won = (lead > 0) - (lead < 0)
        for trace in episode.traces:
            trace.record_reward("won", float(won if trace.agent.name == "white" else -won))


__all__ = ["InProcessHarness", "ReversalDuelEnv", "ReversalDuelTaskset"]
