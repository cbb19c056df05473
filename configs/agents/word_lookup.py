"""An agent with a tool: it asks a book for a word and writes it backward.

It needs no package, so it starts quickly. With an SDK it would be shorter (docs/agents.md).
"""

import json
import os
import random
import string
import sys
import urllib.request

TOOL = {
    "name": "get",
    "description": "The book's word for a key.",
    "parameters": {
        "type": "object",
        "properties": {"k": {"type": "string"}},
        "required": ["k"],
    },
}


def book_entry(key: str) -> str:
    """The book of the taskset ``word-lookup``: the key, and three letters that depend on it."""
    return key + "".join(random.Random(f"book {key}").choices(string.ascii_lowercase, k=3))


def chat(messages: list) -> dict:
    """The policy's reply."""
    tools = [{"type": "function", "function": TOOL}]
    body = {"model": "policy", "messages": messages, "tools": tools}
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


if __name__ == "__main__":
    messages = json.load(sys.stdin)["messages"]
    for _ in range(3):
        reply = chat(messages)
        messages.append(reply)
        calls = reply.get("tool_calls") or []
        if not calls:
            break
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            found = book_entry(str(arguments.get("k")))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})

    print(reply["content"])
