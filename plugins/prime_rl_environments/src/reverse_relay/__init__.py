# mypy: allow-subclassing-any, allow-untyped-decorators
"""The verifiers environment ``reverse-relay``: a main agent delegates to a sub-agent.

    main: user abc de   assistant @abc   user cba   assistant @de   user ed   assistant cba ed
    sub:  user abc      assistant cba
    sub:  user de       assistant ed

The prompt is several words, and the answer is each word reversed, in order. A reply that begins
with ``@`` is handed over: the rest becomes the prompt of a sub-agent with a separate context, and
the main agent reads only the sub-agent's answer. Both are the policy, in one trace. Their contexts
share no prefix, so a rollout gives one sample for the main agent and one for each hand-over. The
reward of all samples is the positional score of the main agent's last reply. Metrics: ``exact``,
``hand_overs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from pydantic import NonNegativeInt, PositiveInt

from in_process import InProcessConfig, InProcessHarness
from in_process.turns import Refused, TurnDriver
from prime_rl_environments.tasks import DELEGATE
from prime_rl_environments.words import position_score
from prime_rl_environments.wordset import WordsConfig, first


class ReverseRelayConfig(WordsConfig):
    """``args`` of ``[[orchestrator.train.env]] id = "reverse-relay"``."""

    num_words: PositiveInt = 2
    """Words per prompt."""
    min_letters: PositiveInt = 3
    max_letters: PositiveInt = 5


class ReverseRelayData(vf.TaskData):
    """One example: ``prompt`` is the words."""

    answer: str


class ReverseRelayTask(vf.Task[ReverseRelayData]):
    """Scores the main agent's last reply."""

    @vf.reward
    async def positions(self, trace: vf.Trace) -> float:
        return position_score(trace.last_reply, self.data.answer)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def hand_overs(self, trace: vf.Trace) -> float:
        return float(trace.info.get("hand_overs", 0))


class ReverseRelayTaskset(vf.Taskset[ReverseRelayTask, ReverseRelayConfig]):
    """Words of one split, the same for the same seed."""

    RUNS_IN_PROCESS = True

    def __init__(self, config: ReverseRelayConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_examples is None

    def load(self) -> Iterator[ReverseRelayTask]:
        return first(self._endless(), self.config)

    def _endless(self) -> Iterator[ReverseRelayTask]:
        stream = self.config.words()
        while True:
            words = list(islice(stream, self.config.num_words))
            answer = " ".join(word[::-1] for word in words)
            data = ReverseRelayData(prompt=" ".join(words), answer=answer)
            yield ReverseRelayTask(data, self.config.task)


class ReverseRelayHarnessConfig(InProcessConfig):
    """The in-process harness with hand-overs."""

    hand_overs: NonNegativeInt = 2
    """Hand-overs per rollout at most. A further reply with ``@`` is the answer."""


class ReverseRelayHarness(InProcessHarness, vf.Harness[ReverseRelayHarnessConfig]):
    """The main agent's chat loop. Each hand-over is a separate conversation."""

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One rollout, to the main agent's answer or to the turn that verifiers refuses."""
        driver = TurnDriver(secret, trace, ctx)
        try:
            trace.root_reply = await self.main(driver, ctx.model, self.opening(data))
        except Refused as refusal:
            return vf.ProgramResult(1, "", str(refusal))
        return vf.ProgramResult(0, "", "")

    async def main(self, driver: TurnDriver, model: str, messages: list[dict[str, Any]]) -> str:
        """The main agent's last reply."""
        for used in range(self.config.hand_overs + 1):
            driver.trace.info["hand_overs"] = used
            reply = await driver.turn({"model": model, "messages": messages})
            text = str(reply.get("content") or "")
            if not text.startswith(DELEGATE) or used == self.config.hand_overs:
                break
            work = {"role": "user", "content": text.removeprefix(DELEGATE)}
            answer = await driver.turn({"model": model, "messages": [work]})
            summary = {"role": "user", "content": str(answer.get("content") or "")}
            messages = [*messages, reply, summary]

        return text


__all__ = ["ReverseRelayHarness", "ReverseRelayTaskset"]
