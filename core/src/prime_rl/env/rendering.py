"""The tokenizer and the renderers that episodes use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError
from prime_rl.rundir.processes import lasting_imports

ROLLOUTS_PER_RENDERER = 4096
"""One tokenizer serves all of them: a render takes a fraction of a millisecond."""

GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes without code of their own: ``tokenizer.json`` has everything."""


def warm_renderer(tokenizer_path: Path, config: Any) -> None:
    """Load the tokenizer before the first rollout's clock runs.

    verifiers keeps one pool of renderers per process; this adds the first one.
    """
    with lasting_imports():
        from renderers import create_renderer
        from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot

        pool = ElasticRendererPool(str(tokenizer_path), config, multiplex=ROLLOUTS_PER_RENDERER)
        if not pool.renderers:
            renderer = create_renderer(load_tokenizer(tokenizer_path), config)
            pool.renderers.append(RendererSlot(renderer))


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a folder. Raises ``ConfigError`` if there is none.

    ``AutoTokenizer`` imports torch to find out what ``tokenizer_config.json`` already says.
    """
    try:
        table = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
        if table.get("tokenizer_class") in GENERIC_TOKENIZERS:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from renderers.base import load_tokenizer as load_by_auto

        return load_by_auto(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tokenizer {str(path)!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def vocab_size_of(path: Path) -> int | None:
    """How many token ids the model of a folder takes, by its ``config.json``. None: it does not
    say."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

    if not isinstance(config, dict):
        return None
    # The language model of a family with several has a table of its own.
    nested = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    tables = [config, *(table for table in nested if isinstance(table, dict))]
    sizes = [table["vocab_size"] for table in tables if isinstance(table.get("vocab_size"), int)]
    return sizes[0] if sizes else None
