"""Questions small enough to enumerate every reply, and a policy with a table of logits.

A reply has at most three tokens of ``a``, ``b`` and a stop token. In the two-turn problem the
environment answers the first token with ``x`` or ``y``. The policy has logits of its own after
every prefix, also for the environment's tokens, which it predicts like any language model.

Shapes: K = replies, S = states (prefixes), V = tokens, P = S * V parameters, T = tokens of a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl import Rollout, Sample
from prime_rl.rollout import ROLES, TURN_REWARDS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NAMES = ("a", "b", "stop", "x", "y")
A, B, STOP, X, Y = range(5)
PROMPT = 5
"""The token of every prompt."""
LONGEST = 3
ENV = "test"
OTHER_ENV = "other"


@dataclass(frozen=True)
class PossibleReply:
    """One possible reply, the environment's tokens included."""

    tokens: tuple[int, ...]
    reward: float
    sampled: tuple[bool, ...]
    """Which of the tokens are the policy's."""
    chance: float = 1.0
    """Probability of the environment's tokens."""
    turn_rewards: tuple[float, ...] = ()

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return sum(self.sampled)


@dataclass(frozen=True, eq=False)
class Question:
    """One prompt: every reply with its reward, and the policy's logits after every prefix."""

    name: str
    replies: tuple[PossibleReply, ...]
    logits: Floats
    """[S, V]; -inf where a token cannot follow."""

    @cached_property
    def states(self) -> dict[tuple[int, ...], int]:
        """The number of every prefix."""
        return {prefix: number for number, prefix in enumerate(prefixes(self.replies))}

    @cached_property
    def is_action(self) -> npt.NDArray[np.bool_]:
        """[S] whether the policy samples in this state."""
        return np.isfinite(self.logits[:, A])

    @cached_property
    def turns(self) -> Ints:
        """[S] the turn of each state, from 0."""
        return np.array([sum(token in (X, Y) for token in prefix) for prefix in self.states])

    @cached_property
    def places(self) -> list[tuple[Ints, Ints]]:
        """State and token of each token of each reply, [T] each."""
        return [
            (
                np.array([self.states[r.tokens[:t]] for t in range(len(r.tokens))]),
                np.array(r.tokens),
            )
            for r in self.replies
        ]

    @cached_property
    def rewards(self) -> Floats:
        """[K]"""
        return np.array([reply.reward for reply in self.replies])

    @cached_property
    def lengths(self) -> Floats:
        """[K] sampled tokens."""
        return np.array([float(reply.length) for reply in self.replies])

    @cached_property
    def counts(self) -> Floats:
        """[K, P] how often each reply takes each action."""
        scores = np.zeros((len(self.replies), *self.logits.shape))
        for k, (states, tokens) in enumerate(self.places):
            for state, token, is_sampled in zip(
                states, tokens, self.replies[k].sampled, strict=True
            ):
                scores[k, state, token] += is_sampled
        return scores.reshape(len(scores), -1)

    def probabilities(self, logits: Floats) -> Floats:
        """[K] of the replies under a policy."""
        logprobs = np.where(np.isfinite(logits), log_softmax(logits), 0.0)
        chances = np.array([reply.chance for reply in self.replies])
        return np.asarray(chances * np.exp(self.counts @ logprobs.ravel()))

    def scores(self, logits: Floats) -> Floats:
        """[K, P] the gradient of each reply's log-probability."""
        taken = self.counts.reshape(-1, *logits.shape)
        scores = taken - taken.sum(2, keepdims=True) * np.exp(log_softmax(logits))
        return np.asarray(scores.reshape(len(scores), -1))

    @cached_property
    def values(self) -> Floats:
        """[S] the expected reward of the replies through each state, under the policy."""
        p = self.probabilities(self.logits)
        through = np.zeros((len(self.states), len(p)))
        for k, (states, _) in enumerate(self.places):
            through[states, k] = p[k]
        return np.asarray(through @ self.rewards / through.sum(1))

    def visits(self, logits: Floats) -> Floats:
        """[S] how often a reply passes each state in which the policy samples."""
        taken = (self.probabilities(logits) @ self.counts).reshape(logits.shape)
        return np.asarray(taken.sum(1))

    @cached_property
    def columns(self) -> list[dict[str, Any]]:
        """What the sample of each reply holds."""
        table = log_softmax(self.logits)
        messages = []
        for reply, (states, tokens) in zip(self.replies, self.places, strict=True):
            mask = np.array([False, *reply.sampled])
            logprobs = np.where(mask, np.append(0.0, table[states, tokens]), 0.0)
            roles = [
                "user",
                *("assistant" if is_sampled else "tool" for is_sampled in reply.sampled),
            ]
            messages.append(
                {
                    "token_ids": np.array([PROMPT, *reply.tokens], np.int32),
                    "loss_mask": mask,
                    "inference_logprobs": logprobs.astype(np.float32),
                    "roles": np.array([ROLES.index(role) for role in roles], np.int8),
                    "is_content": np.ones(len(mask), np.bool_),
                    "policy_versions": np.where(mask, np.int32(0), np.int32(-1)),
                }
            )

        return messages

    def rewarded(self, name: str, factor: float, more: Floats) -> Question:
        """The same question with ``factor`` times its rewards, plus ``more`` [K] at the end."""
        replies = []
        for reply, extra in zip(self.replies, more.tolist(), strict=True):
            turns = tuple(factor * reward for reward in reply.turn_rewards)
            if turns:
                turns = (*turns[:-1], turns[-1] + extra)
            reward = factor * reply.reward + extra
            replies.append(replace(reply, reward=reward, turn_rewards=turns))

        return Question(f"{self.name}: {name}", tuple(replies), self.logits)

    @cached_property
    def is_cut_off(self) -> npt.NDArray[np.bool_]:
        """[K] whether a reply ends at the limit, without a stop token."""
        return np.array([reply.tokens[-1] != STOP for reply in self.replies])

    def rollout(self, k: int, group_id: int = 0, example_id: int = 0, env: str = ENV) -> Rollout:
        """Reply ``k`` as the policy samples it."""
        reply = self.replies[k]
        states = self.places[k][0]
        sample = Sample(**{name: column.copy() for name, column in self.columns[k].items()})
        rewards = {str(2 * n + 1): reward for n, reward in enumerate(reply.turn_rewards)}
        return Rollout(
            env=env,
            example_id=example_id,
            group_id=group_id,
            reward=reply.reward,
            samples=[sample],
            num_turns=1 + int(self.turns[states[-1]]),
            is_truncated=bool(self.is_cut_off[k]),
            info={TURN_REWARDS: rewards} if rewards else {},
            task={"prompt": "?", "answer": "b", "demonstration": "b"},
        )


