"""``[trainer.loss] type = "custom"``: the user's own function as the rl loss.

The function gets the ``LossInputs`` of one sequence and the keyword arguments of the table. It
returns ``LossOutputs`` with the sum over ``inputs.loss_mask``. Inputs off that mask are set to zero
before the call and cut from the graph, so that a plain ``exp`` or ``log`` gives no NaN there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from pydantic import model_validator

from prime_rl import (
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    PluginError,
    import_function,
)


class CustomLossConfig(PluginConfig):
    """``[trainer.loss] type = "custom"``"""

    import_path: str
    """The function: ``my_module.my_loss`` or ``my_module:my_loss``, in an installed package or the
    working directory, or ``path/to/file.py:my_loss``."""
    kwargs: dict[str, Any] = {}
    """Its keyword arguments besides ``inputs``."""

    @model_validator(mode="after")
    def _check(self) -> CustomLossConfig:
        self.function()
        return self

    def function(self) -> Callable[..., Any]:
        """Raises ``ConfigError`` if there is no such function, or it does not take ``kwargs``."""
        return import_function(self.import_path, self.kwargs, "inputs")


class CustomLoss(Loss):
    """Calls the function once per sequence."""

    name = "custom"
    config_class = CustomLossConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.settings = cast(CustomLossConfig, config)
        self.function = self.settings.function()

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Raises ``PluginError`` if the function returns anything but valid ``LossOutputs``."""
        from torch import Tensor

        outputs = self.function(_members_only(inputs), **self.settings.kwargs)
        if not isinstance(outputs, LossOutputs):
            raise self._wrong(f"returned {type(outputs).__name__}")
        if not isinstance(outputs.loss, Tensor):
            raise self._wrong(f"returned a loss of type {type(outputs.loss).__name__}")
        if outputs.loss.dim():
            raise self._wrong(f"returned a loss of shape {tuple(outputs.loss.shape)}")
        if not isinstance(outputs.metrics, Mapping):
            raise self._wrong(f"returned metrics of type {type(outputs.metrics).__name__}")
        return outputs

    def _wrong(self, found: str) -> PluginError:
        return PluginError(
            f"trainer.loss.import_path {self.settings.import_path!r}: the function {found}, "
            "expected prime_rl.LossOutputs(loss, metrics): loss a 0-dim tensor, the sum over "
            "inputs.loss_mask, and metrics a dict of tensors."
        )


def _members_only(inputs: LossInputs) -> LossInputs:
    """The inputs with zeros off the mask."""
    columns = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages")
    columns_here = {name: getattr(inputs, name) for name in (*columns, "loss_weights")}
    return replace(
        inputs,
        **{
            name: column.where(inputs.loss_mask, column.new_zeros(()))
            for name, column in columns_here.items()
            if column is not None
        },
    )
