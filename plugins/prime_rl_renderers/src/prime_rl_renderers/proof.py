"""Choose a renderer by proof: the one that gives the tokens of the model's own chat template.

A name proves nothing: a fine-tune keeps its base's tokenizer and often changes the template, and
two models of one architecture may differ in theirs. So each renderer of the package is tried:

1. It must take the tokenizer. Most need the special tokens of their family.
2. It renders example conversations: system prompt, tools, thoughts, several turns.
3. It is chosen if every one has the tokens of ``apply_chat_template``.

Nothing here needs a network or a name of the hub.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

from prime_rl_renderers.chat_template import (
    AGAIN,
    ASK,
    EXAMPLES,
    SYSTEM,
    TemplateExample,
    first_difference,
)
from prime_rl_renderers.templates import template_settings

log = logging.getLogger(__name__)

THINKING = "enable_thinking"
"""A setting with which two models of one family differ in their template's default."""

NEEDS_TOKEN = {"gpt-oss": "<|channel|>"}
"""Renderers that load files from a network before they look at the tokenizer."""

TEXT_LAST = ("qwen3-vl", "kimi-k2.5")
"""Renderers for images, which training has none of: only where no other renderer fits."""


@dataclass(frozen=True)
class Probe:
    """An example conversation and the tokens of the model's own template."""

    example: TemplateExample
    with_reply_prompt: bool
    token_ids: list[int]

    @property
    def is_conversation(self) -> bool:
        """Whether a reply comes before another message."""
        roles = [message["role"] for message in self.example.messages]
        return "assistant" in roles[:-1]


@dataclass(frozen=True)
class ChosenRenderer:
    """The renderer for a model folder, and why."""

    renderer: Any
    """A config of the ``renderers`` package. None: no renderer gives the template's tokens."""
    reason: str
    """For the log: the proof, or how close the closest renderer came."""


def choose_renderer(
    tokenizer: Any, configs: Sequence[Any], fields: Mapping[str, Any] | None = None
) -> ChosenRenderer:
    """The first of ``configs`` (of the ``renderers`` package) that passes.

    ``fields`` are the settings of the user, which ``configs`` have too and which the template gets
    as its variables. ``enable_thinking`` is a variable only if the user set it: else a renderer
    must write what the template writes by default.
    """
    chosen_by_user = set(fields or {})
    proven: list[Any] = []
    num_proven = 0
    closest: tuple[float, str, str] | None = None
    known: dict[str, list[Probe]] = {}
    for config in sorted(configs, key=lambda each: each.name in TEXT_LAST):
        renderer = _fitting(tokenizer, config)
        if renderer is None:
            continue

        variables = template_settings(config)
        if THINKING not in chosen_by_user:
            variables.pop(THINKING, None)
        key = repr(sorted(variables.items()))
        if key not in known:
            known[key] = list(probes_of(tokenizer, variables))
        probes = known[key]
        if not any(probe.is_conversation for probe in probes):
            return ChosenRenderer(None, "the template renders no example of several turns")
        differences = list(_differences(tokenizer, renderer, probes))
        if not differences:
            proven.append(config)
            num_proven = num_proven or len({probe.example.name for probe in probes})
            continue
        distance = sum(share for share, _ in differences)
        if closest is None or distance < closest[0]:
            closest = (distance, described(config), differences[0][1])

    if proven:
        others = [described(each) for each in proven[1:] if each.name != proven[0].name]
        also = f"; {', '.join(dict.fromkeys(others))} would too" if others else ""
        shown = f"in {num_proven} conversations{also}"
        reason = f"it gives the tokens of the model's chat template {shown}"
        return ChosenRenderer(proven[0], reason)
    if closest is None:
        return ChosenRenderer(
            None, "no renderer takes this tokenizer: it lacks the tokens of each family"
        )
    return ChosenRenderer(None, f"closest was {closest[1]}. First difference, {closest[2]}")


