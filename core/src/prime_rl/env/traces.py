"""From verifiers' episode to our results, and from a result to a rollout.

    episode -> RolloutResult    failures with their reasons, branches as aligned columns
    branches -> samples         one sample per branch; a shared sampled token trains once

A trajectory is a tree of messages. While each turn's prompt extends the previous tokens exactly,
its branch grows and stays one sample; where it does not (thinking stripped, a hand-over to a
sub-agent), a new branch starts. A node on several branches trains in the first of them only.

Reads attributes of verifiers' objects and does not import it at run time.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import inf, isfinite
from numbers import Real
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from prime_rl.env.episode import BranchTokens, RolloutResult
from prime_rl.errors import StreamError
from prime_rl.rewards import settled
from prime_rl.rollout import ROLES, TURN_REWARDS, Rollout, Sample
from prime_rl.streams import BoolColumn

if TYPE_CHECKING:
    from verifiers.v1 import Episode, Trace

_ROLE_INDEX = {role: index for index, role in enumerate(ROLES)}
VERSIONS_KEY = "weight_versions"
"""Key of ``trace.info``: a harness may leave ``{node index: [(policy version, start, end)]}``."""


def results_of(
    episode: Episode, with_tokens: bool = True, fixed: Container[str] = ()
) -> list[RolloutResult]:
    """One result per trace. If one failed, all are failed: half an episode does not train.

    ``with_tokens``: a trace whose agent trains has failed if it has no sampled tokens.
    ``fixed``: agents that a model of their own plays; they never train.
    """
    failure = ("TimeoutError", "the episode timed out") if episode.is_timeout else None
    if episode.errors:  # of the env
        failure = episode.errors[-1].type, episode.errors[-1].message
    if not episode.traces:
        kind, text = failure or ("NoTrace", "the episode ran no agent")
        return [RolloutResult(ok=False, error_type=kind, error=text)]
    failures = [
        failure or trace_failure(trace, with_tokens and trace.agent.name not in fixed)
        for trace in episode.traces
    ]
    sibling = next((found for found in failures if found), None)
    return [
        result_of(trace, own or sibling, trace.agent.name not in fixed)
        for trace, own in zip(episode.traces, failures, strict=True)
    ]


def trace_failure(trace: Trace, with_tokens: bool = True) -> tuple[str, str] | None:
    """``(class, text)`` of the reason why a trace must not train, or None."""
    if not trace.ok:
        error = trace.last_error
        return (error.type, error.message) if error else ("Failed", f"{trace.stop_condition}")
    if trace.is_timeout:
        return "TimeoutError", f"{trace.stop_condition}"
    sampled = [node for node in trace.nodes if node.sampled]
    if trace.agent.trainable and not any(any(n.mask) or not with_tokens for n in sampled):
        return "NoTokens", f"no tokens were sampled (stopped by {trace.stop_condition})"
    return None


def result_of(
    trace: Trace, failure: tuple[str, str] | None, may_train: bool = True
) -> RolloutResult:
    """The result of one trace; a failed one carries no tokens."""
    info = dict(trace.info)
    versions = info.pop(VERSIONS_KEY, None)
    if failure is None and TURN_REWARDS in info:
        info[TURN_REWARDS] = rewards_by_node(trace, info[TURN_REWARDS])
    index = {id(node): position for position, node in enumerate(trace.nodes)}
    usage = (0, 0)
    if trace.usage is not None and not any(node.token_ids for node in trace.nodes):
        usage = trace.num_input_tokens, trace.usage.completion_tokens
    return RolloutResult(
        ok=failure is None,
        reward=_reward_of(trace),
        rewards={name: term.score for name, term in trace.rewards.items() if term is not None},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        info=info,
        num_turns=trace.num_turns,
        is_truncated=trace.is_truncated,
        stop_condition=trace.stop_condition,
        error_type=failure[0] if failure else None,
        error=failure[1] if failure else None,
        status_code=trace.last_error.status_code if failure and trace.last_error else None,
        agent=trace.agent.name,
        trainable=trace.agent.trainable and may_train,
        branches=[] if failure else [branch_tokens(b, index, versions) for b in trace.branches],
        trace=trace,
        timing=timing_of(trace),
        usage=usage,
    )


def _reward_of(trace: Trace) -> float:
    """The sum of the weighted terms, without its rounding."""
    terms = [abs(term.score * term.weight) for term in trace.rewards.values() if term is not None]
    finite = [term for term in terms if isfinite(term)]
    return settled(trace.reward, scale=max(finite, default=1.0))


LARGEST_INFO = 16 << 20
"""Bytes of ``info``, encoded."""


def fault_of(result: RolloutResult) -> str | None:
    """Why what an environment returned cannot be trained on, saved and shown; None: it can."""
    numbers = result.rewards | result.metrics | {"the sum": result.reward}
    for name, value in numbers.items():
        if not (isinstance(value, Real) and abs(value) < inf):
            return f"the reward or metric {name!r} is {value!r:.80}; expected a finite number"
    nested: Any = [result.info, numbers]
    for _ in range(16):  # what saves it nests it too
        nested = [nested]
    try:
        size = len(msgspec.msgpack.encode(nested, enc_hook=str))
    except Exception as error:  # a lone surrogate, a cycle, an int of more than 64 bits ...
        return f"info or a number cannot be saved: {type(error).__name__}: {error}"
    return f"info has {size:,} bytes, at most {LARGEST_INFO:,} fit" if size > LARGEST_INFO else None


def branch_tokens(
    branch: Any, index: Mapping[int, int], versions: Mapping[str, list[tuple[int, int, int]]] | None
) -> BranchTokens:
    """Columns of one branch; ``index`` maps a node's ``id()`` to its place in the trace."""
    roles: list[str] = []
    content: list[bool | None] = []
    node_ids: list[int] = []
    policy: list[int] = []
    for node in branch.nodes:
        length, position = len(node.token_ids), index[id(node)]
        roles += [node.message.role] * length
        content += node.is_content or [None] * length
        node_ids += [position] * length
        policy += node_versions(node.mask, (versions or {}).get(str(position), ()))
    return BranchTokens(
        token_ids=branch.token_ids,
        sampled_mask=branch.sampled_mask,
        logprobs=branch.logprobs,
        roles=roles,
        is_content=content,
        node_ids=node_ids,
        policy_versions=None if versions is None else policy,
        trainable=branch.trainable,
    )


