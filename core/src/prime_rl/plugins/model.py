"""Models made on this machine, and renderers that turn messages into a model's tokens.

Orchestrator side: entry-point group ``prime_rl``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from prime_rl.plugins.base import Offer


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a run's model folders."""

    text: str | None
    """None: keep the model's own template."""
    difference: str | None
    """The first difference from the renderer's output; None if they agree."""

    @property
    def warning(self) -> str | None:
        """A warning for users of the run's model folders; None if the template is exact."""
        if self.difference is None:
            return None
        return (
            "no chat template renders what the run's renderer renders: chat/completions and "
            "apply_chat_template prompt the model folders of this run differently from the run. "
            f"{self.difference}. `prime-rl eval RUN` prompts as the run does"
        )


class ModelMaker(Offer):
    """Makes a small model on this machine, for ``[model] name = "<maker>"`` where no checkpoint is
    at hand."""

    def check(self) -> None:
        """Raise ``ConfigError`` for what ``make`` would lack, before any process starts and without
        heavy imports; or warn with ``ConfigWarning``. Not called for a model that has been
        made."""

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
        """The ``renderers`` config object for a model. Raises ``ConfigError`` if nothing fits."""
        raise NotImplementedError

    def build_for(
        self, load_tokenizer: Callable[[], Any], model: str, fields: Mapping[str, Any]
    ) -> Any:
        """``build`` where the model's tokenizer is at hand. A run calls this one. Override it to
        choose by the tokenizer or by its chat template."""
        return self.build(model, fields)

    def chat_template(self, tokenizer: Any, renderer: Any) -> ChatTemplate:
        """The chat template that a run writes into its exported models: it gives the tokens that
        ``renderer`` (from ``build``) gives. ``tokenizer`` is that of the run's model.

        With another template, a served model gets other prompts than those it was trained on.
        Without an override the model keeps its own template, and the run warns."""
        difference = f"Renderer {self.name!r} compares no template with its own output"
        return ChatTemplate(None, difference)

    def chat_templates(self, own: str | None, renderer: Any) -> Sequence[str]:
        """Candidates for ``chat_template``, the best first: Jinja templates that may render like
        ``renderer``. ``own`` is the template of the run's model."""
        return [] if own is None else [own]
