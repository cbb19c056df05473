"""The nouns every plugin sees: Rollout, Group, Sample, and the per-token streams.

    Rollout (a finished episode) -> 1..n Sample (one token sequence each) -> columns of length T

Shapes: T = tokens of one sample, env-provided and sampled ones interleaved;
        C = trainable tokens of one rollout, over all its samples; N = all tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from prime_rl.errors import StreamError

FloatColumn: TypeAlias = npt.NDArray[np.float32]
BoolColumn: TypeAlias = npt.NDArray[np.bool_]
IntColumn: TypeAlias = npt.NDArray[np.int32]
Values: TypeAlias = Sequence[float] | npt.NDArray[Any]

ROLES = ("system", "user", "assistant", "tool")
"""Message roles; a token's role is its index here, -1 if unknown."""

STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
"""The optional per-token streams."""
LossComponent = Literal["rl", "ce", "ref_kl"]
"""The components of the loss. A loss plugin may replace what ``rl`` computes; the others are
fixed."""
COMPONENTS: tuple[LossComponent, ...] = get_args(LossComponent)

NEEDS: Mapping[LossComponent, str] = {"rl": "advantages", "ref_kl": "ref_logprobs"}
"""The stream that the members of a component require."""


class Columns(Protocol):
    """A sample, or a packed row of them: columns of one length T."""

    @property
    def loss_mask(self) -> BoolColumn: ...

    def __len__(self) -> int: ...


def members(columns: Columns, component: LossComponent) -> BoolColumn:
    """[T] the tokens that train in a component: those with a weight other than zero. Without a
    weight stream, rl trains every sampled token and the others none.

    Scoring, packing and the trainer's counts all use this rule.
    """
    weights: FloatColumn | None = getattr(columns, f"{component}_weights")
    if component == "rl":
        return columns.loss_mask if weights is None else columns.loss_mask & (weights != 0)
    return np.zeros(len(columns), np.bool_) if weights is None else weights != 0


def missing_stream(columns: Columns) -> tuple[LossComponent, str, int] | None:
    """A component without the stream it needs: its name, the stream, the number of members. None if
    none is missing."""
    for component, stream in NEEDS.items():
        if getattr(columns, stream) is None and (number := int(members(columns, component).sum())):
            return component, stream, number
    return None


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

    def __post_init__(self) -> None:
        self.token_ids = np.asarray(self.token_ids, np.int32)
        self.loss_mask = np.asarray(self.loss_mask, np.bool_)
        self.inference_logprobs = np.asarray(self.inference_logprobs, np.float32)
        for name, dtype in _OPTIONAL.items():
            if (column := getattr(self, name)) is not None:
                setattr(self, name, np.asarray(column, dtype))
        for name in ("loss_mask", "inference_logprobs", *_OPTIONAL):
            column = getattr(self, name)
            if column is not None and column.shape != self.token_ids.shape:
                raise StreamError(
                    f"sample: column {name!r} must align with token_ids: "
                    f"got shape {column.shape}, expected {self.token_ids.shape}"
                )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trainable_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def freeze(self) -> None:
        """Make every column read-only."""
        for name in COLUMNS:
            if (column := getattr(self, name)) is not None:
                column.flags.writeable = False


_OPTIONAL: Mapping[str, type] = {
    "roles": np.int8,
    "is_content": np.bool_,
    "policy_versions": np.int32,
    "is_repeat": np.bool_,
    "node_ids": np.int32,
    **dict.fromkeys(STREAMS, np.float32),
}

