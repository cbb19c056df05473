"""The losses of a proof: each group is an optimizer step, and the ratio can be left out."""

from __future__ import annotations

from typing import Any

from prime_rl import Algorithm, ConfigError, Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import LossTable
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.offers import LOSS, select

DEFAULT = "default"
"""The loss of ``[trainer.loss]`` where no config sets one; without it, ``Ratio``."""


class Ratio(Loss):
    """Importance-weighted REINFORCE without any clipping: -w A exp(t - i)."""

    name = "ratio"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        import torch

        log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
        return _summed(inputs, torch.where(inputs.loss_mask, log_ratio, 0.0).exp())


class NoRatio(Loss):
    """REINFORCE that takes every sample for its own: -w A t."""

    name = "no_ratio"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return _summed(inputs, inputs.trainer_logprobs)


def _summed(inputs: LossInputs, term: Any) -> LossOutputs:
    import torch

    terms = -inputs.advantages * term
    if inputs.loss_weights is not None:
        terms = terms * inputs.loss_weights
    return LossOutputs(torch.where(inputs.loss_mask, terms, 0.0).sum(), {})


def components(
    algorithm: Algorithm, loss: Loss | str | None, normalize_by: str | None
) -> Components:
    """The losses of a step of one group; a constant divisor is 1.

    ``loss`` is that of the rl component, ``normalize_by`` the divisor of the component that the
    algorithm trains. Raises ``ConfigError`` for a loss that is not installed.
    """
    installed = installed_losses().installed
    if loss is None:
        loss = DEFAULT if DEFAULT in installed else Ratio(PluginConfig())
    if isinstance(loss, str):
        cls = select(LOSS, loss, installed, "--loss")
        loss = cls(cls.config_class())

    classes = {name: offered.cls for name, offered in installed.items()} | {"rl": type(loss)}
    if algorithm.action_loss not in classes:
        raise ConfigError(f"no installed loss is called {algorithm.action_loss!r}")
    tables = {}
    for name, cls in classes.items():
        unit = normalize_by if name == algorithm.action_loss else None
        constant = 1.0 if (unit or cls.normalize_by) == "constant" else None
        table = {"normalize_by": unit, "per_env": True, "constant": constant}
        tables[name] = LossTable.model_validate({k: v for k, v in table.items() if v is not None})

    heads = {name: installed_losses().heads[name] for name in algorithm.needs_heads}
    return Components(tables, installed, heads).with_rl(loss, tables["rl"])
