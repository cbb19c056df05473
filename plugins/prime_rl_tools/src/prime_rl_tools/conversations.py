"""Saved rollouts as conversations to learn from, one JSON line each."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.errors import RunError
from prime_rl.rollout import Rollout
from prime_rl.rundir.status import replace_text
from prime_rl_app.saved_rollouts import read_rollouts, step_files

LOW = "below the reward"
CUT_OFF = "cut off"
TWICE = "that occur twice"
NO_TOOLS = "that call tools, whose descriptions the file does not have"
WRONG_CALL = "with a call that no tool can take"
NO_REPLY = "without a reply"
WORSE = "that are not among the best"


@dataclass
class WrittenCounts:
    """What was written, and what was not, by reason."""

    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def write_conversations(
    run_dir: Path,
    path: Path,
    *,
    min_reward: float | None = None,
    best: int | None = None,
    envs: Collection[str] = (),
) -> WrittenCounts:
    """Write the conversations of a run's rollouts. ``best``: of each example, so many. Raises
    ``RunError`` for a run without saved rollouts, or an env that it does not have."""
    files = step_files(run_dir)
    if not files:
        raise RunError(
            f"{run_dir} has no saved rollouts. orchestrator.save_rollouts = true saves them."
        )

    counts = WrittenCounts()
    seen: set[bytes] = set()
    rows_of: defaultdict[tuple[str, int], list[tuple[float, dict[str, Any]]]] = defaultdict(list)
    names: set[str] = set()
    for step, rollout in _rollouts(files):
        names.add(rollout.env)
        if envs and rollout.env not in envs:
            continue
        why = _why_not(rollout, min_reward)
        if why is None:
            text = json.dumps([rollout.tools, _without_ids(rollout.messages)], sort_keys=True)
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
            why = TWICE if digest in seen else None
            seen.add(digest)
        if why is not None:
            counts.left_out[why] += 1
            continue

        row = {
            "messages": [_openai_form(message) for message in rollout.messages],
            **({"tools": rollout.tools} if rollout.tools else {}),
            "reward": rollout.reward,
            "env": rollout.env,
            "step": step,
        }
        rows_of[rollout.env, rollout.example_id].append((rollout.reward, row))

    unknown = set(envs) - names
    if unknown:
        raise RunError(
            f"{run_dir} has no rollouts of env {min(unknown)!r}; its envs are: "
            f"{', '.join(sorted(names))}"
        )

    lines: list[str] = []
    for rows in rows_of.values():
        rows.sort(key=lambda pair: -pair[0])
        counts.left_out[WORSE] += len(rows[best:]) if best is not None else 0
        lines += [json.dumps(row, ensure_ascii=False) + "\n" for _, row in rows[:best]]

    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, "".join(lines))
    counts.written = len(lines)
    return counts


def _rollouts(files: dict[int, Path]) -> Iterator[tuple[int, Rollout]]:
    for step, path in files.items():
        for rollout in read_rollouts(path)[1]:
            yield step, rollout


def _why_not(rollout: Rollout, min_reward: float | None) -> str | None:
    """The reason to leave a rollout out."""
    if min_reward is not None and not rollout.reward >= min_reward:
        return LOW
    if rollout.is_truncated:
        return CUT_OFF
    calls = [call for message in rollout.messages for call in message.get("tool_calls", ())]
    if calls and not rollout.tools:
        return NO_TOOLS
    known = {tool["function"]["name"] for tool in rollout.tools}
    if not all(call["name"] in known and _is_object(call["arguments"]) for call in calls):
        return WRONG_CALL
    if not rollout.reply:
        return NO_REPLY
    return None


def _is_object(arguments: str) -> bool:
    """Whether a tool could be called with it. Trainers that read the file refuse the rest."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _openai_form(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    wire = [
        {"id": call["id"], "type": "function", "function": function}
        for call, function in zip(calls, functions, strict=True)
    ]
    return message | {"tool_calls": wire}


def _without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids of calls differ in conversations that are otherwise the same."""
    plain = []
    for message in messages:
        named = {name: value for name, value in message.items() if name != "tool_call_id"}
        if "tool_calls" in named:
            named["tool_calls"] = [
                {name: value for name, value in call.items() if name != "id"}
                for call in named["tool_calls"]
            ]
        plain.append(named)
    return plain