def node_versions(mask: list[bool], spans: Any) -> list[int]:
    """Policy version of each token of a node; spans count its sampled tokens, which come last."""
    column = [-1] * len(mask)
    first = len(mask) - sum(mask)
    for version, start, end in spans:
        for position in range(first + start, min(first + end, len(mask))):
            column[position] = version
    return column


def rewards_by_node(trace: Trace, rewards: list[float | None]) -> dict[str, float]:
    """Rewards of turns, by the node of each. Raises ``StreamError`` unless there is a finite number
    or None for each turn."""
    turns = [str(position) for position, node in enumerate(trace.nodes) if node.sampled]
    if len(rewards) != len(turns) or not all(r is None or isfinite(r) for r in rewards):
        raise StreamError(
            f"trace.info[{TURN_REWARDS!r}]: got {rewards}, expected a list with a finite number or "
            f"None for each of the {len(turns)} replies in trace.assistant_messages"
        )
    return {n: float(r) for n, r in zip(turns, rewards, strict=True) if r is not None}


def timing_of(trace: Trace) -> dict[str, float]:
    """Seconds per stage; ``agent`` includes the model and the harness."""
    timing = trace.timing
    return {
        "setup": timing.boot.duration + timing.setup.duration,
        "agent": timing.agent.duration,
        "agent/model": timing.agent.model.duration,
        "agent/harness": timing.agent.harness.duration,
        "finalize": timing.finalize.duration,
        "scoring": timing.scoring.duration,
    }


def build_rollout(
    result: RolloutResult,
    *,
    env: str,
    example_id: int,
    group_id: int,
    policy_version: int,
    temperature: float,
) -> Rollout:
    """The rollout that plugins see of one successful episode."""
    return Rollout(
        env=env,
        example_id=example_id,
        group_id=group_id,
        reward=result.reward,
        samples=build_samples(result.branches, temperature),
        rewards=dict(result.rewards),
        metrics=dict(result.metrics),
        info=dict(result.info),
        num_turns=result.num_turns,
        is_truncated=result.is_truncated,
        stop_condition=result.stop_condition,
        policy_version=policy_version,
        agent=result.agent,
        trace=result.trace,
    )


def build_samples(branches: Sequence[BranchTokens], temperature: float) -> list[Sample]:
    """The samples of one episode, in the order of their first sampled turns; branches with nothing
    left to train have none."""
    seen: set[int] = set()
    samples = []
    for branch in sorted(branches, key=_first_turn):
        if not branch.trainable:
            continue
        repeats = np.isin(np.asarray(branch.node_ids, np.int64), list(seen))
        mask = np.asarray(branch.sampled_mask, np.bool_) & ~repeats
        if mask.any():
            samples.append(_sample(branch, mask, repeats, temperature))
            seen.update(branch.node_ids)
    return samples


def _first_turn(branch: BranchTokens) -> int:
    """The node of its first sampled token: nodes are numbered in time order."""
    sampled = (n for n, mine in zip(branch.node_ids, branch.sampled_mask, strict=True) if mine)
    return next(sampled, -1)


def _sample(
    branch: BranchTokens, mask: BoolColumn, repeats: BoolColumn, temperature: float
) -> Sample:
    logprobs = np.asarray(branch.logprobs, np.float32)
    if not np.isfinite(logprobs[mask]).all():
        raise StreamError(
            "a sampled token has a logprob that is not finite; the engine must return the logprob "
            "of the sampling distribution"
        )
    versions, flags, content = branch.policy_versions, branch.is_content or (), None
    if any(flag is not None for flag in flags):  # else the renderer attributes nothing
        # A message without attribution counts as body as a whole.
        content = np.array([flag is not False for flag in flags], np.bool_)
    return Sample(
        token_ids=np.asarray(branch.token_ids, np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, logprobs, np.float32(0.0)),
        temperature=temperature,
        roles=np.array([_ROLE_INDEX.get(role, -1) for role in branch.roles], np.int8),
        is_content=content,
        is_repeat=repeats if repeats.any() else None,
        node_ids=np.asarray(branch.node_ids, np.int32),
        policy_versions=None
        if versions is None
        else np.where(mask, np.asarray(versions, np.int32), np.int32(-1)),
    )
