"""The nouns every plugin sees: Rollout, Group, Sample, and the per-token streams.

    Rollout (a finished episode) -> 1..n Sample (one token sequence each) -> columns of length T

Shapes: T = tokens of one sample, env-provided and sampled ones interleaved;
        C = trainable tokens of one rollout, over all its samples; N = all tokens of one rollout.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prime_rl.errors import StreamError
from prime_rl.rewards import DOUBLE, settled
from prime_rl.streams import (
    ROUTES,
    STREAMS,
    WEIGHTS,
    BoolColumn,
    FloatColumn,
    IntColumn,
    LossComponent,
    StreamColumn,
    Values,
    as_credit,
    as_stream,
    can_be_stream,
    split_stream,
    trains,
)

ROLES = ("system", "user", "assistant", "tool")
"""Message roles; a token's role is its index here, -1 if unknown."""

LARGEST_ROUNDING = 1e-6
"""Credit above this counts, however large the reward is."""

TURN_REWARDS = "turn_rewards"
"""Key of ``Rollout.info``: ``{str(node id): reward}`` of the turns to which the env gave one."""

_DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "inference_logprobs": np.float32,
    "roles": np.int8,
    "is_content": np.bool_,
    "policy_versions": np.int32,
    "is_repeat": np.bool_,
    "node_ids": np.int32,
    **dict.fromkeys(STREAMS, np.float32),
    ROUTES: None,
}
CALLER: ContextVar[Any] = ContextVar("caller", default=None)
"""The call of a plugin's hook in which this code runs, with its ``ended``. Set by core; tasks and
``asyncio.to_thread`` inherit it."""

LATE: list[tuple[StreamError, Any]] = []
"""Refused writes of code that a hook has left behind, and its call if known: nothing awaits that
code, so core raises them (``scoring.raise_late``)."""

