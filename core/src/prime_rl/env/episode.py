"""Inputs and outputs of an environment: plain data, no verifiers.

Shapes: T = tokens of one branch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from pydantic import TypeAdapter

from prime_rl.config.orchestrator import EnvConfig, SourceConfig

if TYPE_CHECKING:
    from verifiers.v1 import Task, Trace


def readable(text: Any) -> str:
    """The text without lone surrogates, which no file and no terminal takes. ``text`` may be an
    error of an environment, and making its text may fail."""
    try:
        return str(text).encode("utf-8", "replace").decode()
    except Exception as error:
        return f"its text cannot be made: {type(error).__name__}"


LONGEST_REASON = 20_000
"""Characters of a failure's text. An error may carry a whole document, once for each rollout."""


def reason_of(text: Any) -> str:
    """The text of a failure for logs and records: both of its ends, if it is long."""
    whole = readable(text)
    if len(whole) <= LONGEST_REASON:
        return whole
    end = LONGEST_REASON // 2
    left_out = len(whole) - 2 * end
    return f"{whole[:end]} ... ({left_out:,} characters left out) ... {whole[-end:]}"


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """One environment, as configured."""

    id: str
    """The taskset's id, as verifiers resolves it."""
    name: str = ""
    """Label in errors. Empty: the id."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """The taskset's settings, and the env's own where it has some."""
    harness: Mapping[str, Any] | None = None
    """``id`` and settings. None: the taskset's own, else ``default_harness``."""
    default_harness: Mapping[str, Any] | None = None
    """The harness of a taskset that brings none."""
    timeout: float | None = None
    """Seconds until an episode counts as failed."""
    max_turns: int | None = None
    on_overlong: str = "truncate"
    """A conversation that outgrows the context: ``truncate`` or ``fail``."""
    renderer: Any = None
    """A config object of the ``renderers`` package. None: chosen by the tokenizer's name."""
    tokenizer_path: Path | None = None
    """Folder of the renderer's tokenizer. None: the model's name."""
    untrained: frozenset[str] = frozenset()
    """Agents of which nothing trains, though no model in ``args`` plays them."""
    past_agents: frozenset[str] = frozenset()
    """Those of them that ``past`` plays."""
    past: ModelEndpoint | None = None
    """The engine of earlier versions. None: it does not run, because nothing is played."""
    engines_sleep: bool = False
    """The engines sleep while the trainer steps. That time does not count, so the ``Environment``
    limits its episodes, and verifiers does not."""

    @classmethod
    def of(cls, env: SourceConfig, **others: Any) -> EnvSettings:
        """The settings in a table of the config, and ``others``, which no table has."""
        keys = {"id", "args", "harness", "timeout", "max_turns", "on_overlong"}
        table = env.model_dump(include=keys)
        if isinstance(env, EnvConfig):
            others |= {"untrained": env.untrained, "past_agents": env.past_agents}
        return cls(name=env.label, **table, **others)

    @property
    def label(self) -> str:
        return self.name or self.id


@dataclass(frozen=True)
class ModelEndpoint:
    """The model that answers."""

    name: str
    base_url: str
    """Ends in ``/v1``."""
    api_key_var: str = "PRIME_RL_ENGINE_API_KEY"
    """Environment variable with the bearer key; unset means no key."""
    client: str = "tokens"
    """``tokens``: requests and replies are token ids. ``chat``: messages, by the OpenAI API."""
    timeout: float | None = None
    """Seconds per call. None: only the episode's limit."""
    headers: tuple[tuple[str, str], ...] = ()
    """HTTP headers of every request."""
    headers_from_env: tuple[tuple[str, str], ...] = ()
    """HTTP headers of every request, and the environment variables with their values."""


@dataclass(frozen=True, eq=False)
class Example:
    """One row of the environment."""

    id: int
    """Its index in ``Environment.examples``."""
    task: Task

    @property
    def fields(self) -> dict[str, Any]:
        """The row's own fields, ``prompt`` among them."""
        return dict(self.task.data.model_dump(exclude_none=True))

    def with_prompt(self, prompt: Any) -> Example:
        """This row with another prompt. Raises ``ValidationError``."""
        if prompt == self.fields.get("prompt"):
            return self
        kind: Any = type(self.task.data).model_fields["prompt"].annotation
        checked = TypeAdapter(kind).validate_python(prompt)
        return replace(self, task=self.task.with_data(prompt=checked))


