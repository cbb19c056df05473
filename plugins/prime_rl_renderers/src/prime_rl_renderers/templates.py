"""Chat templates that render what a renderer renders.

The renderer's settings become defaults at the top of the model's own template, so that a client
which sends no ``chat_template_kwargs`` gets the run's prompt; a client that sends them still
decides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BEGIN = "{#- The settings of the run's renderer, as defaults. -#}"
END = "{#- End of the settings. #}"

SHIPPED = {"qwen3": "qwen3.jinja"}
"""Templates of our own, by renderer, for a model whose folder has none that fits."""

PLAIN_REPLY = r"{{- '<|im_start|>' + message.role + '\n' + content }}"
"""How the templates of the Qwen3 family write a reply without its thought."""
REPLY = PLAIN_REPLY.replace(
    "content }}",
    r"('<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false "
    "and not reasoning_content else '') + content }}",
)
"""Their renderers keep the empty thought of a reply that was sampled with thinking disabled."""

RECENT = "loop.index0 > ns.last_query_index"
"""Where the templates of the Qwen3 family keep a reply's thought."""


def templates(own: str | None, renderer: Any) -> Iterator[str]:
    """Jinja templates that may render what ``renderer`` (its config) renders, the best first."""
    settings = template_settings(renderer)
    if own is not None:
        yield own
        yield with_defaults(own, settings)
        # Where the setting is left to the tokenizer, it may be either.
        yield with_defaults(as_sampled(own), {"enable_thinking": False} | settings)

    if renderer.name in SHIPPED:
        text = Path(__file__).with_name(SHIPPED[renderer.name]).read_text("utf-8")
        yield with_defaults(text, settings)


def template_settings(renderer: Any) -> dict[str, Any]:
    """The settings of a renderer that its template has too. None: the template's own default."""
    table = renderer.model_dump(mode="json")
    names = [*renderer.template_field_names(), *(renderer.model_extra or {}), "thinking_retention"]
    return {name: table[name] for name in sorted(names) if table[name] is not None}


def with_defaults(template: str, settings: Mapping[str, Any]) -> str:
    """``template`` with defaults for the variables that it reads, instead of those of an earlier
    run."""
    if template.startswith(BEGIN):
        template = template.partition(END)[2]
    lines = [
        f"{{%- set {name} = {name} | default({_literal(value)}) -%}}\n"
        for name, value in settings.items()
        if name in template
    ]
    return "".join([BEGIN, "\n", *lines, END, template]) if lines else template


def as_sampled(template: str) -> str:
    """A template of the Qwen3 family whose past replies keep what was sampled."""
    if "thinking_retention" not in template:
        template = template.replace(RECENT, f"(thinking_retention == 'all' or {RECENT})")
    return template.replace(PLAIN_REPLY, REPLY)


def _literal(value: Any) -> str:
    """JSON, which is Jinja but for ``null``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
