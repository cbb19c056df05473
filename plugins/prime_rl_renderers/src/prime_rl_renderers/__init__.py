"""Every renderer of the ``renderers`` package, by its own name, and ``auto``.

A renderer turns messages into tokens and back without ever re-rendering a past turn, so that the
trainer sees the tokens the sampler saw.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

from prime_rl import ChatTemplate, ConfigError, PluginConfig, RendererOffer, hookimpl
from prime_rl_renderers import late

late.install()

log = logging.getLogger("prime_rl.renderers")

NAMES = (
    "custom",
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "default",
    "gemma4",
    "glm-4.5",
    "glm-5",
    "glm-5.1",
    "glm-5.3",
    "gpt-oss",
    "hy3",
    "inkling",
    "kimi-k2",
    "kimi-k2.5",
    "laguna-m.1",
    "laguna-s-2.1",
    "laguna-xs-2.1",
    "laguna-xs.2",
    "llama-3",
    "minimax-m2",
    "nemotron-3",
    "nemotron-3-ultra",
    "nemotron-3.5",
    "prime-qwen3",
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
)
"""What renderers 0.1.12 ships. Written down, because importing the package takes seconds and
listing must not; a test holds the list against the installed package."""


class RendererSettings(PluginConfig):
    """The fields of the renderer's own config, passed through; it validates them itself."""

    model_config = PluginConfig.model_config | {"extra": "allow"}


class PackageRenderer(RendererOffer):
    """What all renderers of the package share."""

    config_class = RendererSettings

    def chat_template(self, tokenizer: Any, renderer: Any) -> ChatTemplate:
        """The first of ``chat_templates`` that gives the renderer's tokens on example
        conversations, else the closest one. Raises ``ConfigError`` if the tokenizer lacks tokens
        that the renderer writes."""
        from renderers import create_renderer

        from prime_rl_renderers.chat_template import choose

        templates = tokenizer.chat_template  # several by name, or one
        standard = templates.get("default") if isinstance(templates, dict) else templates
        candidates = self.chat_templates(standard, renderer)
        try:
            made = create_renderer(tokenizer, renderer)
        except (AssertionError, ValueError) as error:
            raise ConfigError(
                f"orchestrator.renderer.name: {self.name!r} does not fit the model's tokenizer: "
                f'{error}. Leave the key out, or write "auto": it chooses the renderer that gives '
                "the tokens of the model's own chat template."
            ) from error
        chosen, difference = choose(tokenizer, made, candidates)
        return ChatTemplate(None if chosen == templates else chosen, difference)

    def chat_templates(self, own: str | None, renderer: Any) -> Sequence[str]:
        """The model's own; the same with the renderer's settings as defaults; a template made for
        the renderer."""
        from prime_rl_renderers.templates import templates

        return list(templates(own, renderer))


class NamedRenderer(PackageRenderer):
    """One renderer of the package."""

    def check(self, model: str) -> None:
        """Raises ``ConfigError`` on fields that the package's config does not have."""
        fields = self.config.model_dump()
        if fields:  # otherwise not worth the import, which takes seconds
            self.build(model, fields)

    def build(self, model: str, fields: Mapping[str, Any]) -> Any:
        """The package's config object for this name. Raises ``ConfigError`` on fields it does not
        have."""
        return _config({"name": self.name, **fields})


def _config(table: Mapping[str, Any]) -> Any:
    from pydantic import TypeAdapter, ValidationError
    from renderers.configs import RendererConfig

    try:
        return TypeAdapter(RendererConfig).validate_python(dict(table))
    except ValidationError as error:
        where = f"orchestrator.renderer (renderer {table['name']!r})"
        known = type(TypeAdapter(RendererConfig).validate_python({"name": table["name"]}))
        names = sorted(known.model_fields)
        problems = (f"{where}.{e['loc'][-1]}: {_problem(e, names)}" for e in error.errors())
        raise ConfigError("\n".join(problems)) from error


