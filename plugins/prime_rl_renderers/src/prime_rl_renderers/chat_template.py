"""Choose the chat template of a run's model folders: the first that renders example conversations
to the tokens of the run's renderer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TemplateExample:
    """A conversation that the policy is to continue."""

    name: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None


SYSTEM = {"role": "system", "content": "Answer in one word."}
ASK = {"role": "user", "content": "Which is larger, 12 or 21?"}
REPLY = {"role": "assistant", "content": "21"}
THOUGHT = {"reasoning_content": "21 - 12 = 9 is positive."}
AGAIN = {"role": "user", "content": "And of 7 and 5?\nOne word."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "larger", "arguments": {"first": 12, "second": 21}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_0", "name": "larger", "content": "21"}
NUMBER = {"type": "integer", "description": "A number."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "larger",
            "description": "The larger of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"first": NUMBER, "second": NUMBER},
                "required": ["first", "second"],
            },
        },
    }
]

EXAMPLES = (
    TemplateExample("one turn", [ASK]),
    TemplateExample("a system prompt", [SYSTEM, ASK]),
    TemplateExample("several turns", [ASK, REPLY, AGAIN]),
    TemplateExample("several turns with thoughts", [SYSTEM, ASK, REPLY | THOUGHT, AGAIN]),
    TemplateExample("tools", [ASK], TOOLS),
    TemplateExample("tools and a system prompt", [SYSTEM, ASK], TOOLS),
    TemplateExample("a tool's result", [ASK, CALL, RESULT], TOOLS),
    TemplateExample("a tool's result after a thought", [ASK, CALL | THOUGHT, RESULT], TOOLS),
    TemplateExample("a turn after a tool's result", [ASK, CALL, RESULT, REPLY, AGAIN], TOOLS),
)


def choose(
    tokenizer: Any, renderer: Any, candidates: Sequence[str]
) -> tuple[str | None, str | None]:
    """The template with the fewest differing examples (the first of equals), and its first
    difference."""
    prompts = ((example, _try_prompt(renderer, example)) for example in EXAMPLES)
    expected = [(example, prompt) for example, prompt in prompts if prompt is not None]
    if not expected:
        return None, "The renderer refuses every example conversation"
    best: str | None = None
    differences = ["The model has no chat template"]
    for template in candidates:
        of_template = list(_differences(tokenizer, template, expected))
        if best is None or len(of_template) < len(differences):
            best = template
            differences = of_template

    return best, differences[0] if differences else None


def _try_prompt(renderer: Any, example: TemplateExample) -> list[int] | None:
    if example.tools is not None and not getattr(renderer, "supports_tools", True):
        return None
    try:
        return rollout_prompt(renderer, example)
    except Exception as error:  # the family has no system prompt, no tools, ...
        log.debug("the renderer refuses %s: %s", example.name, error)
        return None


def rollout_prompt(renderer: Any, example: TemplateExample) -> list[int] | None:
    """Tokens of the last prompt of a rollout like ``example``. A thought in it was sampled: the
    renderer may keep it where a fresh render would not. None: this renderer samples no thoughts."""
    messages = list(example.messages)
    tools = example.tools
    whole: list[int] = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    last = max((i for i, each in enumerate(messages) if "reasoning_content" in each), default=None)
    if last is None:
        return whole
    prompt = renderer.render_ids(messages[:last], tools=tools, add_generation_prompt=True)
    replied = renderer.render_ids(messages[: last + 1], tools=tools)
    stops = set(renderer.get_stop_token_ids())
    if replied[: len(prompt)] != prompt or not stops & set(replied[len(prompt) :]):
        return None
    while replied[-1] not in stops:  # the template's line break is not sampled
        replied.pop()
    completion = replied[len(prompt) :]
    following = messages[last + 1 :]
    bridged = renderer.bridge_to_next_turn(prompt, completion, following, tools=tools)
    return whole if bridged is None else list(bridged.token_ids)


def _differences(
    tokenizer: Any, template: str, expected: Sequence[tuple[TemplateExample, list[int]]]
) -> Iterator[str]:
    for example, wanted in expected:
        try:
            ids = tokenizer.apply_chat_template(
                list(example.messages),
                tools=example.tools,
                chat_template=template,
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:  # a template is a program
            difference = f"the template fails: {type(error).__name__}: {error}"
        else:
            if list(ids) == wanted:
                continue
            difference = first_difference(tokenizer, list(ids), wanted)

        yield f"First difference, {example.name!r}: {difference}"


def first_difference(tokenizer: Any, ids: list[int], wanted: list[int]) -> str:
    """Where the template's ``ids`` leave the renderer's ``wanted``, as text."""
    pairs = zip(ids, wanted, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(wanted)))
    shown = [repr(tokenizer.decode(each[place : place + 8])) for each in (ids, wanted)]
    return (
        f"from token {place} the template has {shown[0]} ({len(ids)} tokens in all), the renderer "
        f"{shown[1]} ({len(wanted)})"
    )
