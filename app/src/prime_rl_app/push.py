"""A run's model, to a folder or to the hub."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from prime_rl import ConfigError, RunError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def push(weights: Path, to: str | Path, private: bool) -> str:
    """Copy or upload a model folder. Raises ``ConfigError`` and ``RunError``."""
    text = str(to)
    is_path = isinstance(to, Path) or text.startswith((".", "/", "~")) or Path(text).exists()
    if is_path or not HUB_ID.fullmatch(text) or Path(text).parent.is_dir():
        return str(_copy(weights, Path(text).expanduser()))
    return _upload(weights, text, private)


def _copy(weights: Path, folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"push: {folder} is a file; expected a folder, or a hub id (owner/name)")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ConfigError(f"push: {folder} holds something else than a model. Name a new folder.")
    try:
        shutil.copytree(weights, folder, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise RunError(f"push: copying {weights} to {folder} failed: {error}") from error
    return folder


def _upload(weights: Path, name: str, private: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=weights)
    except Exception as error:  # errors of the hub and of the network
        if _is_of_network(error):
            raise RunError(
                f"push: the hub cannot be reached ({error}), so {name!r} was not uploaded. The "
                f"model is in {weights}. Try again with a network, or give a folder: "
                "run.push('./mine')."
            ) from error
        raise RunError(
            f"push: uploading to {name!r} failed: {type(error).__name__}: {error}. Log in with "
            "'hf auth login', or give a folder."
        ) from error
    return str(url)


def _is_of_network(error: Exception) -> bool:
    """Whether the hub was not reached. By name: releases of huggingface_hub use different HTTP
    clients, whose classes share these names."""
    names = {each.__name__ for each in type(error).__mro__}
    return not names.isdisjoint({"TransportError", "ConnectionError", "Timeout"})
