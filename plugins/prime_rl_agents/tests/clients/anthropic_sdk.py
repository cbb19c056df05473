"""The anthropic SDK: ``anthropic_sdk.py [stream]``, with a tool."""

import json
import sys

from anthropic import Anthropic

is_streamed = sys.argv[1:] == ["stream"]
client = Anthropic()
task = json.load(sys.stdin)
add = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
messages = [{"role": "user", "content": task["prompt"]}]
options = {"model": "policy", "max_tokens": 512, "tools": [add]}
assert client.messages.count_tokens(
    model="policy", messages=messages, tools=[add]
).input_tokens > len(task["prompt"])
for _ in range(4):
    if is_streamed:
        with client.messages.stream(messages=messages, **options) as stream:
            reply = stream.get_final_message()
    else:
        reply = client.messages.create(messages=messages, **options)
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": str(call.input["a"] + call.input["b"]),
        }
        for call in calls
    ]
    messages.append({"role": "user", "content": results})

print("".join(block.text for block in reply.content if block.type == "text"))
