"""The table ``roles``: which messages are trained on, and how much."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from prime_rl import PluginConfig


class RoleWeight(PluginConfig):
    """How much one role's tokens count."""

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Weight of the cross-entropy of each token: ECHO's lambda."""


class RoleWeights(PluginConfig):
    """The roles that are trained on; the others are left out."""

    # In the order of the indices that ``Sample.roles`` holds.
    system: RoleWeight | None = None
    """Instructions that arrive between turns; never those of the initial prompt."""
    user: RoleWeight | None = None
    """Feedback after the policy's first turn."""
    assistant: RoleWeight | None = None
    """Turns of an assistant that nobody sampled: those the environment puts in."""
    tool: RoleWeight | None = None
    """Responses of tools."""

    @model_validator(mode="after")
    def _has_one(self) -> RoleWeights:
        if not any(getattr(self, role) for role in type(self).model_fields):
            raise ValueError(
                "no role is left to train on. Set one, e.g. roles.tool.alpha = 0.1; leave the "
                'table out for that default; or use type = "grpo" to train on none'
            )
        return self

    def column(self) -> npt.NDArray[np.float32]:
        """Alpha by role index; the last entry, which the index -1 reaches, is an unknown role's
        0.0."""
        weights = [getattr(self, role) for role in type(self).model_fields]
        return np.array([*(w.alpha if w else 0.0 for w in weights), 0.0], np.float32)
