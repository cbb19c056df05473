"""The tables for ``length_penalty``: three ways to count a rollout's length.

Each token counts once: tokens that a later sample repeats from an earlier one do not count again.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeFloat, model_validator

from prime_rl import Group, PluginConfig, Rollout
from prime_rl_grpo.shaping import efficiency_shaped, linear_shaped

TOOL_RESPONSES = "_total_tool_response_tokens"
"""Suffix of the rollout metrics that count tokens of tool responses."""


class Penalty(PluginConfig):
    """Base class of the penalties."""

    def shaped(self, group: Group) -> list[float]:
        """The group's rewards, shaped by length."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _weighs_something(self) -> Penalty:
        weights = {k: getattr(self, k) for k in type(self).model_fields if k.endswith("_weight")}
        if weights and not any(weights.values()):
            raise ValueError(
                f"{', '.join(weights)} are all 0, so length would not count: raise one of them, or "
                "remove length_penalty"
            )
        return self


class TokensPenalty(Penalty):
    """``type = "tokens"``: efficiency shaping by sampled tokens and tool responses."""

    type: Literal["tokens"] = "tokens"
    completion_weight: NonNegativeFloat = 1.0
    """Cost of a token that the policy sampled."""
    tool_response_weight: NonNegativeFloat = 1.0
    """Cost of a token of a tool response. Their number is the sum of the rollout's metrics whose
    names end in ``_total_tool_response_tokens``, 0 without such metrics."""

    def shaped(self, group: Group) -> list[float]:
        """Raise the reward of the best answers with fewer tokens."""
        return efficiency_shaped([rollout.reward for rollout in group], [*map(self._cost, group)])

    def _cost(self, rollout: Rollout) -> float:
        tools = sum(n for name, n in rollout.metrics.items() if name.endswith(TOOL_RESPONSES))
        completion = rollout.num_trainable_tokens
        return self.completion_weight * completion + self.tool_response_weight * tools


class TurnsPenalty(Penalty):
    """``type = "turns"``: efficiency shaping by the number of turns."""

    type: Literal["turns"] = "turns"

    def shaped(self, group: Group) -> list[float]:
        """Raise the reward of the best answers with fewer turns."""
        turns = [rollout.num_turns for rollout in group]
        return efficiency_shaped([rollout.reward for rollout in group], turns)


class LinearPenalty(Penalty):
    """``type = "linear"``: subtract a share of the mean reward in proportion to length."""

    type: Literal["linear"] = "linear"
    output_weight: NonNegativeFloat = 0.25
    """Share subtracted from the rollout with the most sampled tokens."""
    input_weight: NonNegativeFloat = 0.1
    """Share subtracted from the rollout with the most tokens that were not sampled."""
    turns_weight: NonNegativeFloat = 0.1
    """Share subtracted from the rollout with the most turns."""

    def shaped(self, group: Group) -> list[float]:
        """Subtract the shares from every reward."""
        costs: list[tuple[float, list[float]]] = [
            (self.output_weight, [rollout.num_trainable_tokens for rollout in group]),
            (self.input_weight, [_num_new_input_tokens(rollout) for rollout in group]),
            (self.turns_weight, [rollout.num_turns for rollout in group]),
        ]
        return linear_shaped([rollout.reward for rollout in group], costs)


def _num_new_input_tokens(rollout: Rollout) -> int:
    repeats = (s.is_repeat for s in rollout.samples if s.is_repeat is not None)
    return rollout.num_input_tokens - sum(int(repeat.sum()) for repeat in repeats)


PENALTIES: Mapping[str, type[Penalty]] = {
    "tokens": TokensPenalty,
    "turns": TurnsPenalty,
    "linear": LinearPenalty,
}


def _by_type(value: Any) -> Any:
    """Validate with the class of ``type``, so that errors mention only that class."""
    if isinstance(value, Penalty):
        return value
    names = ", ".join(f'"{name}"' for name in PENALTIES)
    if not isinstance(value, Mapping):
        raise ValueError(f'expected a table such as {{ type = "tokens" }}, with type among {names}')
    if "type" not in value:
        raise ValueError(f"the table has no type; expected one of {names}")
    chosen = PENALTIES.get(str(value["type"]))
    if chosen is None:
        raise ValueError(f"got type = {value['type']!r}, expected one of {names}")
    for key in value:
        if key not in chosen.model_fields:
            raise ValueError(_unknown(key, chosen, value["type"]))

    return chosen.model_validate(value)


def _unknown(key: str, chosen: type[Penalty], kind: str) -> str:
    known = sorted(set(chosen.model_fields) - {"type"})
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
    return f'unknown key {key!r} of type = "{kind}"; {hint}'


LengthPenalty = Annotated[TokensPenalty | TurnsPenalty | LinearPenalty, BeforeValidator(_by_type)]
"""The type of an algorithm's ``length_penalty`` field."""