def log_softmax(logits: Floats) -> Floats:
    """[S, V] log-probabilities; -inf where a token cannot follow."""
    shifted = logits - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def prefixes(replies: Sequence[PossibleReply]) -> list[tuple[int, ...]]:
    """Every prefix that a token follows, in order."""
    return sorted({r.tokens[:t] for r in replies for t in range(len(r.tokens))})


def make_question(
    name: str, replies: Sequence[PossibleReply], seed: int, skill: float = 0.0, spread: float = 0.7
) -> Question:
    """A question whose policy has random logits. ``skill`` is added to the logit of ``b``, and
    after a ``b`` to that of the stop token."""
    states = prefixes(replies)
    follows = np.zeros((len(states), len(NAMES)), np.bool_)
    for reply in replies:
        for t, token in enumerate(reply.tokens):
            follows[states.index(reply.tokens[:t]), token] = True

    logits = np.random.default_rng(seed).normal(0, spread, follows.shape)
    for number, prefix in enumerate(states):
        logits[number, STOP if B in prefix else B] += skill
    return Question(name, tuple(replies), np.where(follows, logits, -np.inf))


def plain_replies(
    reward: Callable[[tuple[int, ...]], float], longest: int = LONGEST
) -> list[PossibleReply]:
    """Every reply of one turn: 15 of them, or 7 of at most 2 tokens."""
    replies: list[tuple[int, ...]] = []
    open_ends: list[tuple[int, ...]] = [()]
    while open_ends:
        prefix = open_ends.pop(0)
        for token in (A, B, STOP):
            reply = (*prefix, token)
            ends = token == STOP or len(reply) == longest
            (replies if ends else open_ends).append(reply)

    return [PossibleReply(each, reward(each), (True,) * len(each)) for each in replies]


def solved(reply: tuple[int, ...]) -> float:
    """1 for a reply with a ``b`` that ends by itself."""
    return float(B in reply and reply[-1] == STOP)