@dataclass(frozen=True, eq=False)
class BranchTokens:
    """One token sequence of a trace: columns of length T. Branches may share leading nodes."""

    token_ids: list[int]
    sampled_mask: list[bool]
    logprobs: list[float]
    """log μ of sampled tokens, at their sampling temperature; 0.0 elsewhere."""
    roles: list[str]
    """Role of each token's message."""
    is_content: list[bool | None]
    """True: body of its message; False: scaffold; None: unknown to the renderer."""
    node_ids: list[int]
    """Each token's node of the trace: equal ids in two branches are the same sampling event."""
    policy_versions: list[int] | None
    """Policy version of each sampled token; -1: off the mask or unknown. None: not reported."""
    trainable: bool = True
    routed_experts: npt.NDArray[Any] | None = None
    """[T, layers, k]: the experts by which the engine computed each token. None: not reported."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RolloutResult:
    """The result of one agent in one episode."""

    ok: bool
    """It finished, was scored and has sampled tokens; so did its siblings in the episode."""
    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    """Named reward terms, each before its weight."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """By name of the term."""
    metrics: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    num_turns: int = 0
    is_truncated: bool = False
    stop_condition: str | None = None
    has_images: bool = False
    """A message has a part that is no text."""
    error_type: str | None = None
    """Class of the failure: ``ProviderError``, ``TaskError``, ``TimeoutError``, ``NoTokens`` ..."""
    error: str | None = None
    """The reason, in one line or more."""
    status_code: int | None = None
    """HTTP status of a failed model call."""
    agent: str = "agent"
    """Its seat in the env."""
    trainable: bool = True
    """False: a fixed opponent or judge; never trains."""
    branches: list[BranchTokens] = field(default_factory=list)
    trace: Trace | None = None
    group_id: int = 0
    """The group it was sampled for."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds per stage: ``setup``, ``agent`` (includes ``agent/model`` and ``agent/harness``),
    ``finalize``, ``scoring``."""
    usage: tuple[int, int] = (0, 0)
    """Input and output tokens, each once, as the server counted them, where only messages were
    exchanged."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled, also of a rollout that failed."""
        nodes = () if self.trace is None else self.trace.nodes
        return sum(sum(node.mask) for node in nodes) or self.usage[1]

    @property
    def messages(self) -> list[tuple[str, str]]:
        """The conversation as ``(role, text)`` of the last branch."""
        messages = () if self.trace is None else self.trace.messages
        return [(message.role, readable(message.content or "")) for message in messages]

    @property
    def task_fields(self) -> dict[str, Any]:
        """The fields of this agent's own task."""
        if self.trace is None:
            return {}
        return dict(self.trace.task.data.model_dump(exclude_none=True))

    @property
    def had_tools(self) -> bool:
        """Whether the model had tools."""
        return self.trace is not None and any(node.tools for node in self.trace.nodes)

    @property
    def saved_messages(self) -> list[dict[str, Any]]:
        """The conversation of the last branch, as a file of rollouts has it: texts, thoughts and
        calls."""
        messages = () if self.trace is None else self.trace.messages
        saved: list[dict[str, Any]] = []

        for message in messages:
            content = message.content
            if isinstance(content, list):  # images stay where they came from
                content = "".join(part.text for part in content if part.type == "text")

            entry: dict[str, Any] = {"role": message.role, "content": readable(content or "")}
            thought = getattr(message, "reasoning_content", None)
            if thought:
                entry["reasoning_content"] = readable(thought)

            calls = getattr(message, "tool_calls", None)
            if calls:
                entry["tool_calls"] = [
                    {
                        "id": readable(call.id),
                        "name": readable(call.name),
                        "arguments": readable(call.arguments),
                    }
                    for call in calls
                ]

            answers = getattr(message, "tool_call_id", None)
            if answers:
                entry["tool_call_id"] = readable(answers)
            saved.append(entry)

        return saved

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the last branch, in the OpenAI form. Raises an error of any class for tools
        that JSON cannot have."""
        branches = () if self.trace is None else self.trace.branches
        tools = branches[-1].tools if branches else ()

        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            | ({} if tool.strict is None else {"strict": tool.strict})
            for tool in tools
            if tool.type == "function"
        ]
        wire = [{"type": "function", "function": function} for function in functions]
        # The round trip through JSON gives the form that a file of rollouts has.
        plain: list[dict[str, Any]] = json.loads(readable(json.dumps(wire, ensure_ascii=False)))
        return plain

    @property
    def wire_messages(self) -> list[dict[str, Any]]:
        """The conversation of the last branch in the OpenAI form."""
        messages = () if self.trace is None else self.trace.messages
        return [message.model_dump(exclude_none=True) for message in messages]
