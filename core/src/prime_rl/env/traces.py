"""From verifiers' episode to our results: failures with their reasons, branches as aligned columns.

Reads attributes of verifiers' objects and does not import it at run time.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from prime_rl.env.episode import BranchTokens, RolloutResult
from prime_rl.errors import StreamError
from prime_rl.turns import TURN_REWARDS

if TYPE_CHECKING:
    from verifiers.v1 import Episode, Trace

VERSIONS_KEY = "weight_versions"
"""Key of ``trace.info``: a harness may leave ``{node index: [(policy version, start, end)]}``."""


def results_of(
    episode: Episode, with_tokens: bool = True, fixed: Container[str] = ()
) -> list[RolloutResult]:
    """One result per trace. If one failed, all are failed: half an episode does not train.

    ``with_tokens``: a trace whose agent trains has failed if it has no sampled tokens.
    ``fixed``: agents that a model of their own plays; they never train.
    """
    failure = episode_failure(episode)
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


def episode_failure(episode: Episode) -> tuple[str, str] | None:
    """``(class, text)`` of a failure of the episode itself: an error of the env, or a timeout."""
    if episode.errors:
        return episode.errors[-1].type, episode.errors[-1].message
    return ("TimeoutError", "the episode timed out") if episode.is_timeout else None


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
    return RolloutResult(
        ok=failure is None,
        reward=trace.reward,
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
        usage=usage_of(trace),
    )


def branch_tokens(
    branch: Any,
    index: Mapping[int, int],
    versions: Mapping[str, list[tuple[int, int, int]]] | None,
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


def usage_of(trace: Trace) -> tuple[int, int]:
    """Tokens in and out as the server counted them, for a trace without tokens."""
    if any(node.token_ids for node in trace.nodes) or trace.usage is None:
        return 0, 0
    return trace.num_input_tokens, trace.usage.completion_tokens


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
