"""What the lab lends to an algorithm: models with tables of logits, in place of a teacher, of the
initial policy and of the policy that has seen a hint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from prime_rl.plugins.algorithm import Tokens
from prime_rl.rollout import Prefix, Rollout
from prime_rl.streams import FloatColumn, IntColumn
from prime_rl.testing import CodePoints, FakeHost, FakeReference, default_branch
from prime_rl_devkit.lab.problem import PROMPT, Floats, Question, log_softmax


@dataclass
class TableModel(FakeReference):
    """Answers by the policy's own table, or by the reference's: always, or only after a hint."""

    question: Question | None = None
    reference: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    needs_hint: bool = False

    def _logprobs(self, token_ids: Tokens) -> tuple[list[int], Floats]:
        """The tokens, and [T, V] what the table says in the place of each; -inf where a token
        cannot be: in the prompt, and where a demonstration is scored."""
        assert self.question is not None
        ids = [int(token) for token in token_ids]
        start = ids.index(PROMPT) if PROMPT in ids else len(ids)
        hinted = self.needs_hint and start == 0
        table = log_softmax(self.question.logits if hinted else self.reference)
        logprobs = np.full((len(ids), table.shape[1]), -np.inf)
        for t in range(start + 1, len(ids)):
            state = self.question.states.get(tuple(ids[start + 1 : t]))
            if state is not None:
                logprobs[t] = table[state]

        return ids, logprobs

    async def logprobs(self, token_ids: Tokens, *, group_id: int = 0) -> FloatColumn:
        """[T]; a token of no table has -1, or less without a hint."""
        await asyncio.sleep(0)
        ids, table = self._logprobs(token_ids)
        inside = np.clip(ids, 0, table.shape[1] - 1)
        of_tokens = table[np.arange(len(ids)), inside]
        known = np.isfinite(of_tokens) & (inside == ids)
        hinted = PROMPT not in ids or ids[0] != PROMPT
        column = np.where(known, of_tokens, -1.0 if hinted else -3.0).astype(np.float32)
        column[:1] = 0.0
        return column

    async def top_logprobs(
        self, token_ids: Tokens, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """The likeliest ``k`` tokens of the table in each place."""
        await asyncio.sleep(0)
        _, table = self._logprobs(token_ids)
        k = min(k, int(np.isfinite(table).sum(1).max()))
        ids = np.argsort(-table, axis=1, kind="stable")[:, :k]
        logprobs = np.take_along_axis(table, ids, 1)
        return ids.astype(np.int32), np.where(np.isfinite(logprobs), logprobs, -99.0).astype(
            np.float32
        )


@dataclass
class Values(CodePoints):
    """The text of a reply is its expected reward under the policy: it stands for all completions
    (``expected_reward``), which are empty in the lab."""

    question: Question

    def decode(self, token_ids: Tokens) -> str:
        """The value of the state after these tokens of a reply; the kit's text of a whole reply,
        after which there is no state."""
        state = self.question.states.get(tuple(int(token) for token in token_ids))
        if state is None:
            return super().decode(token_ids)
        return repr(float(self.question.values[state]))


def expected_reward(reply: str, task: Mapping[str, object]) -> float:
    """The reward function for ``vineppo`` in the lab: exact, as of infinitely many branches."""
    return float(reply)


def exact_branch(question: Question, prefix: Prefix, number: int) -> Rollout:
    """A branch whose reward is the expected one: it stands for all of them."""
    ids = prefix.rollout.samples[prefix.sample].token_ids[: prefix.end].tolist()
    state = question.states[tuple(ids[ids.index(PROMPT) + 1 :])]
    branch = default_branch(prefix, number)
    branch.reward = float(question.values[state])
    return branch


def lab_host(question: Question, reference: Floats) -> FakeHost:
    """A host whose frozen and initial models are the reference, and whose policy is it after a
    hint."""
    frozen = TableModel(question=question, reference=reference)
    policy = TableModel(
        question=question, reference=reference, needs_hint=True, reply=lambda ids, number: ()
    )
    tasks: Sequence[Mapping[str, object]] = ({"prompt": "?", "demonstration": "b"},)
    return FakeHost(
        policy=policy,
        frozen=frozen,
        initial=frozen,
        ema=frozen,
        tasks=tasks,
        text=Values(question),
        branch=partial(exact_branch, question),
    )


def reference_logits(question: Question) -> Floats:
    """The logits of a slightly different policy."""
    noise = np.random.default_rng(7).normal(0, 0.5, question.logits.shape)
    return np.asarray(question.logits + noise)
