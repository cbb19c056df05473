"""Conversations as tokens of the policy's tokenizer, where no rollout has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl import ROLES, ConfigError, Sample
from prime_rl.env.rendering import load_tokenizer

Messages = Sequence[Mapping[str, Any]]
Mask = npt.NDArray[np.bool_]


class Rendering:
    """The run's renderer and its tokenizer, loaded at first use. Sync and quick: a render takes a
    fraction of a millisecond."""

    def __init__(self, tokenizer_path: Path, config: Any) -> None:
        """``config`` is a config object of the ``renderers`` package."""
        self._path = tokenizer_path
        self._config = config
        self._made: dict[str, Any] = {}

    def ids(
        self, messages: Messages, *, config: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Tokens of a conversation; ``config`` selects another renderer than the run's."""
        renderer = self._renderer(config or self._config)
        ids: list[int] = renderer.render_ids(
            list(messages), add_generation_prompt=add_generation_prompt
        )
        return ids

    def decode(
        self, token_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True
    ) -> str:
        """Their text."""
        ids = [int(token) for token in token_ids]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def stop_token_ids(self) -> list[int]:
        """The tokens that end an assistant's turn."""
        return list(self._renderer(self._config).get_stop_token_ids())

    def supervised_sample(self, messages: Messages) -> Sample:
        """A conversation whose assistant tokens train, as if the policy had sampled them.

        Tokens of the generation prompt (an empty thought, where thinking is off) do not train: no
        rollout samples them. Raises ``ConfigError`` if the renderer does not mark the assistant's
        tokens.
        """
        renderer = self._renderer(self._config)
        whole = renderer.render(list(messages))
        size = len(whole.token_ids)
        if len(whole.sampled_mask) != size:
            raise ConfigError(
                f"orchestrator.renderer: {self._config.name!r} does not mark the assistant's "
                "tokens, so demonstrations cannot be trained on. Set the renderer of the "
                "model's family."
            )
        mask = np.asarray(whole.sampled_mask, np.bool_)
        owners = np.asarray(whole.message_indices, np.int32)
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                self._unmask_prompt(messages, index, whole.token_ids, owners, mask)
        roles = [ROLES.index(str(message["role"])) for message in messages]
        content = whole.is_content if len(whole.is_content) == size else None
        return Sample(
            token_ids=np.asarray(whole.token_ids, np.int32),
            loss_mask=mask,
            inference_logprobs=np.zeros(size, np.float32),
            roles=np.array([roles[owner] if owner >= 0 else -1 for owner in owners], np.int8),
            is_content=None if content is None else np.asarray(content, np.bool_),
        )

    def _unmask_prompt(
        self,
        messages: Messages,
        index: int,
        token_ids: list[int],
        owners: Any,
        mask: npt.NDArray[np.bool_],
    ) -> None:
        """Unmask the tokens of message ``index`` that belong to its generation prompt."""
        before = self.ids(messages[:index])
        opener = self.ids(messages[:index], add_generation_prompt=True)[len(before) :]
        for position, token in zip(np.flatnonzero(owners == index), opener, strict=False):
            if token_ids[position] != token:
                return
            mask[position] = False

    def _renderer(self, config: Any) -> Any:
        key = config.model_dump_json()
        if key not in self._made:
            from renderers import create_renderer

            self._made[key] = create_renderer(self._tokenizer, config)
        return self._made[key]

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._path)
