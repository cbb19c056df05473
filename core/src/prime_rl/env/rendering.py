"""The tokenizer and the renderers that episodes use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.processes import lasting_imports
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.status import replace_text

RENDERER_FILE = "configs/renderer.json"
"""Path in the run directory."""

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
        table = json.loads((path / "tokenizer_config.json").read_text("utf-8-sig"))
        if dict(table).get("tokenizer_class") in GENERIC_TOKENIZERS:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)

        from renderers.base import load_tokenizer as load_by_auto

        return load_by_auto(str(path))
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"tokenizer {str(path)!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def write_renderer(run_dir: Path, config: Any) -> None:
    """Save the run's renderer, which may have been chosen by the tokenizer, for later commands.
    ``config`` is a config object of the ``renderers`` package."""
    table = config.model_dump(mode="json", exclude_unset=True) | {"name": config.name}
    replace_text(run_dir / RENDERER_FILE, json.dumps(table, indent=2, ensure_ascii=False))


def read_renderer(run_dir: Path) -> Any:
    """The run's renderer as it was chosen; None before that. Raises ``RunError`` for a file that
    the installed ``renderers`` package cannot read."""
    from pydantic import TypeAdapter, ValidationError
    from renderers.configs import RendererConfig

    path = run_dir / RENDERER_FILE
    try:
        return TypeAdapter(RendererConfig).validate_python(read_table(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise RunError(
            f"{path}: the installed renderers package does not read it: {error}"
        ) from None


def new_renderer(tokenizer_path: Path, config: Any) -> Any:
    """A renderer with a tokenizer of its own."""
    with lasting_imports():
        from renderers import create_renderer

        return create_renderer(load_tokenizer(tokenizer_path), config)


def vocab_size_of(path: Path) -> int | None:
    """How many token ids the model of a folder takes. None: it does not say."""
    return number_in_config(path, "vocab_size")


def number_in_config(path: Path, key: str) -> int | None:
    """A number of the ``config.json`` of a model's folder. None: it does not say."""
    try:
        config = json.loads((path / "config.json").read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None

    if not isinstance(config, dict):
        return None

    # The language model of a family with several has a table of its own.
    nested = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    tables = [config, *(table for table in nested if isinstance(table, dict))]
    numbers = [table[key] for table in tables if isinstance(table.get(key), int)]
    return numbers[0] if numbers else None
