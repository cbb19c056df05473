"""``tiny-reverse``: a policy of 0.4M parameters that half knows how to reverse a word.

Made here in seconds: a byte-level tokenizer, a Qwen3 model, and supervised steps until just past
the point where reversal "clicks" (a phase transition, 0 to 0.7 exact within some 30 steps). From
there a positional reward has a gradient to follow. Before it, sampling almost never gets a letter
right and RL learns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from prime_rl import ModelMaker, PluginConfig

Share = Annotated[float, Field(ge=0, le=1)]


class TinyReverseConfig(PluginConfig):
    """``[model] name = "tiny-reverse"``: its architecture and its warm-up."""

    hidden_size: PositiveInt = 128
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 256
    """Width of each MLP."""
    num_layers: PositiveInt = 2
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    max_position_embeddings: PositiveInt = 2048
    """Longest context, in tokens."""
    min_letters: PositiveInt = 4
    """Shortest word of the warm-up."""
    max_letters: PositiveInt = 8
    """Longest word of the warm-up."""
    warmup_exact: Share = 0.15
    """Stop the warm-up when greedy decoding would reverse this share of fresh words exactly.
    0: an untrained model, after a handful of steps."""
    warmup_batch_size: PositiveInt = 64
    """Words a supervised step."""
    warmup_lr: PositiveFloat = 2e-3
    """Peak learning rate of the supervised steps (AdamW)."""
    warmup_ramp_steps: NonNegativeInt = 20
    """Steps over which the learning rate rises to its peak."""
    warmup_max_steps: PositiveInt = 1000
    """Give up after so many steps; five seeds needed 52 to 63."""


class TinyReverse(ModelMaker):
    """Makes the folder of a tiny Qwen3 policy, warmed up on reversing words."""

    name = "tiny-reverse"
    config_class = TinyReverseConfig
    config: TinyReverseConfig

    def make(self, directory: Path, seed: int, progress: Callable[[str, float], None]) -> None:
        """Write the model folder, and ``.ready`` in it last. Some 5 CPU seconds after importing
        torch.

        Raises ``RunError`` if the warm-up does not get there within ``warmup_max_steps``.
        """
        from prime_rl_environments.tiny.make import make_model

        make_model(self.config, directory, seed, progress)
