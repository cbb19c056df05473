"""From verifiers' episode to our results, and from a result to a rollout.

    episode -> RolloutResult    failures with their reasons, branches as aligned columns
    results -> checked          what cannot be trained on, saved and shown has failed
    branches -> samples         one sample per branch; a shared sampled token trains once

A trajectory is a tree of messages. While each turn's prompt extends the previous tokens exactly,
its branch grows and stays one sample; where it does not (thinking stripped, a hand-over to a
sub-agent), a new branch starts. A node on several branches trains in the first of them only.

Reads attributes of verifiers' objects and does not import it at run time.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from prime_rl.env.episode import BranchTokens, RolloutResult, readable, reason_of
from prime_rl.errors import StreamError
from prime_rl.rewards import settled
from prime_rl.rollout import ROLES, TURN_REWARDS, Rollout, Sample
from prime_rl.streams import BoolColumn

if TYPE_CHECKING:
    from verifiers.v1 import Episode, Trace

_ROLE_INDEX = {role: index for index, role in enumerate(ROLES)}
VERSIONS_KEY = "weight_versions"
"""Key of ``trace.info``: a harness may leave ``{node index: [(policy version, start, end)]}``."""

BAD_RESULT = "BadResult"
"""The class of a failure in which an environment or an engine returned an unusable result."""

LARGEST_REWARD = 1e18
"""A group's rewards are squared and added in float32, which ends at 3.4e38."""
LARGEST_METRIC = float(np.finfo(np.float32).max)
LARGEST_LOGPROB = 0.01
"""The log of a probability is at most 0; the rest is for an engine that rounds."""
LARGEST_INT = 2**31 - 1
"""Token ids and versions are int32 on the wire."""


def results_of(
    episode: Episode,
    with_tokens: bool = True,
    fixed: Container[str] = (),
    vocab_size: int | None = None,
) -> list[RolloutResult]:
    """One result per trace. If one failed, all are failed: half an episode does not train.

    ``with_tokens``: a trace whose agent trains has failed if it has no sampled tokens.
    ``fixed``: agents that a model of their own plays; they never train.
    ``vocab_size``: the policy's. None: unknown.
    """
    failure = ("TimeoutError", "the episode timed out") if episode.is_timeout else None
    if episode.errors:  # of the env
        failure = episode.errors[-1].type, _with_our_key(episode.errors[-1].message)

    if not episode.traces:
        kind, text = failure or ("NoTrace", "the episode ran no agent")
        return [failed(kind, text)]

    # Nothing below, and nothing that reads a result, can be trusted with a malformed trace.
    for trace in episode.traces:
        fault = fault_of_nodes(trace, vocab_size)
        if fault is not None:
            own_failure = None if trace.ok else trace_failure(trace)
            kind, text = failure or own_failure or (BAD_RESULT, fault)
            error = None if trace.ok else trace.last_error
            return [failed(kind, text, None if error is None else error.status_code)]

    failures = [
        failure or trace_failure(trace, with_tokens and trace.agent.name not in fixed)
        for trace in episode.traces
    ]
    first_failure = next((each for each in failures if each), None)

    results = [
        result_of(trace, of_trace or first_failure, trace.agent.name not in fixed)
        for trace, of_trace in zip(episode.traces, failures, strict=True)
    ]
    return checked(results)


def failed(kind: str, text: str, status_code: int | None = None) -> RolloutResult:
    """The result of an episode that nothing else is known of."""
    return RolloutResult(
        ok=False, error_type=readable(kind), error=reason_of(text), status_code=status_code
    )


def _with_our_key(message: str) -> str:
    """A message of verifiers that names an option of its own command line, with our key for it."""
    for option in ("--env.timeout.episode", "--env.timeout.finalize"):
        message = message.replace(option, "timeout in the env's table")
    return message


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

    # A node has no number of its own: its place in the trace counts.
    index = {id(node): position for position, node in enumerate(trace.nodes)}
    usage = (0, 0)
    # Without token ids, only the server's own counts are known.
    if trace.usage is not None and not any(node.token_ids for node in trace.nodes):
        usage = trace.num_input_tokens, trace.usage.completion_tokens

    stop = trace.stop_condition
    return RolloutResult(
        ok=failure is None,
        reward=_reward_of(trace),
        rewards={name: term.score for name, term in trace.rewards.items() if term is not None},
        reward_weights={n: float(term.weight) for n, term in trace.rewards.items() if term},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        info=info,
        num_turns=trace.num_turns,
        is_truncated=trace.is_truncated,
        stop_condition=None if stop is None else readable(stop),
        has_images=any(has_image(node.message.content) for node in trace.nodes),
        error_type=None if failure is None else readable(failure[0]),
        error=None if failure is None else reason_of(failure[1]),
        status_code=trace.last_error.status_code if failure and trace.last_error else None,
        agent=trace.agent.name,
        trainable=trace.agent.trainable and may_train,
        branches=[] if failure else [branch_tokens(b, index, versions) for b in trace.branches],
        trace=trace,
        timing=timing_of(trace),
        usage=usage,
    )


