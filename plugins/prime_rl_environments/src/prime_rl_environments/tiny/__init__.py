"""``tiny-reverse`` and ``tiny-chat``: policies of 0.4M parameters that can partly do their tasks.

Created in seconds: a byte-level tokenizer, a Qwen3 model, and supervised steps until just past the
phase transition of reversal (0 to 0.7 exact within some 30 steps). From there a positional reward
gives RL a gradient. Before it, sampled letters are almost never right and RL learns nothing.

``tiny-reverse`` learns ``text-reversal`` only, in 5 CPU seconds. ``tiny-chat`` learns every task of
this distribution (``lessons``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from prime_rl import ModelMaker, PluginConfig, Removed
from prime_rl.rundir.processes import lasting_imports
from prime_rl_environments.tiny.lessons import LESSONS, Lesson

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Architecture of the models, and their supervised steps."""

    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 256
    """Width of each MLP."""
    num_layers: int = 2
    """Transformer blocks."""
    num_heads: int = 4
    """Query heads of each block."""
    num_kv_heads: int = 2
    """Key and value heads of each block; divides ``num_heads``."""
    head_dim: int = 32
    """Width of one head."""
    max_position_embeddings: int = 2048
    """Longest context, in tokens."""
    warmup_batch_size: int = 64
    """Conversations per supervised step."""
    warmup_lr: float = 2e-3
    """Peak learning rate of the supervised steps (AdamW)."""
    warmup_ramp_steps: int = 20
    """Steps over which the learning rate rises to its peak."""
    warmup_max_steps: int = 1000
    """Fail after this many steps."""


class TinyConfig(PluginConfig):
    """Settings of every tiny policy."""

    removed = {
        name: Removed(
            default=value,
            instead="The tiny models have one architecture and one warm-up, which the configs of "
            "this repository are tuned for. For another model, give model.name its folder.",
        )
        for name, value in asdict(Recipe()).items()
    }


class TinyReverseConfig(TinyConfig):
    """``[model] name = "tiny-reverse"``: a warm-up of some 60 steps."""

    min_letters: PositiveInt = 4
    """Shortest word of the warm-up."""
    max_letters: PositiveInt = 8
    """Longest word of the warm-up."""
    warmup_exact: Share = 0.15
    """Stop the warm-up when greedy decoding would reverse this share of unseen words exactly.
    0: an untrained model, after a few steps. 0.9: a teacher, after some 250 steps."""


class TinyReverse(ModelMaker):
    """Creates the folder of a tiny Qwen3 policy, warmed up on reversing words."""

    name = "tiny-reverse"
    config_class = TinyReverseConfig
    config: TinyReverseConfig
    recipe: ClassVar[Recipe] = Recipe()

    def make(self, directory: Path, seed: int, progress: Callable[[str, float], None]) -> None:
        """Write the model folder, and ``.ready`` last. Takes some 5 CPU seconds after importing
        torch.

        Raises ``RunError`` if the warm-up misses its target within ``Recipe.warmup_max_steps``.
        """
        with lasting_imports():
            from prime_rl_environments.tiny.make import make_model

        make_model(self.config, self.recipe, directory, seed=seed, progress=progress)


class TinyChatConfig(TinyConfig):
    """``[model] name = "tiny-chat"``: what its warm-up teaches."""

    lessons: Annotated[list[Lesson], Field(min_length=1)] = [
        lesson for lesson in LESSONS if lesson != "hint"
    ]
    """The tasks to learn: ``reverse`` (text-reversal), ``retry`` (reverse-retry), ``lookup``
    (word-lookup), ``relay`` (reverse-relay), ``propose`` (propose-solve), and ``hint``
    (text-reversal after a system message with the answer; not by default)."""
    warmup_exact: Share = 0.12
    """Stop the warm-up when greedy decoding would complete this share of unseen conversations
    exactly, in every lesson but ``propose``, which has many right answers. ``hint`` is always
    learned to 0.95."""


class TinyChat(ModelMaker):
    """Creates the folder of a tiny Qwen3 policy, warmed up on conversations of several tasks."""

    name = "tiny-chat"
    config_class = TinyChatConfig
    config: TinyChatConfig
    recipe: ClassVar[Recipe] = Recipe()

    def make(self, directory: Path, seed: int, progress: Callable[[str, float], None]) -> None:
        """Write the model folder, and ``.ready`` last.

        Raises ``RunError`` if the warm-up misses its target within ``Recipe.warmup_max_steps``.
        """
        with lasting_imports():
            from prime_rl_environments.tiny.chat import make_chat_model

        make_chat_model(self.config, self.recipe, directory, seed=seed, progress=progress)
