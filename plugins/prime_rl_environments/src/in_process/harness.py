# mypy: allow-subclassing-any, allow-untyped-decorators
"""The chat loop: query the model and run the tools it calls, until it answers in text or stops."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import verifiers.v1 as vf

from in_process.seam import message_to_wire
from in_process.tool_calls import MALFORMED, readable
from in_process.turns import Refused, TurnDriver
from prime_rl import ConfigError

Wire = dict[str, Any]
"""An OpenAI chat message, as JSON."""


class InProcessConfig(vf.HarnessConfig):
    """``harness = {id = "in-process", ...}``"""

    tools: list[str] = []
    """Python tools, as ``module:function``. The function, sync or async, has an OpenAI function
    tool as its attribute ``schema``. The model gets its result or its exception as text."""


class InProcessHarness(vf.Harness[InProcessConfig]):
    """Runs a rollout's chat loop in this process. One stateless instance serves many rollouts at
    once."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    SUPPORTS_MCP = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    RUNS_IN_PROCESS = True

    def __init__(self, config: InProcessConfig) -> None:
        super().__init__(config)
        self.tools = dict(map(load_tool, config.tools))

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One segment: from the prompt in ``data`` to a reply in text, or to the turn that
        verifiers refuses."""
        driver = TurnDriver(secret, trace, ctx)
        request: Wire = {"model": ctx.model, "messages": self.opening(data)}
        if self.tools:
            request["tools"] = [tool.schema for tool in self.tools.values()]  # type: ignore[attr-defined]
        while True:
            try:
                reply = await driver.turn(request)
            except Refused as refusal:
                return vf.ProgramResult(1, "", str(refusal))

            faults = reply.pop(MALFORMED, ())
            calls = reply.get("tool_calls") or ()
            request["messages"].append(reply)
            if not calls and not faults:
                return vf.ProgramResult(0, "", "")
            request["messages"] += [await self.call_tool(call) for call in calls]
            if faults:
                request["messages"].append(answer_to(faults))

    def opening(self, data: vf.TaskData) -> list[Wire]:
        """The messages at the start of the segment."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Wire] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]

    async def call_tool(self, call: Mapping[str, Any]) -> Wire:
        """Run one tool call. What it raises becomes the text that the model reads: a command line
        that refuses the model's arguments raises ``SystemExit``."""
        name = call["function"]["name"]
        try:
            if name not in self.tools:
                raise LookupError(f"no tool {name!r}; available: {', '.join(self.tools)}")
            output = self.tools[name](**json.loads(call["function"]["arguments"]))
            text = str(await output if inspect.isawaitable(output) else output)
        except BaseException as error:
            task = asyncio.current_task()
            is_ours = task is not None and task.cancelling() > 0
            if is_ours:
                raise
            text = f"error: {type(error).__name__}: {readable(error)}"

        content = readable(text)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def answer_to(faults: Sequence[str]) -> Wire:
    """What the model reads about calls that could not be parsed. A message of the user: a tool's
    would have to name the call that it answers."""
    lines = [f"error: a tool call could not be read: {fault}." for fault in faults]
    return {"role": "user", "content": "\n".join([*lines, "Write it again."])}


def load_tool(path: str) -> tuple[str, Callable[..., Any]]:
    """``module:function`` to ``(the tool's name for the model, function)``. Raises ``ConfigError``
    if it is not a tool."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return function.schema["function"]["name"], function
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"harness in-process: tools: {path!r} is not a tool ({type(error).__name__}: {error}); "
            'expected "module:function", where the function has an OpenAI function tool as its '
            "attribute `schema`."
        ) from error
