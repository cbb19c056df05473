"""The openai SDK: ``openai_sdk.py chat|responses [stream]``, with a tool."""

import json
import sys

from openai import OpenAI

api, is_streamed = sys.argv[1], sys.argv[2:] == ["stream"]
client = OpenAI()
task = json.load(sys.stdin)
add = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}


def chat(messages):
    options = {
        "model": "policy",
        "messages": messages,
        "tools": [{"type": "function", "function": add}],
    }
    if not is_streamed:
        return client.chat.completions.create(**options).choices[0].message
    with client.chat.completions.stream(**options) as stream:
        return stream.get_final_completion().choices[0].message


def respond(items):
    options = {"model": "policy", "input": items, "tools": [{"type": "function", **add}]}
    if not is_streamed:
        return client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        return stream.get_final_response()


messages = task["messages"]
for _ in range(4):
    if api == "chat":
        reply = chat(messages)
        messages.append(reply.to_dict())
        calls = [(call.id, call.function.arguments) for call in reply.tool_calls or ()]
        text = reply.content
    else:
        response = respond(messages)
        messages += [item.to_dict() for item in response.output]
        calls = [
            (item.call_id, item.arguments)
            for item in response.output
            if item.type == "function_call"
        ]
        text = response.output_text
    if not calls:
        break
    for call_id, arguments in calls:
        numbers = json.loads(arguments)
        result = str(numbers["a"] + numbers["b"])
        messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": result}
            if api == "chat"
            else {"type": "function_call_output", "call_id": call_id, "output": result}
        )

print(text)
