"""The table ``roles``: which messages are trained, and with which weight."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from prime_rl import PluginConfig


class RoleWeight(PluginConfig):
    """The weight of one role."""

    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Weight of each token's cross-entropy: ECHO's lambda."""


class RoleWeights(PluginConfig):
    """The roles to train."""

    # In the order of the indices in ``Sample.roles``.
    system: RoleWeight | None = None
    """Instructions that arrive between turns; never those of the initial prompt."""
    user: RoleWeight | None = None
    """Feedback after the policy's first turn."""
    assistant: RoleWeight | None = None
    """Assistant turns that the environment wrote, so that they were not sampled."""
    tool: RoleWeight | None = None
    """Responses of tools."""

    @model_validator(mode="after")
    def _has_one(self) -> RoleWeights:
        if not any(getattr(self, role) for role in type(self).model_fields):
            raise ValueError(
                "there is no role to train. Set one, e.g. roles.tool.alpha = 0.1; remove the "
                'table for that default; or use type = "grpo" to train none'
            )
        return self

    def column(self) -> npt.NDArray[np.float32]:
        """Alpha by role index. The last entry is 0.0, for the index -1 of an unknown role."""
        weights = [getattr(self, role) for role in type(self).model_fields]
        return np.array([*(w.alpha if w else 0.0 for w in weights), 0.0], np.float32)
