"""Fixtures of the trainer's tests, with the kernels' attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from trainer_fixtures import make_qwen3 as make_qwen3
from trainer_fixtures import pack as pack
from trainer_fixtures import random_documents as random_documents
from trainer_fixtures import tiny_qwen3
from transformers import PreTrainedModel

from prime_rl_kernels.attention import NAMES, register


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """The tiny model in double precision for exact comparisons. ``attention``: ``sdpa``, that of
    transformers, or a kernel's: ``varlen``, ``mask``."""
    register()

    def make(attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
        tiny = tiny_qwen3(**changes).double()
        names: dict[str, str] = {"sdpa": "sdpa", "varlen": NAMES["varlen"], "mask": NAMES["mask"]}
        tiny.set_attn_implementation(names[attention])
        return tiny

    return make
