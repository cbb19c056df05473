"""LangGraph: an agent that calls a tool, over langchain-openai."""

import json
import sys
import warnings

from langchain_openai import ChatOpenAI

warnings.simplefilter("ignore")
from langgraph.prebuilt import create_react_agent  # noqa: E402


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


agent = create_react_agent(ChatOpenAI(model="policy"), [add])
task = json.load(sys.stdin)
state = agent.invoke({"messages": task["messages"]}, {"recursion_limit": 8})
print(state["messages"][-1].content)
