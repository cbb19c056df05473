"""The OpenAI Agents SDK, which uses the Responses API. A second agent is a tool of the first."""

import json
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # it would send traces to OpenAI


@function_tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


agent = Agent(name="adder", instructions="Use the tool.", tools=[add])
result = Runner.run_sync(agent, json.load(sys.stdin)["prompt"], max_turns=4)
print(result.final_output)