def has_image(content: Any) -> bool:
    """Whether the content of a message has a part that is no text."""
    parts = content if isinstance(content, list) else ()
    return any(part.type != "text" for part in parts)


# -- what an environment or an engine may return ------------------------------------------------


def fault_of_nodes(trace: Trace, vocab_size: int | None = None) -> str | None:
    """Why the tokens of a trace cannot be read; None: they can."""
    versions = trace.info.get(VERSIONS_KEY)
    if versions is not None and not isinstance(versions, Mapping):
        return f"info[{VERSIONS_KEY!r}] is {versions!r:.80}; expected a table by node"

    for place, node in enumerate(trace.nodes):
        spans = () if versions is None else versions.get(str(place), ())
        try:
            fault = _fault_of_node(node, place, vocab_size) or _fault_of_spans(spans)
        except Exception as error:  # a column that numpy cannot read, an attribute that is missing
            fault = f"{type(error).__name__}: {error}"

        if fault is not None:
            return f"message {place} of the trace: {fault}"

    return None


def _fault_of_node(node: Any, place: int, vocab_size: int | None) -> str | None:
    """Why a message cannot train; ``place`` is its index in the trace."""
    parent = node.parent
    if parent is not None and not (type(parent) is int and 0 <= parent < place):
        return f"its parent is {parent!r}; expected an earlier message or None"
    if not isinstance(node.message.role, str):
        return f"its role is {node.message.role!r:.80}; expected a text"

    token_ids = np.asarray(node.token_ids)
    largest = LARGEST_INT if vocab_size is None else vocab_size - 1
    if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
        return f"its token_ids are {node.token_ids!r:.80}; expected a list of integers"

    outside = np.flatnonzero((token_ids < 0) | (token_ids > largest))
    if outside.size:
        first = int(outside[0])
        return f"token_ids[{first}] is {token_ids[first]}; expected 0 to {largest}"

    mask = np.asarray(node.mask)
    if mask.shape != token_ids.shape or (mask.size and mask.dtype.kind != "b"):
        return (
            f"its mask is {node.mask!r:.80} ({len(node.mask)}); expected True or False for each "
            f"of its {len(token_ids)} tokens"
        )

    if len(node.is_content) not in (0, len(token_ids)):
        return (
            f"is_content has {len(node.is_content)} values; expected none, or one for each of its "
            f"{len(token_ids)} tokens"
        )

    return _fault_of_logprobs(node.logprobs, int(mask.sum())) or _fault_of_routes(node)


def _fault_of_logprobs(values: Any, number: int) -> str | None:
    """``number``: the tokens that were sampled. Their logprobs go over the wire as float32."""
    logprobs = np.asarray(values)
    if logprobs.shape != (number,) or (number and logprobs.dtype.kind not in "fiu"):
        return (
            f"its logprobs are {values!r:.80} ({len(values)}); expected a number for each of the "
            f"{number} sampled tokens"
        )

    # A number beyond float32 becomes inf, which is refused.
    with np.errstate(over="ignore"):
        narrow = logprobs.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(narrow) | (narrow > LARGEST_LOGPROB))
    if wrong.size:
        first = int(wrong[0])
        return (
            f"logprobs[{first}] is {logprobs[first]}; expected the logprob of the sampling "
            "distribution: finite, and at most 0"
        )

    return None


def _fault_of_routes(node: Any) -> str | None:
    """A node has none if its engine did not record them."""
    routes = node.routed_experts
    if routes is None:
        return None

    length = len(node.token_ids)
    fits = routes.ndim == 3 and len(routes) == length and 0 not in routes.shape[1:]
    if not fits or routes.dtype not in (np.uint8, np.uint16):
        return (
            f"its routed_experts are {routes.dtype} of shape {routes.shape}; expected uint8 or "
            f"uint16 of shape ({length}, layers, experts per token)"
        )

    return None


