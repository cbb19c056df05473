"""The losses of a proof: each group is an optimizer step, and the ratio can be left out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from prime_rl import Algorithm, ConfigError, Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import HeadTable, LossTable
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import HEAD, LOSS, collect, select, settings_of

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


TABLES = ("loss", "losses", "heads")
"""The tables of ``[trainer]`` that a proof takes."""


def components(
    algorithm: Algorithm,
    loss: Loss | str | None,
    normalize_by: str | None,
    trainer: Mapping[str, Any] = MappingProxyType({}),
) -> Components:
    """The losses of a step of one group; a constant divisor is 1.

    ``loss`` is that of the rl component, ``normalize_by`` the divisor of the component that the
    algorithm trains. ``trainer``: settings of losses and heads, as in the tables ``loss``,
    ``losses.NAME`` and ``heads.NAME`` of ``[trainer]``. Raises ``ConfigError`` for a loss that is
    not installed, and for settings that nothing takes.
    """
    unknown = [name for name in trainer if name not in TABLES]
    if unknown:
        raise ConfigError(
            f"trainer.{unknown[0]}: a proof takes the settings of trainer.loss, "
            "trainer.losses.NAME and trainer.heads.NAME only."
        )

    installed = installed_losses().installed
    settings = dict(trainer.get("loss", {}))
    if loss is None:
        loss = DEFAULT if DEFAULT in installed else Ratio(PluginConfig())
    if isinstance(loss, str):
        cls = select(LOSS, loss, offers=installed, where="--loss")
        loss = cls(settings_of(cls, LOSS, settings=settings, where="trainer.loss"))
    elif settings:
        raise ConfigError("trainer.loss: the loss is given with its settings. Set them there.")

    classes = {name: offered.cls for name, offered in installed.items()} | {"rl": type(loss)}
    if algorithm.action_loss not in classes:
        raise ConfigError(f"no installed loss is called {algorithm.action_loss!r}")
    of_losses = dict(trainer.get("losses", {}))
    for name in of_losses:
        select(LOSS, name, offers=installed, where=f"trainer.losses.{name}")

    tables = {}
    for name, cls in classes.items():
        unit = normalize_by if name == algorithm.action_loss else None
        constant = 1.0 if (unit or cls.normalize_by) == "constant" else None
        table = {"normalize_by": unit, "per_env": True, "constant": constant}
        set_keys = {key: value for key, value in table.items() if value is not None}
        tables[name] = LossTable.model_validate({**of_losses.get(name, {}), **set_keys})

    of_heads = dict(trainer.get("heads", {}))
    offered = collect(load_plugins(TRAINER_GROUP), HEAD)
    heads = {}
    for name in dict.fromkeys([*algorithm.needs_heads, *of_heads]):
        where = f"trainer.heads.{name}"
        head = select(HEAD, name, offers=offered, where=where)
        of_head = HeadTable.model_validate(of_heads.get(name, {}))
        heads[name] = head(settings_of(head, HEAD, settings=of_head.settings, where=where))

    return Components(tables, installed, heads).with_rl(loss, tables["rl"])
