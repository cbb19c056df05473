"""Conversations as tokens of the policy's tokenizer, where no rollout has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl import ROLES, ConfigError, Sample
from prime_rl.env.rendering import load_tokenizer

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _Turns:
    """Columns of one or more turns of the policy, each after its prompt."""

    token_ids: list[int]
    mask: list[bool]
    """Sampled by the policy."""
    owners: list[int]
    """The message of each token; -1: none."""
    content: list[bool] | None
    reply: int
    """Where the last reply begins."""

    def after(self, prompt: Any, first: int) -> _Turns:
        """The same reply after a prompt that extends the turn before. ``first``: the message that
        its own messages are counted from."""
        size = len(prompt.token_ids)
        owners = [owner + first if owner >= 0 else -1 for owner in prompt.message_indices]
        # None: the renderer does not tell a message's body from its scaffold.
        content = list(prompt.is_content) if len(prompt.is_content) == size else None
        if content is not None and self.content is not None:
            content += self.content[self.reply :]

        return _Turns(
            token_ids=[*prompt.token_ids, *self.token_ids[self.reply :]],
            mask=[False] * size + self.mask[self.reply :],
            owners=owners + self.owners[self.reply :],
            content=None if self.content is None else content,
            reply=size,
        )

    def extends(self, earlier: _Turns) -> bool:
        """Whether the prompt begins with the earlier turn."""
        return self.token_ids[: min(self.reply, len(earlier.token_ids))] == earlier.token_ids

    def joined(self, earlier: _Turns) -> _Turns:
        """Both, where this extends ``earlier``."""
        size = len(earlier.token_ids)
        content = None
        if self.content is not None and earlier.content is not None:
            content = earlier.content + self.content[size:]
        return replace(
            self,
            mask=earlier.mask + self.mask[size:],
            owners=earlier.owners + self.owners[size:],
            content=content,
        )

    def sample(self, messages: Messages) -> Sample:
        roles = [ROLES.index(str(message["role"])) for message in messages]
        return Sample(
            token_ids=np.asarray(self.token_ids, np.int32),
            loss_mask=np.asarray(self.mask, np.bool_),
            inference_logprobs=np.zeros(len(self.token_ids), np.float32),
            roles=np.array([roles[each] if each >= 0 else -1 for each in self.owners], np.int8),
            is_content=None if self.content is None else np.asarray(self.content, np.bool_),
        )


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

    def supervised_samples(self, messages: Messages, tools: Tools | None = None) -> list[Sample]:
        """A conversation whose assistant tokens train, as if the policy had sampled them.

        Each reply follows the prompt that a rollout would have had: with the block of ``tools``,
        and with earlier thoughts only as far as the renderer keeps them. A reply whose prompt
        extends the turn before continues that sample. Any other reply begins a new one.
        Tokens of a prompt (an empty thought, where thinking is off) do not train.

        Raises ``ConfigError`` if no rollout could sample a reply after its prompt, or the renderer
        leaves out the calls of a reply.
        """
        renderer = self._renderer(self._config)
        turns: list[_Turns] = []
        before = -1

        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue

            turn = self._turn(messages, index, tools)
            following = list(messages[before + 1 : index])
            bridged = None
            # As in a rollout, the prompt extends the previous turn if the renderer can.
            if turns and following:
                last = turns[-1]
                bridged = renderer.bridge_to_next_turn(
                    last.token_ids[: last.reply],
                    last.token_ids[last.reply :],
                    following,
                    tools=tools,
                )

            if bridged is not None:
                turn = turn.after(bridged, before + 1)
            if turns and turn.extends(turns[-1]):
                turn = turn.joined(turns.pop())
            turns.append(turn)
            before = index

        return [turn.sample(messages) for turn in turns]

    def supervised_sample(self, messages: Messages, tools: Tools | None = None) -> Sample:
        """``supervised_samples`` of a conversation that is one sample. Raises ``ConfigError`` for
        one that is several."""
        samples = self.supervised_samples(messages, tools)
        if len(samples) != 1:
            raise ConfigError(
                f"a conversation of {len(messages)} messages is {len(samples)} samples for the "
                f"renderer {self._config.name!r}, expected one: use supervised_samples"
            )
        return samples[0]

    def _turn(self, messages: Messages, index: int, tools: Tools | None) -> _Turns:
        """The reply ``messages[index]`` after its prompt, rendered anew."""
        renderer = self._renderer(self._config)
        prompt = renderer.render_ids(
            list(messages[:index]), tools=tools, add_generation_prompt=True
        )
        whole = renderer.render(list(messages[: index + 1]), tools=tools)
        if whole.token_ids[: len(prompt)] != list(prompt):
            raise ConfigError(
                f"message {index} of a demonstration could not be sampled in a rollout: the "
                f"renderer {self._config.name!r} renders it in another way than its prompt begins. "
                "A thought needs a renderer that thinks ([orchestrator.renderer]); a prompt that "
                "opens a thought needs a message with one (reasoning_content)"
            )

        if messages[index].get("tool_calls"):
            self._check_calls(messages, index, token_ids=whole.token_ids, tools=tools)

        mask = [False] * len(prompt) + self._sampled(whole, len(prompt))
        # The turn ends with its last sampled token: the policy samples nothing behind it.
        end = 1 + max(
            (place for place, is_sampled in enumerate(mask) if is_sampled), default=len(prompt) - 1
        )

        content = list(whole.is_content) if len(whole.is_content) == len(mask) else None
        return _Turns(
            token_ids=list(whole.token_ids[:end]),
            mask=mask[:end],
            owners=list(whole.message_indices[:end]),
            content=None if content is None else content[:end],
            reply=len(prompt),
        )

    def _check_calls(
        self, messages: Messages, index: int, token_ids: Sequence[int], tools: Tools | None
    ) -> None:
        """Raises ``ConfigError`` if ``token_ids`` are those of ``messages[index]`` without its
        calls: the policy would learn to say nothing where it should call a tool."""
        without = {key: value for key, value in messages[index].items() if key != "tool_calls"}
        without["content"] = without.get("content") or ""
        try:
            silent = self._renderer(self._config).render_ids(
                [*messages[:index], without], tools=tools
            )
        except Exception:  # a template is a program: this one needs the calls
            return

        if list(silent) == list(token_ids):
            raise ConfigError(
                f"message {index} of a demonstration calls tools, and the renderer "
                f"{self._config.name!r} leaves calls out. Set orchestrator.renderer.name to a "
                "renderer that writes them, use a model whose chat template does, or leave the "
                "row out"
            )

    def _sampled(self, whole: Any, start: int) -> list[bool]:
        """Which tokens of a reply, which begins at ``start``, a policy would have sampled: as the
        renderer says, else all up to the one that ends the turn."""
        size = len(whole.token_ids)
        if len(whole.sampled_mask) == size:
            return list(whole.sampled_mask[start:])

        stops = set(self.stop_token_ids())
        ends = [place for place in range(start, size) if whole.token_ids[place] in stops]
        last = ends[-1] if ends else size - 1
        return [place <= last for place in range(start, size)]

    def _renderer(self, config: Any) -> Any:
        key = config.model_dump_json()
        if key not in self._made:
            from renderers import create_renderer

            self._made[key] = create_renderer(self._tokenizer, config)
        return self._made[key]

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._path)