COLUMNS = tuple(_DTYPES)
"""The per-token columns that are attributes of a sample; ``streams`` holds further ones."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One token sequence for the trainer. Every column has length T."""

    token_ids: IntColumn
    loss_mask: BoolColumn
    """True where the policy sampled the token and it trains."""
    inference_logprobs: FloatColumn
    """log μ under the policy that sampled the token, at its sampling temperature; 0.0 off the mask.
    """
    temperature: float = 1.0
    roles: npt.NDArray[np.int8] | None = None
    """Index into ``ROLES`` of each token's message, -1 unknown. None: no attribution."""
    is_content: BoolColumn | None = None
    """True on a message's body, False on the chat template's scaffold. None: no attribution."""
    policy_versions: IntColumn | None = None
    """Version of the policy that sampled each token; -1 off the mask."""
    is_repeat: BoolColumn | None = None
    """True where an earlier sample of the rollout has the same token of the same message: it trains
    only there. None: nowhere."""
    node_ids: IntColumn | None = None
    """Each token's message in the trajectory, the same in all samples of a rollout. Stays in the
    orchestrator. None: unknown."""
    advantages: FloatColumn | None = None
    rl_weights: FloatColumn | None = None
    ce_weights: FloatColumn | None = None
    ref_kl_weights: FloatColumn | None = None
    ref_logprobs: FloatColumn | None = None
    routed_experts: StreamColumn | None = None
    """[T, layers, k] uint8 or uint16: the experts by which the sampler computed each token. None:
    its engine did not record them."""

    streams: dict[str, StreamColumn] = field(default_factory=dict)
    """Further streams by name, [T] or [T, k], float32 or int32. ``rollout.assign_stream`` writes
    them."""
    owner: int | None = field(default=None, init=False, repr=False)
    """``id()`` of the rollout that has it. Written by core: a sample belongs to one rollout."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            column = getattr(self, name)
            if column is not None:
                setattr(self, name, np.asarray(column, dtype))  # None: the dtype that it has

        for name, column in self.columns.items():
            # A stream may have a row of values per token, so its length alone has to fit.
            num_dims = column.ndim if _DTYPES.get(name) is not None else 1
            if column.shape[:num_dims] != self.token_ids.shape:
                raise StreamError(
                    f"sample: column {name!r} must align with token_ids: "
                    f"got shape {column.shape}, expected {self.token_ids.shape}"
                )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Every column that is there, further streams included."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        return {n: column for n, column in columns.items() if column is not None} | self.streams

    @property
    def num_trainable_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def first_tokens(self) -> npt.NDArray[np.int64]:
        """The position of the token that nothing predicts; none in an empty sample."""
        return np.arange(min(len(self), 1))

    def cut(self, limit: int) -> Sample:
        """The first ``limit`` tokens."""
        if len(self) <= limit:
            return self
        columns = {name: column[:limit] for name, column in self.columns.items()}
        return sample_of(columns, self.temperature)

    def set_stream(self, name: str, column: StreamColumn) -> None:
        """Write a stream without the checks of ``Rollout.assign_stream``."""
        if name in STREAMS:
            setattr(self, name, column)
        else:
            self.streams[name] = column

    def freeze(self) -> None:
        """Make every column read-only."""
        for column in self.columns.values():
            column.flags.writeable = False


def sample_of(columns: Mapping[str, npt.NDArray[Any]], temperature: float) -> Sample:
    """A sample from all its columns by name."""
    attributes = {name: column for name, column in columns.items() if name in COLUMNS}
    streams = {name: column for name, column in columns.items() if name not in COLUMNS}
    return Sample(**attributes, streams=streams, temperature=temperature)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a rollout: tokens ``start`` to ``end``, exclusive, of ``samples[sample]``."""

    sample: int
    start: int
    end: int
    role: str | None
    reward: float | None
    """The reward of this turn alone. None: the env gave none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """A rollout up to a token: where a branch begins (``Host.rollout``)."""

    rollout: Rollout
    sample: int
    """The number of the sample that it is a part of."""
    end: int | None
    """Tokens of that sample. None: all."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One finished episode of one agent: its reward and the samples of its trajectory."""

    env: str
    example_id: int
    group_id: int
    reward: float
    """A sum of terms. Core has undone its rounding when the first plugin sees it: 0.7 + 0.2 + 0.1
    is 1.0."""
    samples: list[Sample]
    rewards: dict[str, float] = field(default_factory=dict)
    """The env's named reward terms, each before its weight."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """The weight of each term of ``rewards``: without a plugin's change, ``reward`` is the sum of
    ``rewards[name] * reward_weights[name]``. Empty: a source gave none."""
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    num_turns: int = 1
    is_truncated: bool = False
    stop_condition: str | None = None
    policy_version: int = 0
    """The policy's version when the rollout's group started: staleness counts from here."""
    episode_id: int = 0
    """Its episode in the group, shared by the agents of one episode."""
    agent: str = "agent"
    """Its seat in the env."""
    task: dict[str, Any] = field(default_factory=dict)
    """The fields of the example, ``prompt`` among them."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation, as ``{"role": ..., "content": text}``; calls of tools are in
    ``tool_calls``, thoughts in ``reasoning_content``. Of several branches, the last one."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The tools that this conversation's prompt tells of, in OpenAI's form."""
    source: str = "policy"
    """Its origin: ``policy``, ``frozen``, or the type of a source."""
    has_logprobs: bool = True
    """Whether its ``inference_logprobs`` come from the model that sampled it."""
    trace: Any = None
    """The env framework's own record (a ``verifiers`` trace)."""
    place: tuple[int, int, int, int] | None = None
    """When it was scored: the attempt at the run, the group in it, the member of that, and how many
    members were scored. Written by core: saved rollouts are scored again in the same order."""
    given: dict[str, Any] | None = None
    """``reward``, ``rewards``, ``metrics`` and ``info`` before a plugin changed them, for scoring a
    saved rollout again. Written by core; None: unchanged."""
    credited: LossComponent = "rl"
    """The component that its advantages drive. Written by core: rl, or the algorithm's
    ``action_loss`` if that reads advantages."""
    assigned: set[str] = field(default_factory=set)
    """Weight streams an algorithm wrote itself: stamping keeps them."""
    frozen: bool = False
    open: bool = field(default=True, init=False, repr=False)
    """Whether its streams may be written now. Written by core: False between its hooks."""
    opened_by: int | None = field(default=None, init=False, repr=False)
    """The thread whose hooks may write its streams now. None: any. Written by core."""

    def settle(self) -> None:
        """Undo the rounding of the reward (``rewards.settled``): equal rewards compare equal."""
        # Terms that cancel leave a rounding error of the size of the largest term.
        terms = (abs(term) for term in self.rewards.values() if isinstance(term, float | int))
        finite = (term for term in terms if math.isfinite(term))
        self.reward = settled(self.reward, scale=max(finite, default=1.0))

    @property
    def prompt(self) -> Any:
        """The example's prompt: a text, or a list of messages. None: the env has none."""
        return self.task.get("prompt")

    @property
    def reply(self) -> str:
        """The text of the policy's last message, without white space at its ends."""
        replies = (each["content"] for each in self.messages if each.get("role") == "assistant")
        return str(next(reversed([*replies]), "")).strip()

    @property
    def is_live(self) -> bool:
        """Sampled from the policy: it becomes stale."""
        return self.source == "policy"

    @property
    def has_members(self) -> bool:
        """Whether any token trains in any component."""
        return any(trains(sample) for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)

    @property
    def num_trainable_tokens(self) -> int:
        return sum(sample.num_trainable_tokens for sample in self.samples)

    @property
    def num_input_tokens(self) -> int:
        return self.num_tokens - self.num_trainable_tokens

    @property
    def trains_beside_rl(self) -> bool:
        """Whether any token trains in a component other than ``credited``."""
        return any(trains(sample, beside=self.credited) for sample in self.samples)

    @property
    def shared_prefixes(self) -> Iterator[tuple[int, int, int]]:
        """Per sample that repeats tokens: its index, the index of an earlier sample with the same
        tokens, and their number. They come first in both: samples are paths of one tree."""
        # Message ids are compared where they are known: different messages may have equal tokens.
        columns = [s.token_ids if s.node_ids is None else s.node_ids for s in self.samples]
        for later, sample in enumerate(self.samples):
            length = 0 if sample.is_repeat is None else int(sample.is_repeat.sum())
            if not length:
                continue

            shared = columns[later][:length]
            for earlier in range(later):
                if np.array_equal(columns[earlier][:length], shared):
                    yield later, earlier, length
                    break

    @property
    def turns(self) -> list[Turn]:
        """Every message, the env's too, in order of time; a repeated one is in its first sample
        only. Without ``node_ids``, a turn ends where the role changes, and counts as its number."""
        turns: list[tuple[int, Turn]] = []
        for index, sample in enumerate(self.samples):
            ids = sample.node_ids
            repeats = sample.is_repeat
            roles = sample.roles
            # Turns are separated by message ids, else by roles, else by the loss mask.
            parts = next(each for each in (ids, roles, sample.loss_mask) if each is not None)
            cuts = [0, *(np.flatnonzero(parts[1:] != parts[:-1]) + 1).tolist(), len(sample)]
            for start, end in pairwise(cuts):
                if repeats is None or not repeats[start]:
                    node = len(turns) if ids is None else int(ids[start])
                    role = ROLES[roles[start]] if roles is not None and roles[start] >= 0 else None
                    reward = self.info.get(TURN_REWARDS, {}).get(str(node))
                    turn = Turn(sample=index, start=start, end=end, role=role, reward=reward)
                    turns.append((node, turn))

        # Messages are numbered in the order of time.
        return [turn for _, turn in sorted(turns, key=lambda each: each[0])]

    def prefix(self, end: int, sample: int = 0) -> Prefix:
        """The first ``end`` tokens of a sample; inside a reply, its first tokens are a part of it.
        Raises ``StreamError`` beyond its end."""
        if not (0 <= sample < len(self.samples) and 0 <= end <= len(self.samples[sample])):
            lengths = [len(each) for each in self.samples]
            raise StreamError(
                f"{self._where('prefix')}: {end} tokens of sample {sample}; the samples have "
                f"{lengths} tokens"
            )
        return Prefix(rollout=self, sample=sample, end=end)

    def before(self, turn: Turn) -> Prefix:
        """All that comes before a message."""
        return self.prefix(turn.start, turn.sample)

    def adopt(self, branch: Rollout) -> list[Sample]:
        """Append the samples of a branch of this rollout, to train with its own. Returns them. What
        they share with the samples before is no part of what trains, and its messages have the same
        numbers; new messages are numbered behind all others."""
        columns = [s.node_ids for s in self.samples if s.node_ids is not None]
        behind = 1 + max((int(column.max()) for column in columns if len(column)), default=-1)

        for sample in branch.samples:
            if sample.node_ids is not None:
                old = (
                    np.zeros(len(sample), np.bool_)
                    if sample.is_repeat is None
                    else sample.is_repeat
                )
                sample.node_ids = np.where(old, sample.node_ids, sample.node_ids + behind)

            self.samples.append(sample)

        return branch.samples

    @property
    def sampled_paths(self) -> list[tuple[BoolColumn, FloatColumn]]:
        """Per sample, the mask and log μ, [T] each, of all sampled tokens on its path, repeated
        ones included."""
        paths = [(s.loss_mask.copy(), s.inference_logprobs.copy()) for s in self.samples]
        for later, earlier, length in self.shared_prefixes:
            # A repeated token is off the mask here: the earlier sample has its values.
            for column, earlier_column in zip(paths[later], paths[earlier], strict=True):
                column[:length] = earlier_column[:length]
        return paths

    @property
    def advantages(self) -> FloatColumn | None:
        """Credit on the trainable tokens, in order: [C]. None until assigned."""
        parts = [s.advantages[s.loss_mask] for s in self.samples if s.advantages is not None]
        return np.concatenate(parts) if parts and len(parts) == len(self.samples) else None

    @property
    def has_credit(self) -> bool:
        """Whether any advantage is larger than a rounding error. The mean of equal rewards may
        differ from them in the last bits, so their advantages may be tiny and not zero. Advantages
        of about 1 are never taken for rounding: an algorithm may divide by a small deviation.
        """
        advantages = self.advantages
        rounding = min(DOUBLE * abs(self.reward), LARGEST_ROUNDING)
        return advantages is not None and bool((np.abs(advantages) > rounding).any())

    def assign_advantages(self, credit: float | Values) -> None:
        """Write per-token credit.

        ``credit`` is one number (for every trainable token), one value per trainable token [C], or
        one per token [N] with 0.0 off the mask. Raises ``StreamError`` on any other length, on a
        value that is not finite, and on credit off the mask.
        """
        self._write("advantages", credit, off_mask_must_be_zero=True)

    def assign_ref_logprobs(self, values: Values) -> None:
        """Write a reference model's logprobs: one per trainable token [C] or one per token [N]."""
        self._write("ref_logprobs", values)

    def assign_weights(self, component: LossComponent, values: float | Values) -> None:
        """Write one component's weights, as ``assign_advantages``. 0.0 leaves a token out.
        ``component``: ``rl`` or an installed loss."""
        self._write(f"{component}{WEIGHTS}", values)
        self.assigned.add(f"{component}{WEIGHTS}")

    def assign_stream(self, name: str, values: float | Values) -> None:
        """Write a stream that a loss reads by name (``Loss.reads``), as ``assign_advantages``;
        tokens that the policy did not sample may have values too.

        Integers are kept as int32, anything else as float32. Values of shape [C, k] or [N, k] give
        each token a row of k. Raises ``StreamError`` also for a name that core uses itself.
        """
        if name == "ref_logprobs":
            self._write(name, values)
            return
        if name in STREAMS and not name.endswith(WEIGHTS):
            raise StreamError(
                f"{self._where(repr(name))}: this stream has a method of its own, which checks it. "
                f"Use assign_{name}."
            )
        if not can_be_stream(name):
            raise StreamError(
                f"{self._where(repr(name))}: no stream can have this name. Choose another one, or "
                "use assign_weights for the weights of a component."
            )

        self._write(name, values)

    def cut(self, limit: int) -> int:
        """Cut the samples to ``limit`` tokens each, before anything scores them: credit may stand
        at a single token, such as the last. A sample with no trainable token left goes. Returns how
        many samples were longer; then the rollout counts as truncated."""
        num_longer = sum(len(sample) > limit for sample in self.samples)
        if num_longer:
            shorter = [sample.cut(limit) for sample in self.samples]
            self.samples = [sample for sample in shorter if trains(sample)]
            self.is_truncated = True
            self._keep_turn_rewards()
        return num_longer

    def _keep_turn_rewards(self) -> None:
        """After a cut, the rewards of the removed turns go to the last remaining turn, as the
        rollout's reward does."""
        columns = [s.node_ids[s.loss_mask] for s in self.samples if s.node_ids is not None]
        left = {str(node) for column in columns for node in np.unique(column)}

        rewards = self.info.get(TURN_REWARDS, {})
        if not left or rewards.keys() <= left:
            return

        kept = {node: reward for node, reward in rewards.items() if node in left}
        # Messages are numbered in the order of time.
        last = max(left, key=int)
        gone = sum(reward for node, reward in rewards.items() if node not in left)
        kept[last] = kept.get(last, 0.0) + gone
        self.info = self.info | {TURN_REWARDS: kept}

    def freeze(self) -> None:
        """Freeze the streams: later assignments raise ``StreamError``."""
        self.frozen = True
        for sample in self.samples:
            sample.freeze()

    def _write(
        self, name: str, values: float | Values, off_mask_must_be_zero: bool = False
    ) -> None:
        """Raises ``StreamError`` if the rollout is frozen or the values do not fit."""
        where = self._where(name)
        self._check_open(where)

        masks = [sample.loss_mask for sample in self.samples]
        try:
            is_core = name in STREAMS or name.endswith(WEIGHTS)
            # Weights may be given as a mask. Bool credit is a mistake.
            if not name.endswith(WEIGHTS) and is_core and np.asarray(values).dtype.kind == "b":
                raise ValueError("got bool, expected numbers. Write 1.0 and 0.0 if that is meant")

            column = as_credit(values) if is_core else as_stream(values)
            columns = split_stream(column, masks, max_dims=1 if is_core else 2)
        except ValueError as error:
            raise StreamError(f"{where}: {error}") from error

        if off_mask_must_be_zero and column.ndim:
            off = sum(int((c[~m] != 0).sum()) for c, m in zip(columns, masks, strict=True))
            if off:
                raise StreamError(
                    f"{where}: got credit on {off} tokens the policy did not sample; expected 0.0 "
                    "there. To train env-provided tokens use the hook observation_weights."
                )

        # The samples are written after all checks, so a refused stream leaves no trace.
        for sample, column in zip(self.samples, columns, strict=True):
            sample.set_stream(name, column)

    def _check_open(self, where: str) -> None:
        """Raises ``StreamError`` unless a hook may write now."""
        call = CALLER.get()
        has_ended = call is not None and call.ended
        may_write = self.open and not self.frozen and not has_ended
        # `asyncio.to_thread` hands the call on to its thread. Any other thread has none.
        is_foreign = call is None and self.opened_by not in (None, threading.get_ident())

        if may_write and not is_foreign:
            if call is not None:
                call.wrote()
            return

        # Whether a hook waits for such a thread cannot be seen, and neither which hook started it.
        if may_write:
            error = StreamError(
                f"{where} were written in a thread that no hook is known to wait for "
                "(run_in_executor, threading.Thread, an executor). Core cannot see whether one "
                "does, and without it what trains depends on timing. Return the values and assign "
                "them in the hook, or call await asyncio.to_thread(...) there."
            )
            # Nothing may wait for this thread, so core raises the error too (`raise_late`).
            LATE.append((error, None))
            raise error

        # A hook that writes frozen streams raises. What it has left behind would raise unseen.
        if not self.open or has_ended:
            error = StreamError(
                f"{where} were written outside of a scoring hook: by a task, a thread or a "
                "callback that one has left behind, or by a plugin that only observes. What trains "
                "would depend on timing. Await the work inside the hook (await, asyncio.gather, "
                "asyncio.TaskGroup)."
            )
            LATE.append((error, call))
            raise error

        raise StreamError(
            f"{where} are frozen: the rollout is stamped. Assign credit in score_rollout or "
            "score_group."
        )

    def _where(self, name: str) -> str:
        return f"env {self.env!r}, group {self.group_id}: {name}"


Group: TypeAlias = Sequence[Rollout]
"""Sibling rollouts of one example: the cohort a group-relative baseline needs."""


@dataclass
class Batch:
    """The rollouts of one optimizer step, and those that were dropped on the way to it."""

    step: int
    kept: list[Rollout] = field(default_factory=list)
    """What trains."""
    seen: list[Rollout] = field(default_factory=list)
    """What trains and what was dropped, in the order of the decisions."""
    measured: list[Rollout] = field(default_factory=list)
    """Stamped rollouts whose loss the trainer measures after the step, without training them."""
    dropped: dict[int, str] = field(default_factory=dict)
    """How each dropped rollout ended, by its ``id()``: ``stale``, ``sampler`` (which rejected it),
    ``left out by its algorithm``, or the slot whose filters objected, ``pre_batch_filters`` or
    ``post_batch_filters``."""
    objections: dict[int, dict[str, str]] = field(default_factory=dict)
    """Why, by ``id()`` of the rollout: what each filter said that dropped it, by the filter's name;
    what the sampler said, as ``sampler``. None for a rollout that is stale or left out."""