COLUMNS = ("token_ids", "loss_mask", "inference_logprobs", *_OPTIONAL)
"""Every per-token column a sample may carry."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One finished episode of one agent: its reward and the samples of its trajectory."""

    env: str
    example_id: int
    group_id: int
    reward: float
    samples: list[Sample]
    rewards: dict[str, float] = field(default_factory=dict)
    """The env's named reward terms, each before its weight."""
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
    source: str = "policy"
    """Its origin: ``policy``, ``frozen``, or the type of a source."""
    has_logprobs: bool = True
    """Whether its ``inference_logprobs`` come from the model that sampled it."""
    trace: Any = None
    """The env framework's own record (a ``verifiers`` trace)."""
    place: tuple[int, int, int, int] | None = None
    """When it was scored: the attempt at the run, the group in it, the member of that, and the
    group's size. Written by core, so that saved rollouts are scored again in the same order."""
    given: dict[str, Any] | None = None
    """``reward``, ``rewards``, ``metrics`` and ``info`` before a plugin changed them, for scoring a
    saved rollout again. Written by core; None: unchanged."""
    assigned: set[str] = field(default_factory=set)
    """Weight streams an algorithm wrote itself: stamping keeps them."""
    frozen: bool = False

    @property
    def is_live(self) -> bool:
        """Sampled from the policy: it becomes stale."""
        return self.source == "policy"

    @property
    def has_members(self) -> bool:
        """Whether any token trains in any component."""
        return any(members(s, name).any() for s in self.samples for name in COMPONENTS)

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
        """Whether any token trains in ce or ref_kl."""
        return any(members(s, "ce").any() or members(s, "ref_kl").any() for s in self.samples)

    @property
    def shared_prefixes(self) -> Iterator[tuple[int, int, int]]:
        """Per sample that repeats tokens: its index, the index of an earlier sample with the same
        tokens, and their number. They come first in both: samples are paths of one tree."""
        columns = [s.token_ids if s.node_ids is None else s.node_ids for s in self.samples]
        for later, sample in enumerate(self.samples):
            length = 0 if sample.is_repeat is None else int(sample.is_repeat.sum())
            shared = columns[later][:length]
            for earlier in range(later if length else 0):
                if np.array_equal(columns[earlier][:length], shared):
                    yield later, earlier, length
                    break

    @property
    def sampled_paths(self) -> list[tuple[BoolColumn, FloatColumn]]:
        """Per sample, the mask and log μ, [T] each, of all sampled tokens on its path, repeated
        ones included."""
        paths = [(s.loss_mask.copy(), s.inference_logprobs.copy()) for s in self.samples]
        for later, earlier, length in self.shared_prefixes:
            for ours, theirs in zip(paths[later], paths[earlier], strict=True):
                ours[:length] = theirs[:length]
        return paths

    @property
    def advantages(self) -> FloatColumn | None:
        """Credit on the trainable tokens, in order: [C]. None until assigned."""
        parts = [s.advantages[s.loss_mask] for s in self.samples if s.advantages is not None]
        return np.concatenate(parts) if parts and len(parts) == len(self.samples) else None

    def assign_advantages(self, credit: float | Values) -> None:
        """Write per-token credit.

        ``credit`` is one number (for every trainable token), one value per trainable token [C], or
        one per token [N] with 0.0 off the mask. Raises ``StreamError`` on any other length, on a
        value that is not finite, and on credit off the mask.
        """
        self._check_open("advantages")
        values = np.asarray(credit, np.float32)
        if values.ndim == 0:
            if not np.isfinite(values):
                where = self._where("advantages")
                raise StreamError(f"{where}: got {credit}, expected a finite number")
            for sample in self.samples:
                sample.advantages = np.where(sample.loss_mask, values, np.float32(0.0))
            return
        self._write("advantages", values, off_mask_must_be_zero=True)

    def assign_ref_logprobs(self, values: Values) -> None:
        """Write a reference model's logprobs: one per trainable token [C] or one per token [N]."""
        self._check_open("ref_logprobs")
        self._write("ref_logprobs", np.asarray(values, np.float32))

    def assign_weights(self, component: LossComponent, values: Values) -> None:
        """Write one component's weights: one per trainable token [C] or one per token [N]. 0.0
        leaves a token out."""
        name = f"{component}_weights"
        self._check_open(name)
        self._write(name, np.asarray(values, np.float32))
        self.assigned.add(name)

    def freeze(self) -> None:
        """Freeze the streams: later assignments raise ``StreamError``."""
        self.frozen = True
        for sample in self.samples:
            sample.freeze()

    def _write(self, name: str, values: FloatColumn, off_mask_must_be_zero: bool = False) -> None:
        trainable, total = self.num_trainable_tokens, self.num_tokens
        if not np.isfinite(values).all():
            raise StreamError(f"{self._where(name)}: got a value that is not finite")
        if values.ndim != 1 or len(values) not in (trainable, total):
            raise StreamError(
                f"{self._where(name)} need one value per trainable token or one per token: "
                f"got shape {values.shape}, expected ({trainable},) or ({total},)"
            )
        mask = np.concatenate([s.loss_mask for s in self.samples] or [np.zeros(0, np.bool_)])
        if len(values) == trainable != total:
            values, compact = np.zeros(total, np.float32), values
            values[mask] = compact
        elif off_mask_must_be_zero and values[~mask].any():
            raise StreamError(
                f"{self._where(name)}: got credit on {int((values[~mask] != 0).sum())} tokens the "
                "policy did not sample; expected 0.0 there. To train env-provided tokens use the "
                "hook observation_weights."
            )
        start = 0
        for sample in self.samples:
            setattr(sample, name, values[start : start + len(sample)].copy())
            start += len(sample)

    def _check_open(self, name: str) -> None:
        if self.frozen:
            raise StreamError(
                f"{self._where(name)} are frozen: the rollout is stamped. Assign credit in "
                "score_rollout or score_group."
            )

    def _where(self, name: str) -> str:
        return f"env {self.env!r}, group {self.group_id}: {name}"


Group: TypeAlias = Sequence[Rollout]
"""Sibling rollouts of one example: the cohort a group-relative baseline needs."""