def _fault_of_spans(spans: Any) -> str | None:
    """Spans are ``(policy version, start, end)``; an end behind the last token is cut."""
    for span in spans:
        whole = all(type(value) is int for value in span)
        if not whole or len(span) != 3 or min(span) < 0 or max(span) > LARGEST_INT:
            return (
                f"a span of its policy versions is {span!r:.80}; expected (version, start, end), "
                "three integers from 0"
            )
    return None


def _reward_of(trace: Trace) -> float:
    """The sum of the weighted terms, without its rounding. Terms are settled first: a sum of terms
    that were computed in float32 has more rounding than a sum in float64 may have."""
    present = [term for term in trace.rewards.values() if term is not None]
    terms = [settled(term.score) * term.weight for term in present]
    sizes = [abs(term) for term in terms if math.isfinite(term)]
    return settled(sum(terms), scale=max(sizes, default=1.0))


LARGEST_INFO = 16 << 20
"""Bytes of ``info``, encoded."""


def checked(results: Sequence[RolloutResult]) -> list[RolloutResult]:
    """The results, or a single failed one if a result cannot be trained on, saved and shown. A
    result that has failed anyway keeps its reason, and loses what cannot be saved."""
    passed: list[RolloutResult] = []
    for result in results:
        fault = fault_of(result)
        if fault is None:
            passed.append(_plain(result))
        elif result.ok:
            return [failed(BAD_RESULT, fault)]
        else:
            kind = result.error_type or "Failed"
            text = result.error or fault
            passed.append(failed(kind, text, result.status_code))

    return passed


def _plain(result: RolloutResult) -> RolloutResult:
    """The result with numbers that are Python's floats: an env may have given numpy's."""
    return replace(
        result,
        reward=float(result.reward),
        rewards={name: float(value) for name, value in result.rewards.items()},
        metrics={name: float(value) for name, value in result.metrics.items()},
    )


def fault_of(result: RolloutResult) -> str | None:
    """Why what an environment returned cannot be trained on, saved and shown; None: it can."""
    for name, value in (result.rewards | {"the sum": result.reward}).items():
        if not _is_number(value, LARGEST_REWARD):
            return _wrong_number("reward", name, value=value, largest=LARGEST_REWARD)

    for name, value in (result.metrics | result.timing).items():
        if not _is_number(value, LARGEST_METRIC):
            return _wrong_number("metric", name, value=value, largest=LARGEST_METRIC)

    try:
        size = _saved_size(result)
    except Exception as error:  # a lone surrogate, a cycle, a key that is no text ...
        reason = f"{type(error).__name__}: {error}"
        return f"info, the example, a name or a tool cannot be saved: {reason}"

    return f"info has {size:,} bytes, at most {LARGEST_INFO:,} fit" if size > LARGEST_INFO else None


def _is_number(value: Any, largest: float) -> bool:
    """Whether it is a finite number of at most this size. NaN compares as False."""
    if not isinstance(value, Real):
        return False
    try:
        # As a float: in a narrower class the limit itself would be infinite.
        return abs(float(value)) <= largest
    except OverflowError:  # an integer
        return False


def _wrong_number(kind: str, name: str, value: Any, largest: float) -> str:
    return (
        f"the {kind} {name!r} is {value!r:.80}; expected a finite number, at most {largest:g} in "
        "size (the trainer computes in float32)"
    )


class _Saved(msgspec.Struct):
    """The fields of a result that a file of rollouts stores, apart from its tokens."""

    info: dict[str, Any]
    task: dict[str, Any]
    rewards: dict[str, float]
    metrics: dict[str, float]
    agent: str
    tools: list[dict[str, Any]]


FILE_DEPTH = 16
"""Levels of nesting that a file puts around what an environment returned."""


def _saved_size(result: RolloutResult) -> int:
    """Bytes of a result in a file of rollouts. Raises an error of any class if what is read from
    the file would be something else than what was written, or nothing."""
    task = result.task_fields
    saved: Any = {
        "info": result.info,
        "task": task,
        "rewards": {name: float(value) for name, value in result.rewards.items()},
        "metrics": {name: float(value) for name, value in result.metrics.items()},
        "agent": result.agent,
        "tools": result.tools,
    }

    # The value is tested at the depth that it has in the file: deep nesting cannot be decoded.
    for _ in range(FILE_DEPTH):
        saved = [saved]
    encoded = msgspec.msgpack.encode(saved, enc_hook=_text_or_list)

    read: Any = msgspec.msgpack.decode(encoded)
    for _ in range(FILE_DEPTH):
        (read,) = read
    # Values whose type the file changes, such as the keys of a table, fail here.
    msgspec.convert(read, _Saved)
    return len(encoded)


