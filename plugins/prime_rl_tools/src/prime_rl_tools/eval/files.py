"""The folder of an evaluation; ``--resume`` continues from it.

OUTPUT/eval.json              the settings that a rollout depends on
OUTPUT/ENV/rollouts.jsonl     one line per finished rollout, with its whole trace
OUTPUT/summary.json           the figures of each env
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from prime_rl.env.episode import BranchTokens, RolloutResult
from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.rows import read_rows, read_table
from prime_rl_evals.figures import Finished, num_tokens
from prime_rl_tools.eval.request import EvalRequest, folder_of

PLAIN = (
    *("ok", "reward", "rewards", "metrics", "num_turns", "is_truncated", "stop_condition"),
    *("error_type", "error", "status_code", "agent", "timing", "usage"),
)
"""Fields of a result that a line holds as they are."""


class _Line(TypedDict):
    """The fields that are read of a line."""

    ok: bool
    example: int
    member: int
    reward: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    num_turns: int
    is_truncated: bool
    stop_condition: str | None
    error_type: str | None
    error: str | None
    status_code: int | None
    agent: str
    timing: dict[str, float]
    usage: tuple[int, int]
    num_branches: Annotated[int, msgspec.Meta(ge=0, le=10**6)]


Place = tuple[int, int]
"""Example, and member of its group."""


class EvalFiles:
    """One evaluation's folder."""

    def __init__(self, request: EvalRequest) -> None:
        """Open it. Raises ``ConfigError`` if it holds another evaluation, or this one and
        ``resume`` is off."""
        self.folder = request.output
        self._own = request.as_record()
        path = self.folder / "eval.json"
        if path.exists():
            self._check(read_table(path), request.settings.resume)
        for env in request.evaluation.env:
            self.rollouts(env.label).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._own, indent=2), "utf-8")

    def rollouts(self, env: str) -> Path:
        """The file of one env's rollouts."""
        return self.folder / folder_of(env) / "rollouts.jsonl"

    def append(
        self, env: str, place: Place, own: RolloutResult, results: Sequence[RolloutResult]
    ) -> None:
        """Write one rollout: the policy's own result, and the traces of all agents. Raises
        ``RunError`` if writing fails."""
        line = {
            "example": place[0],
            "member": place[1],
            **{name: getattr(own, name) for name in PLAIN},
            "usage": num_tokens(own),  # a line holds no tokens to count
            "num_branches": len(own.branches),
            "messages": own.wire_messages,
            "traces": [_record(result) for result in results],
        }
        try:
            with self.rollouts(env).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.rollouts(env)}: {error}") from error

    def read(self, env: str) -> dict[Place, Finished]:
        """The rollouts that succeeded before, by place; failed ones are sampled again."""
        rows = read_rows(self.rollouts(env), _Line)
        return {
            (row["example"], row["member"]): Finished(row["example"], _result(row))
            for row in rows
            if row["ok"]
        }

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=2), "utf-8")

    def _check(self, before: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            raise ConfigError(
                f"--output: {self.folder} holds an evaluation. Add --resume to continue it, "
                "or name another folder."
            )

        was = _flat(before)
        now = _flat(self._own)
        for key in sorted(was | now):
            if was.get(key) != now.get(key):
                raise ConfigError(
                    f"--resume: {self.folder} was made with other settings: {key} was "
                    f"{was.get(key)!r}, is {now.get(key)!r}. Name another folder."
                )


def _record(result: RolloutResult) -> dict[str, Any]:
    """The whole trace as JSON, as verifiers writes it."""
    trace = result.trace
    return {} if trace is None else trace.model_dump(mode="json", exclude_none=True)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def _result(row: Mapping[str, Any]) -> RolloutResult:
    """The result that a line holds, without tokens."""
    fields = {name: row[name] for name in PLAIN} | {"usage": tuple(row["usage"])}
    branch = BranchTokens(
        [], [], logprobs=[], roles=[], is_content=[], node_ids=[], policy_versions=None
    )
    return RolloutResult(**fields, branches=[branch] * row["num_branches"])
