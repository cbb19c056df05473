"""The nouns every plugin sees: Rollout, Group, Sample, and the per-token streams.

    Rollout (a finished episode) -> 1..n Sample (one token sequence each) -> columns of length T

Shapes: T = tokens of one sample, env-provided and sampled ones interleaved;
        C = trainable tokens of one rollout, over all its samples; N = all tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prime_rl.plugins.base import LossComponent
from prime_rl.plugins.errors import StreamError

FloatColumn: TypeAlias = npt.NDArray[np.float32]
BoolColumn: TypeAlias = npt.NDArray[np.bool_]
IntColumn: TypeAlias = npt.NDArray[np.int32]
Values: TypeAlias = Sequence[float] | npt.NDArray[Any]

ROLES = ("system", "user", "assistant", "tool")
"""Message roles; a token's role is its index here, -1 where nobody knows."""

STREAMS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
"""The optional per-token streams. Absent: rl weighs 1.0 on every trainable token, the others
nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One token sequence the trainer will see. Every column has length T."""

    token_ids: IntColumn
    loss_mask: BoolColumn
    """True where the policy sampled the token and it is to be trained."""
    inference_logprobs: FloatColumn
    """log μ under the policy that sampled the token, at the temperature it was sampled at; 0.0 off
    the mask."""
    temperature: float = 1.0
    roles: npt.NDArray[np.int8] | None = None
    """Index into ``ROLES`` of the message each token belongs to, -1 unknown. None: no attribution.
    """
    is_content: BoolColumn | None = None
    """True on a message's body, False on the chat template's scaffold. None: no attribution."""
    policy_versions: IntColumn | None = None
    """Version of the policy that sampled each token; -1 off the mask."""
    is_repeat: BoolColumn | None = None
    """True where an earlier sample of the rollout holds the same token of the same message: it
    trains there and not here. None: nowhere."""
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
        """Make every column read-only: from here on the sample is what the trainer will see."""
        for name in COLUMNS:
            if (column := getattr(self, name)) is not None:
                column.flags.writeable = False


_OPTIONAL: Mapping[str, type] = {
    "roles": np.int8,
    "is_content": np.bool_,
    "policy_versions": np.int32,
    "is_repeat": np.bool_,
    **dict.fromkeys(STREAMS, np.float32),
}

COLUMNS = ("token_ids", "loss_mask", "inference_logprobs", *_OPTIONAL)
"""Every per-token column a sample may carry."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One finished episode of one agent: its reward, and the samples cut from its trajectory."""

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
    """The policy's version when the rollout's group was started: staleness counts from here."""
    episode_id: int = 0
    """Which episode of the group it belongs to: the agents of one episode share it."""
    agent: str = "agent"
    """The env's seat that acted."""
    task: dict[str, Any] = field(default_factory=dict)
    """The fields of the example, ``prompt`` among them."""
    source: str = "policy"
    """Who produced it: ``policy``, ``frozen``, or the type of a source."""
    has_logprobs: bool = True
    """Its ``inference_logprobs`` are those of who sampled it. False: nobody sampled it, or nobody
    told."""
    trace: Any = None
    """The env framework's own record (a ``verifiers`` trace)."""
    place: tuple[int, int, int, int] | None = None
    """When it was scored: the attempt at the run, the group within it, the member within that, and
    the group's size. Core writes it, so that saved rollouts can be scored again in the same order.
    """
    given: dict[str, Any] | None = None
    """What a plugin that scores it may have changed (``reward``, ``rewards``, ``metrics``,
    ``info``), as it was before. Core writes it, so that saved rollouts can be scored again; None:
    nothing was changed.
    """
    assigned: set[str] = field(default_factory=set)
    """Streams that an algorithm has written itself: stamping leaves them as they are."""
    frozen: bool = False

    @property
    def is_live(self) -> bool:
        """Sampled from the policy: it ages with every version."""
        return self.source == "policy"

    @property
    def has_members(self) -> bool:
        """Whether any token trains in any component, as the streams stand."""
        return any(
            bool((s.loss_mask if s.rl_weights is None else s.loss_mask & (s.rl_weights != 0)).any())
            or any(w is not None and bool(w.any()) for w in (s.ce_weights, s.ref_kl_weights))
            for s in self.samples
        )

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
    def advantages(self) -> FloatColumn | None:
        """Credit on the trainable tokens, in order: [C]. None until assigned."""
        parts = [
            sample.advantages[sample.loss_mask]
            for sample in self.samples
            if sample.advantages is not None
        ]
        if len(parts) < len(self.samples) or not parts:
            return None
        return np.concatenate(parts)

    def assign_advantages(self, credit: float | Values) -> None:
        """Write per-token credit.

        ``credit`` is one number (for every trainable token), one value per trainable token [C], or
        one per token [N] with 0.0 off the mask; the list forms are told apart by length. Raises
        ``StreamError`` on any other length, on a value that is not finite, and on credit off the
        mask.
        """
        self._check_open("advantages")
        values = np.asarray(credit, np.float32)
        if values.ndim == 0:
            if not np.isfinite(values):
                raise StreamError(
                    f"{self._where('advantages')}: got {credit}, expected a finite number"
                )
            for sample in self.samples:
                sample.advantages = np.where(sample.loss_mask, values, np.float32(0.0))
            return
        self._write("advantages", values, off_mask_must_be_zero=True)

    def assign_ref_logprobs(self, values: Values) -> None:
        """Write a reference model's log-probabilities: one per trainable token [C] or one per token
        [N]."""
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
        """Stamp the streams: any later assignment raises ``StreamError``."""
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
                "policy did not "
                "sample; expected 0.0 there. To train env-provided tokens use the hook "
                "observation_weights."
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
