"""The chat template of the model folders that a run writes: it renders as the run's renderer does.

The renderer's plugin chooses it before the first batch (``RendererOffer.chat_template``). Code that
writes a folder with a tokenizer calls ``put_chat_template``.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from prime_rl.plugins.model import ChatTemplate
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.status import replace_text

CHOICE = "configs/chat_template.json"
"""Path in the run directory."""


def write_chat_template(run_dir: Path, chosen: ChatTemplate) -> None:
    """Save the choice in the run directory, for the trainer and the report."""
    replace_text(run_dir / CHOICE, json.dumps(asdict(chosen), indent=2, ensure_ascii=False))


def read_chat_template(run_dir: Path) -> ChatTemplate | None:
    """The run's choice; None before it is made."""
    path = run_dir / CHOICE
    try:
        choice: ChatTemplate = read_table(path, ChatTemplate)
    except FileNotFoundError:
        return None
    return choice


def put_chat_template(run_dir: Path, folder: Path) -> None:
    """Replace the chat template of a model folder by the run's."""
    chosen = read_chat_template(run_dir)
    if chosen is None or chosen.text is None:
        return

    (folder / "chat_template.jinja").write_text(chosen.text, "utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)  # a processor's template
    path = folder / "tokenizer_config.json"
    table = read_table(path) if path.exists() else {}
    if "chat_template" in table:  # transformers prefers the file, other programs read this key
        text = json.dumps(table | {"chat_template": chosen.text}, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")
