"""Pydantic AI: an agent that calls a tool. ``pydantic_ai_agent.py openai|anthropic``."""

import json
import sys

from pydantic_ai import Agent

kind = {"openai": "openai-chat", "anthropic": "anthropic"}[sys.argv[1]]
agent = Agent(f"{kind}:policy")


@agent.tool_plain
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


print(agent.run_sync(json.load(sys.stdin)["prompt"]).output)