def _problem(error: Any, known: Sequence[str]) -> str:
    """In core's words for an unknown key, which its command line completes."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    close = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    if close:
        return f"unknown key; did you mean {close[0]!r}?"
    return f"unknown key; known here: {', '.join(known)}"


class AutoRenderer(PackageRenderer):
    """Picks the renderer that gives the tokens of the model's own chat template (see ``proof``),
    and ``default``, which uses the template itself, if none does."""

    name = "auto"

    def check(self, model: str) -> None:
        """Raises ``ConfigError`` on fields that no renderer has. The choice needs the tokenizer."""
        fields = set(self.config.model_dump())
        unknown = fields - _known_fields() if fields else fields
        if unknown:
            raise ConfigError(
                f"orchestrator.renderer (renderer 'auto').{min(unknown)}: unknown key: no renderer "
                'has it. A variable of the model\'s own template needs name = "default"'
            )

    def build(self, model: str, fields: Mapping[str, Any]) -> Any:
        """The config of the renderer made for this hub id. Raises ``ConfigError`` if none is known,
        or if it does not have a field."""
        from renderers.base import MODEL_RENDERER_MAP

        known = MODEL_RENDERER_MAP.get(model)
        if known is None:
            raise ConfigError(
                f"orchestrator.renderer: 'auto' chooses by the tokenizer, and there is none for "
                f"{model!r} here. Name a renderer: one of {', '.join(NAMES)}."
            )
        name = known if isinstance(known, str) else known.name
        return _config({"name": name, **fields})

    def build_for(
        self, load_tokenizer: Callable[[], Any], model: str, fields: Mapping[str, Any]
    ) -> Any:
        """The config of the renderer that passes. Logs the choice. Raises ``ConfigError`` for a
        tokenizer without a template or with one that gives no prompt, or a field that the chosen
        renderer does not have."""
        from renderers.base import MODEL_RENDERER_MAP

        from prime_rl_renderers.proof import choose_renderer, described, template_fault

        if model in MODEL_RENDERER_MAP:
            return self.build(model, fields)

        tokenizer = load_tokenizer()
        if not tokenizer.chat_template:
            raise ConfigError(
                f"orchestrator.renderer: the tokenizer of {model!r} has no chat template, by which "
                "'auto' chooses. Put a chat_template.jinja into its folder, or name the renderer "
                "of the model's family in orchestrator.renderer.name."
            )

        choice = choose_renderer(tokenizer, _candidates(fields), fields)
        if choice.renderer is not None:
            log.info("renderer auto: %s, as %s", described(choice.renderer), choice.reason)
            return choice.renderer

        fault = template_fault(tokenizer, fields)
        if fault is not None:
            raise ConfigError(
                f"orchestrator.renderer: the chat template of {model!r} gives no prompt: {fault}. "
                "Fix its chat_template.jinja, or name the renderer of the model's family in "
                "orchestrator.renderer.name."
            )
        templates = tokenizer.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates]
        unread = [name for name in fields if not any(name in text for text in texts)]
        if unread:
            raise ConfigError(
                f"orchestrator.renderer.{unread[0]}: no renderer with this setting gives the "
                f"tokens of the model's chat template, which does not read it ({choice.reason})"
            )
        log.warning("renderer auto: default (%s). %s", choice.reason, CONSEQUENCE)
        return _config({"name": "default", **fields})


CONSEQUENCE = (
    "It uses the model's own chat template: a turn whose prompt is not the earlier tokens and more "
    "trains as a branch of its own, tool calls and thoughts are not parsed (set tool_parser, "
    "reasoning_parser), and tokens are not told apart by body (ECHO refuses)"
)
"""What ``default`` means for a run."""


def _candidates(fields: Mapping[str, Any]) -> list[Any]:
    """Configs of all renderers that have the fields, each with both kinds of thinking if the user
    leaves that open."""
    from prime_rl_renderers.proof import THINKING

    configs = []
    for name in NAMES:
        if name in ("custom", "default"):
            continue
        for thinking in ({}, {THINKING: False}, {THINKING: True}):
            if thinking and THINKING in fields:
                continue
            with suppress(ConfigError):
                configs.append(_config({"name": name, **fields, **thinking}))

    return configs


def _known_fields() -> set[str]:
    """Names of the settings of all renderers. Importing the package takes seconds, so only for a
    table that has some."""
    from renderers.configs import RendererConfig

    configs = get_args(get_args(RendererConfig)[0])
    return {name for each in configs for name in each.model_fields}


WITHOUT_ATTRIBUTION = ("default",)
"""Wraps the model's own chat template, which does not say what is body and what is scaffold."""


def _named(name: str) -> type[RendererOffer]:
    body = {
        "name": name,
        "gives_attribution": name not in WITHOUT_ATTRIBUTION,
        "__doc__": NamedRenderer.__doc__,
    }
    return type(f"Renderer_{name}", (NamedRenderer,), body)


@hookimpl
def register_renderers() -> list[type[RendererOffer]]:
    """Offer ``auto`` and every renderer by name."""
    return [AutoRenderer, *map(_named, NAMES)]