def _text_or_list(value: Any) -> Any:
    """The form in which files of rollouts store a value that msgpack has no type for."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def branch_tokens(
    branch: Any, index: Mapping[int, int], versions: Mapping[str, list[tuple[int, int, int]]] | None
) -> BranchTokens:
    """Columns of one branch; ``index`` maps a node's ``id()`` to its place in the trace."""
    roles: list[str] = []
    content: list[bool | None] = []
    node_ids: list[int] = []
    policy: list[int] = []

    for node in branch.nodes:
        length = len(node.token_ids)
        position = index[id(node)]
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
        routed_experts=branch.routed_experts,
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
    is_list = isinstance(rewards, list | tuple | np.ndarray)

    if (
        not is_list
        or len(rewards) != len(turns)
        or not all(reward is None or _is_number(reward, LARGEST_REWARD) for reward in rewards)
    ):
        raise StreamError(
            f"trace.info[{TURN_REWARDS!r}]: got {rewards!r:.200}, expected a list with a finite "
            f"number, at most {LARGEST_REWARD:g} in size, or None for each of the {len(turns)} "
            "replies in trace.assistant_messages"
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
        reward_weights=dict(result.reward_weights),
        metrics=dict(result.metrics),
        info=dict(result.info),
        num_turns=result.num_turns,
        is_truncated=result.is_truncated,
        stop_condition=result.stop_condition,
        policy_version=policy_version,
        agent=result.agent,
        messages=result.saved_messages,
        tools=result.tools,
        trace=result.trace,
    )


def rollout_of(
    trace: Trace,
    *,
    env: str,
    example_id: int,
    group_id: int,
    policy_version: int,
    temperature: float,
    vocab_size: int | None = None,
) -> Rollout:
    """The rollout of one complete trace that no episode of ours has run. Raises ``StreamError`` for
    one that cannot train."""
    fault = fault_of_nodes(trace, vocab_size)
    if fault is not None:
        raise StreamError(fault)

    (result,) = checked([result_of(trace, trace_failure(trace))])
    if not result.ok:
        raise StreamError(f"{result.error_type}: {result.error}")
    if result.has_images:
        raise StreamError("a message has an image, and there is no training on images")

    rollout = build_rollout(
        result,
        env=env,
        example_id=example_id,
        group_id=group_id,
        policy_version=policy_version,
        temperature=temperature,
    )
    if not rollout.samples:
        raise StreamError("it has no token to train")

    return rollout


def build_samples(branches: Sequence[BranchTokens], temperature: float) -> list[Sample]:
    """The samples of one episode, in the order of their first sampled turns; branches with nothing
    left to train have none."""
    seen: set[int] = set()
    samples = []
    # Branches are sorted by time: a token trains in the first branch that has it.
    for branch in sorted(branches, key=_first_turn):
        if not branch.trainable:
            continue

        # A message of an earlier sample is a repeat in this one.
        repeats = np.isin(np.asarray(branch.node_ids, np.int64), list(seen))
        mask = np.asarray(branch.sampled_mask, np.bool_) & ~repeats
        if mask.any():
            samples.append(_sample(branch, mask, repeats=repeats, temperature=temperature))
            # Only messages that a sample has count as seen.
            seen.update(branch.node_ids)

    return samples


def _first_turn(branch: BranchTokens) -> int:
    """The node of its first sampled token: nodes are numbered in time order."""
    for node, is_sampled in zip(branch.node_ids, branch.sampled_mask, strict=True):
        if is_sampled:
            return node
    return -1


def _sample(
    branch: BranchTokens, mask: BoolColumn, repeats: BoolColumn, temperature: float
) -> Sample:
    logprobs = np.asarray(branch.logprobs, np.float32)
    if not np.isfinite(logprobs[mask]).all():
        raise StreamError(
            "a sampled token has a logprob that is not finite; the engine must return the logprob "
            "of the sampling distribution"
        )

    versions = branch.policy_versions
    flags = branch.is_content or ()
    content = None
    if any(flag is not None for flag in flags):  # otherwise the renderer attributes nothing
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
        routed_experts=_computed_routes(branch),
    )


def _computed_routes(branch: BranchTokens) -> Any:
    """The experts by which the sampler has computed each token. It has not computed a last token
    that it has sampled, for which verifiers has those of the token before."""
    routes = branch.routed_experts
    if routes is None or not branch.sampled_mask[-1]:
        return routes
    routes = np.array(routes)
    routes[-1] = np.iinfo(routes.dtype).max  # absent
    return routes