def graded(reply: tuple[int, ...]) -> float:
    """Counts letters, more for ``b``; half without a stop. Exact in float32."""
    return (0.5 * reply.count(B) + 0.25 * reply.count(A)) * (1.0 if reply[-1] == STOP else 0.5)


def signed(reply: tuple[int, ...]) -> float:
    """Minus what ``a`` counts, plus what ``b`` counts; less without a stop. Exact in float32, and
    the rewards of many groups sum to zero."""
    return 0.5 * (reply.count(B) - reply.count(A)) - (0.0 if reply[-1] == STOP else 0.5)


def two_turn_replies() -> list[PossibleReply]:
    """A letter, the environment's answer, one more token; or stop at once: 13 replies."""
    replies = [PossibleReply((STOP,), 0.25, (True,), turn_rewards=(0.25,))]
    for first in (A, B):
        for answer in (X, Y):
            likely = (first == A) == (answer == X)
            for last in (A, B, STOP):
                right = 1.0 if (answer, last) in ((X, A), (Y, B)) else 0.0
                turns = (0.5 if first == A else 0.0, right)
                chance = 0.7 if likely else 0.3
                tokens = (first, answer, last)
                replies.append(
                    PossibleReply(
                        tokens,
                        sum(turns),
                        sampled=(True, False, True),
                        chance=chance,
                        turn_rewards=turns,
                    )
                )

    return replies


@dataclass(frozen=True)
class Problem:
    """Questions of one kind, asked equally often."""

    name: str
    what: str
    questions: tuple[Question, ...]
    failing: float = 0.0
    """Probability that a rollout fails, whatever its reply. Its group is then smaller."""
    groups: int = 1
    """Groups of a batch, each of a question that is drawn for it."""
    envs: int = 1
    """Envs of a batch: each of its groups is of another one."""


def joint(questions: Sequence[Question]) -> Question:
    """A question of two: the environment draws one of them, and its first token says which."""
    names = (X, Y)[: len(questions)]
    replies = [
        replace(reply, tokens=(name, *reply.tokens), sampled=(False, *reply.sampled),
                chance=reply.chance / len(questions))
        for name, question in zip(names, questions, strict=True)
        for reply in question.replies
    ]  # fmt: skip
    logits = np.full((len(prefixes(replies)), len(NAMES)), -np.inf)
    for number, prefix in enumerate(prefixes(replies)):
        if prefix:
            question = questions[names.index(prefix[0])]
            logits[number] = question.logits[question.states[prefix[1:]]]
        else:
            logits[number, list(names)] = 0.0

    return Question("joint", tuple(replies), logits)


def shipped(longest: int = LONGEST) -> dict[str, Problem]:
    """The problems by name; replies of one turn have at most ``longest`` tokens, or two in a batch
    of several groups."""
    plain = [
        make_question(name, plain_replies(solved, longest), seed=seed, skill=skill)
        for seed, (name, skill) in enumerate((("hard", -0.8), ("even", 0.6), ("easy", 1.8)))
    ]
    levels: dict[str, Callable[[tuple[int, ...]], float]] = {
        "graded": graded,
        "a quarter of the spread": lambda reply: graded(reply) / 4,
        "one point higher": lambda reply: graded(reply) + 1,
    }
    same = [make_question(name, plain_replies(f, longest), 3) for name, f in levels.items()]
    below = make_question("signed", plain_replies(signed, 2), 5)
    turns = make_question("two turns", two_turn_replies(), 4)
    short = [
        make_question(name, plain_replies(solved, 2), seed=seed, skill=skill)
        for seed, (name, skill) in enumerate((("hard", -0.8), ("easy", 1.8)))
    ]
    shipped_problems = (
        Problem("plain", "rewards 0 and 1, one turn", tuple(plain)),
        Problem("graded", "rewards of any size, one turn", tuple(same)),
        Problem("signed", "rewards of both signs, one turn", (below,)),
        Problem("two-turn", "an answer of the environment between two tokens", (turns,)),
        Problem(
            "failed",
            "as plain; each rollout fails with probability 1/5",
            questions=tuple(plain),
            failing=0.2,
        ),
        Problem(
            "failed-signed",
            "as signed; each rollout fails with probability 1/5",
            questions=(below,),
            failing=0.2,
        ),
        Problem("batch", "rewards 0 and 1, batches of two groups", tuple(short), groups=2),
        Problem("envs", "rewards 0 and 1, batches of two envs", tuple(short), groups=2, envs=2),
    )
    return {problem.name: problem for problem in shipped_problems}
