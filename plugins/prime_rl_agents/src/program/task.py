"""The task as the program gets it: a JSON object, and places in its command."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from program.seam import message_to_wire

OF_VERIFIERS = {*vf.TaskData.model_fields, "columns"}
"""Fields of every row: the prompt, which the program gets apart, and what the runtime needs."""


def task_of(
    data: Any, system: str | None, prompt: Any, fields: Sequence[str] | None, **more: Any
) -> dict[str, Any]:
    """The JSON object on the program's stdin.

    ``fields``: columns of the row, besides the prompt. None: all. ``prompt``: a text or messages.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages += [message_to_wire(message) for message in prompt or ()]

    row = data.model_dump(mode="json", exclude_none=True)
    columns = row.get("columns")
    row |= columns if isinstance(columns, dict) else {}
    known = {key: value for key, value in row.items() if key not in OF_VERIFIERS}
    kept = known if fields is None else {key: known[key] for key in fields if key in known}
    return {
        "id": data.idx,
        "prompt": text_of(prompt),
        "system": system,
        "messages": messages,
        "row": kept,
        **more,
    }


def text_of(prompt: Any) -> str:
    """The prompt as one text: of a conversation, the last message."""
    if isinstance(prompt, str):
        return prompt
    last = prompt[-1].content if prompt else ""
    return last if isinstance(last, str) else "".join(getattr(part, "text", "") for part in last)


PLACE = re.compile(r"\{(\w+)\}")


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with its places filled: ``{prompt}``, ``{model}`` ... Other braces stay."""

    def value_of(place: re.Match[str]) -> str:
        return values.get(place[1], place[0])

    return [PLACE.sub(value_of, part) for part in command]


def unknown_places(command: Sequence[str], known: Sequence[str]) -> list[str]:
    """Arguments that are nothing but a place that no value has: most likely a typing error."""
    matches = [PLACE.fullmatch(part) for part in command]
    places = [match[1] for match in matches if match is not None]
    return [place for place in places if place not in known]


def with_paths(command: Sequence[str], folder: Path) -> list[str]:
    """The command for a program that runs in another folder: a file of ``folder`` by its full
    path. An argument without a dot or a slash is a name, whatever the folder has."""
    arguments = []
    for part in command:
        path = folder / part
        is_file = ("." in part or "/" in part) and not Path(part).is_absolute() and path.is_file()
        arguments.append(str(path.resolve()) if is_file else part)
    return arguments


def as_json(task: Mapping[str, Any]) -> bytes:
    return json.dumps(task, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