def described(config: Any) -> str:
    """A config's name, with its thinking where that is set: ``qwen3 (enable_thinking = false)``."""
    thinking = getattr(config, THINKING, None) if THINKING in config.model_fields_set else None
    return str(config.name) + (
        "" if thinking is None else f" ({THINKING} = {str(thinking).lower()})"
    )


def probes_of(tokenizer: Any, variables: Mapping[str, Any]) -> Iterator[Probe]:
    """The examples that the model's template renders, with and without the start of a reply.

    A template refuses what its model lacks (a system prompt, tools): no rollout has it either. One
    that writes no thought belongs to a model that has none, and is not asked about thoughts.
    """
    has_thoughts = any(
        _by_template(tokenizer, each, variables, True)
        != _by_template(tokenizer, _without_thoughts(each), variables, True)
        for each in EXAMPLES
    )
    for example in EXAMPLES:
        if not has_thoughts and example != _without_thoughts(example):
            continue
        for with_reply_prompt in (True, False):
            ids = _by_template(tokenizer, example, variables, with_reply_prompt)
            if ids is not None:
                yield Probe(example, with_reply_prompt, ids)


def template_fault(tokenizer: Any, variables: Mapping[str, Any]) -> str | None:
    """Why the model's template can give no prompt; None: it can, perhaps after a system prompt
    only."""
    faults: list[str] = []
    for before in ([], [SYSTEM]):
        try:
            shown = [
                tokenizer.apply_chat_template(
                    [*before, message], add_generation_prompt=True, tokenize=False, **variables
                )
                for message in (ASK, AGAIN)
            ]
        except Exception as error:  # a template is a program
            faults.append(f"it renders no message of a user: {type(error).__name__}: {error}")
        else:
            return "it does not show what the user says" if shown[0] == shown[1] else None
    return faults[0]


def _without_thoughts(example: TemplateExample) -> TemplateExample:
    kept = [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        for message in example.messages
    ]
    return TemplateExample(example.name, kept, example.tools)


def _by_template(
    tokenizer: Any, example: TemplateExample, variables: Mapping[str, Any], with_reply_prompt: bool
) -> list[int] | None:
    try:
        ids = tokenizer.apply_chat_template(
            list(example.messages),
            tools=example.tools,
            add_generation_prompt=with_reply_prompt,
            return_dict=False,
            **variables,
        )
    except Exception as error:  # a template is a program
        log.debug("the model's template refuses %s: %s", example.name, error)
        return None
    return list(ids)


def _fitting(tokenizer: Any, config: Any) -> Any:
    """The renderer over the tokenizer; None if it does not take it."""
    from renderers import create_renderer

    needed = NEEDS_TOKEN.get(config.name)
    if needed is not None and needed not in tokenizer.get_vocab():
        return None
    try:
        return create_renderer(tokenizer, config)
    except Exception as error:  # an assertion names the token that is missing
        log.debug("renderer %s does not take the tokenizer: %s", config.name, error)
        return None


def _differences(
    tokenizer: Any, renderer: Any, probes: Sequence[Probe]
) -> Iterator[tuple[float, str]]:
    """For each conversation that differs: the share of its tokens after the difference, and the
    difference as text."""
    for probe in probes:
        example = probe.example
        try:
            ids = renderer.render_ids(
                list(example.messages),
                tools=example.tools,
                add_generation_prompt=probe.with_reply_prompt,
            )
        except Exception as error:
            yield 1.0, f"{example.name!r}: the renderer fails: {type(error).__name__}: {error}"
            continue
        if list(ids) != probe.token_ids:
            equal = sum(1 for _ in takewhile(bool, map(eq, ids, probe.token_ids)))
            difference = first_difference(tokenizer, probe.token_ids, list(ids))
            longest = max(len(ids), len(probe.token_ids))
            yield 1.0 - equal / longest, f"{example.name!r}: {difference}"
