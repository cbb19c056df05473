"""verifiers' traces of sessions: made, written piece by piece, read again.

A trace is the tree of a session's messages with the tokens of each. verifiers builds it from the
requests; core makes samples of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import verifiers.v1 as vf
from verifiers.v1.graph import MessageNode
from verifiers.v1.session import IdempotentRequest, ReplayResponse, RolloutSession
from verifiers.v1.trace import AgentInfo, TraceTask

from prime_rl_gateway.book import Session
from prime_rl_gateway.store import Line, Place, Record, Reply

VERSIONS = "weight_versions"
"""Key of ``info``: the policy versions of each reply's tokens, as ``(version, start, end)``."""
TURN_REWARDS = "turn_rewards"
"""Key of ``info``: a reward or None for each reply."""
COMPLETED = "agent_completed"


def new_trace(prompt: str | None = None) -> vf.Trace:
    """The trace of a session that has just been opened."""
    config = vf.AgentConfig(runtime={"type": "subprocess"})
    task = TraceTask(type="GatewayTask", data=vf.TaskData(prompt=prompt))
    return vf.Trace(task=task, agent=AgentInfo(config=config))


@dataclass
class Written:
    """What the file of an open session has."""

    size: int = 0
    """Bytes of its whole lines."""
    num_nodes: int = 0
    versions: set[str] = field(default_factory=set)
    """The nodes whose versions it has."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    replies: dict[str, ReplayResponse] = field(default_factory=dict)
    """The newest of each request."""


def news(session: Session, served: RolloutSession, written: Written) -> tuple[Line, Written]:
    """The line that a session's file lacks, and what the file has with it, but for the size. A
    trace grows at its end: nodes that are written are not looked at again."""
    trace = served.trace
    versions: dict[str, Any] = trace.info.get(VERSIONS, {})
    tools = [tool.model_dump(mode="python") for tool in trace.tools]
    replies = {
        key: request.response
        for key, request in served.idempotent_requests.items()
        if request.response is not None
    }
    line = Line(
        place=Place.of(session),
        nodes=[node.model_dump(mode="python") for node in trace.nodes[written.num_nodes :]],
        versions={node: spans for node, spans in versions.items() if node not in written.versions},
        tools=None if tools == written.tools else tools,
        replies={
            key: _reply(served.idempotent_requests[key].binding, response)
            for key, response in replies.items()
            if written.replies.get(key) is not response
        },
    )
    return line, Written(
        num_nodes=len(trace.nodes), versions={*versions}, tools=tools, replies=replies
    )


def _reply(binding: tuple[str, bytes], response: ReplayResponse) -> Reply:
    route, digest = binding
    return Reply(route, digest.hex(), response.content_type, response.body.decode())


def restore(served: RolloutSession, record: Record) -> Written:
    """A client that asks again gets the reply that another process has written. Returns what the
    session's file has."""
    for key, reply in record.replies.items():
        served.idempotent_requests[key] = IdempotentRequest(
            binding=(reply.route, bytes.fromhex(reply.digest)),
            response=ReplayResponse(200, reply.body.encode(), reply.content_type),
            completed_at=time.monotonic(),
        )
    _, written = news(record.place.session(), served, Written(num_nodes=len(record.nodes)))
    written.size = record.size
    return written


def load(record: Record, newest: int | None = None) -> vf.Trace:
    """The trace of a session's file. ``newest``: the policy's version now. A run that went back to
    a checkpoint has none above it: tokens of such versions count as of this one."""
    trace = new_trace()
    trace.nodes = [MessageNode.model_validate(node) for node in record.nodes]
    trace.tools = [vf.Tool.model_validate(tool) for tool in record.tools]
    trace.info[VERSIONS] = {
        node: [
            (version if newest is None else min(version, newest), start, end)
            for version, start, end in spans
        ]
        for node, spans in record.versions.items()
    }
    return trace


def conclude(trace: vf.Trace, reward: float, turn_rewards: Mapping[int, float]) -> None:
    """The session has its reward: the trace is complete."""
    trace.record_reward("reward", reward)
    if turn_rewards:
        trace.info[TURN_REWARDS] = [turn_rewards.get(turn) for turn in range(trace.num_turns)]
    trace.is_completed = True
    trace.ok = True
    trace.stop(COMPLETED)


def spans_of(versions: np.ndarray | None) -> list[tuple[int, int, int]]:
    """Runs of equal versions, ``(version, start, end)``. ``versions``: of each sampled token."""
    if versions is None or not len(versions):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [(int(versions[start]), start, end) for start, end in pairwise(cuts)]


def first_version(trace: vf.Trace) -> int | None:
    """The oldest version that sampled a token."""
    spans = [span for each in trace.info.get(VERSIONS, {}).values() for span in each]
    return min((version for version, _, _ in spans), default=None)
