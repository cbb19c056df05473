# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers environment ``propose-solve``: one agent writes a word, another reverses it.

    proposer: user +ab   assistant abqrst
    solver:   user abqrst   assistant tsrqba      (``attempts`` of them)

The prompt has the first letters of the word to propose. The solver gets a valid proposal
(``tasks.is_proposal``) ``attempts`` times, each a separate trace in the same episode. The solver's
reward is the positional score of its reply, as in ``text-reversal``. The proposer's reward is 1 if
half the attempts are exactly right, 0 if all or none are, and 0 for an invalid proposal, which the
solver does not get. Metrics: ``valid``, ``letters`` of the proposal, ``solved`` (share of exact
attempts); the solver's are those of ``text-reversal``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import PositiveInt

from in_process import InProcessHarness
from prime_rl_environments.tasks import PROPOSE, difficulty_score, is_proposal
from prime_rl_environments.wordset import WordsConfig, first
from text_reversal import TextReversalTask


class ProposeSolveConfig(WordsConfig):
    """``args`` of the taskset. The words are the stems that proposals must begin with."""

    min_letters: PositiveInt = 2
    max_letters: PositiveInt = 2
    shortest: PositiveInt = 3
    """Fewest letters of a proposal."""
    longest: PositiveInt = 12
    """Most letters of a proposal."""


class ProposeSolveData(vf.TaskData):
    """One example: ``prompt`` is ``+`` and the stem."""

    stem: str
    shortest: int
    longest: int


class ProposeSolveTask(vf.Task[ProposeSolveData]):
    """The proposer's task. ``ProposeSolveEnv.finalize`` sets its reward after the attempts."""

    @vf.stop
    async def proposed(self, trace: vf.Trace) -> bool:
        return bool(trace.num_turns >= 1)

    @vf.metric
    async def valid(self, trace: vf.Trace) -> float:
        return float(self.accepts(trace.last_reply))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    def accepts(self, word: str) -> bool:
        return is_proposal(
            word, self.data.stem, min_letters=self.data.shortest, max_letters=self.data.longest
        )


class ProposeSolveTaskset(vf.Taskset[ProposeSolveTask, ProposeSolveConfig]):
    """Stems of one split, the same for the same seed."""

    RUNS_IN_PROCESS = True

    def __init__(self, config: ProposeSolveConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[ProposeSolveTask]:
        config = self.config
        for stem in first(config.words(), config):
            rules = {"stem": stem, "shortest": config.shortest, "longest": config.longest}
            yield ProposeSolveTask(ProposeSolveData(prompt=PROPOSE + stem, **rules), config.task)


class ProposeSolveEnvConfig(vf.EnvConfig):
    """The two agents, and the number of attempts of the solver."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    attempts: PositiveInt = 4


class ProposeSolveEnv(vf.Env[ProposeSolveEnvConfig]):
    """One proposal, ``attempts`` solutions."""

    async def run(self, task: ProposeSolveTask, agents: Any) -> None:
        proposal = await agents.proposer.run(task)
        word = proposal.last_reply
        if not proposal.ok or not task.accepts(word):
            return
        for _ in range(self.config.attempts):
            await agents.solver.run(TextReversalTask.of(word))

    async def finalize(self, task: ProposeSolveTask, episode: vf.Episode) -> None:
        """Set the proposer's reward from the attempts."""
        proposal, *attempts = episode.traces
        measured = [attempt.metrics.get("exact") for attempt in attempts]
        exact = [share for share in measured if share is not None]
        solved = sum(exact) / len(exact) if exact else 0.0
        proposal.record_metric("solved", solved)
        proposal.record_reward("difficulty", difficulty_score(solved))


__all__ = ["InProcessHarness", "ProposeSolveEnv", "ProposeSolveTaskset"]
