"""Models made on this machine, and renderers that turn messages into a model's tokens.

Orchestrator side: entry-point group ``prime_rl``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from prime_rl.plugins.base import Offer


class ModelMaker(Offer):
    """Makes a small model on this machine, for ``[model] name = "<maker>"`` where no checkpoint is
    at hand."""

    def make(self, directory: Path, seed: int, progress: Callable[[str, float], None]) -> None:
        """Write a Hugging Face folder (config, safetensors, tokenizer) into the empty
        ``directory``.

        The same settings and seed must give the same model. ``progress(state, share)`` is shown to
        the user. Runs in a process of its own: import heavy packages in here.
        """
        raise NotImplementedError


class RendererOffer(Offer):
    """Turns the table ``[orchestrator.renderer]`` into a config of the ``renderers`` package."""

    gives_attribution: ClassVar[bool] = True
    """It separates a message's body from the template around it (``sample.is_content``)."""

    def check(self, model: str) -> None:
        """Raise ``ConfigError`` for a model it cannot render, before any process starts and without
        heavy imports. ``model`` is ``model.name``: a folder, a hub id, or a model made here."""

    def build(self, model: str, fields: Mapping[str, Any]) -> Any:
        """The ``renderers`` config object for a tokenizer folder. Raises ``ConfigError`` if nothing
        fits."""
        raise NotImplementedError

    def chat_templates(self, own: str | None, renderer: Any) -> Sequence[str]:
        """Jinja chat templates that may render like ``renderer`` (from ``build``), the best first.
        A run writes the first that does into its exported models. ``own`` is the template of the
        run's model."""
        return [] if own is None else [own]
