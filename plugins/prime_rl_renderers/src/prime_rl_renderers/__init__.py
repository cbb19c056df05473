"""Every renderer of the ``renderers`` package, by its own name, and ``auto``.

A renderer turns messages into tokens and back without ever re-rendering a past turn, so that the
trainer sees the tokens the sampler saw.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl import ChatTemplate, ConfigError, PluginConfig, RendererOffer, hookimpl
from prime_rl_renderers import late

late.install()

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
        conversations, else the closest one."""
        from renderers import create_renderer

        from prime_rl_renderers.chat_template import choose

        found = tokenizer.chat_template  # several by name, or one
        own = found.get("default") if isinstance(found, dict) else found
        candidates = self.chat_templates(own, renderer)
        chosen, difference = choose(tokenizer, create_renderer(tokenizer, renderer), candidates)
        return ChatTemplate(None if chosen == found else chosen, difference)

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
        if fields:  # else not worth the import, which takes seconds
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
        said = {"extra_forbidden": "unknown key"}
        problems = (
            f"{where}.{e['loc'][-1]}: {said.get(e['type'], e['msg'])}" for e in error.errors()
        )
        raise ConfigError("\n".join(problems)) from error


class AutoRenderer(PackageRenderer):
    """Picks the renderer by the model's exact id: two models of one architecture may differ in
    their chat template."""

    name = "auto"

    def check(self, model: str) -> None:
        """Raises ``ConfigError`` for anything that is not a hub id."""
        if "/" not in model or os.path.isdir(model):
            raise _unknown(model)

    def build(self, model: str, fields: Mapping[str, Any]) -> Any:
        """The config of the renderer made for this model. Raises ``ConfigError`` if none is known,
        or if it does not have a field."""
        from renderers.base import MODEL_RENDERER_MAP

        known = MODEL_RENDERER_MAP.get(model)
        if known is None:
            raise _unknown(model)
        name = known if isinstance(known, str) else known.name
        return _config({"name": name, **fields})


def _unknown(model: str) -> ConfigError:
    return ConfigError(
        f"orchestrator.renderer: 'auto' knows no renderer for {model!r}: it matches exact hub ids "
        "only, never a folder or a fine-tune's name. Set orchestrator.renderer.name to the "
        f"family's renderer (one of {', '.join(NAMES)})."
    )


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
