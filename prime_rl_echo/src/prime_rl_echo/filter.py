"""The table ``filter``: a user's function that restricts which tokens are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from prime_rl import PluginConfig, Rollout, StreamError, import_function

BoolColumn = npt.NDArray[np.bool_]


class TokenFilter(PluginConfig):
    """``function(rollout, **kwargs)`` returns one keep-mask for each of ``rollout.samples``, as
    long as the sample's ``token_ids``."""

    import_path: str
    """``module.function`` or ``module:function``, in an installed package or the working directory.
    """
    kwargs: dict[str, Any] = {}
    """Its keyword arguments after the rollout."""

    @model_validator(mode="after")
    def _check(self) -> TokenFilter:
        self.function()
        return self

    def function(self) -> Callable[..., Any]:
        """Raises ``ConfigError`` if there is no such function, or it does not take ``kwargs``."""
        return import_function(self.import_path, self.kwargs, "rollout")

    def bound(self) -> Callable[[Rollout], list[BoolColumn]]:
        """The function with its ``kwargs``. It raises ``StreamError`` if a result is invalid."""
        function = self.function()
        return lambda rollout: self._checked(rollout, function(rollout, **self.kwargs))

    def _checked(self, rollout: Rollout, masks: Any) -> list[BoolColumn]:
        where = (
            f"env {rollout.env!r}, group {rollout.group_id}: algo 'echo': filter {self.import_path}"
        )
        if not isinstance(masks, Sequence) or len(masks) != len(rollout.samples):
            raise StreamError(
                f"{where}: got {_shape(masks)}, expected one keep-mask for each of the rollout's "
                f"{len(rollout.samples)} samples"
            )

        for index, (mask, sample) in enumerate(zip(masks, rollout.samples, strict=True)):
            if not _is_mask(mask, len(sample)):
                raise StreamError(
                    f"{where}, sample {index}: got {_shape(mask)}, expected one boolean for each "
                    f"of its {len(sample)} tokens"
                )

        return [np.asarray(mask, np.bool_) for mask in masks]


def _is_mask(mask: Any, length: int) -> bool:
    if not isinstance(mask, Sequence | np.ndarray) or len(mask) != length:
        return False
    return all(isinstance(keep, bool | np.bool_) for keep in mask)


def _shape(value: Any) -> str:
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        return repr(value)
    kinds = sorted({type(each).__name__ for each in value})
    return f"{len(value)} of {', '.join(kinds) or 'nothing'}"
