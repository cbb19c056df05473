"""The losses of a run as components: what each reads, sees whole and is divided by.

Both sides use it and neither imports torch for it. The orchestrator checks streams and packs what
the losses declare; the trainer calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from prime_rl.config.trainer import LossTable, TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.loss import Loss, Scope, Unit
from prime_rl.plugins.manager import Hooks, load_plugins
from prime_rl.plugins.offers import LOSS, Offered, collect, select, settings_of
from prime_rl.streams import COMPUTED, TOP_IDS, LossComponent


@dataclass(frozen=True, eq=False)
class Component:
    """One loss of the run, with its settings."""

    name: LossComponent
    cls: type[Loss]
    settings: PluginConfig = field(default_factory=PluginConfig)
    unit: Unit = "tokens"
    """What its sum is divided by."""
    per_env: bool = False
    constant: float | None = None

    @cached_property
    def loss(self) -> Loss:
        """The loss itself; a user's own may import torch."""
        return self.cls(self.settings)

    @property
    def scope(self) -> Scope:
        return "token" if self.cls.token_wise else self.cls.scope

    @cached_property
    def defaults(self) -> dict[str, float | None]:
        """What stands for a stream that a token lacks, by name."""
        return dict(item for item in self.cls.reads if not isinstance(item, str))

    @cached_property
    def computed(self) -> frozenset[str]:
        """The computed columns that it reads."""
        return COMPUTED.intersection(name for name in self.cls.reads if isinstance(name, str))

    @cached_property
    def required(self) -> list[str]:
        """The streams that its members must have."""
        names = [n for n in self.cls.reads if isinstance(n, str) and n not in COMPUTED]
        return [TOP_IDS, *names] if "top_logprobs" in self.computed else names

    @cached_property
    def streams(self) -> list[str]:
        """The streams that it reads, required or not."""
        return [*self.required, *self.defaults]

    @property
    def scales_tokens(self) -> bool:
        """Whether each token weighs 1 / its unit's tokens: the sum is over tokens, and the run
        divides it by a larger unit."""
        return self.cls.normalize_by == "tokens" and self.unit not in ("tokens", "constant")

    @property
    def needs(self) -> frozenset[str]:
        """The computed columns that it, its scope or its divisor take."""
        ids = {"rollout": {"rollout_ids"}, "group": {"group_ids"}}
        units = {"rollouts": {"rollout_ids"}, "groups": {"group_ids"}}
        return self.computed | ids.get(self.scope, set()) | units.get(self.unit, set())


@dataclass(frozen=True, eq=False)
class Components:
    """Every loss that a batch of the run may name."""

    tables: Mapping[LossComponent, LossTable]
    installed: Mapping[str, Offered[Loss]]
    made: dict[LossComponent, Component] = field(default_factory=dict)

    @classmethod
    def load(cls, config: TrainerConfig, hooks: Hooks) -> Components:
        """``hooks``: of the group ``prime_rl.trainer``. Raises ``ConfigError`` for a table that no
        loss takes."""
        found = cls({"rl": config.loss, **config.losses}, collect(hooks, LOSS))
        if "rl" in config.losses:
            raise ConfigError(
                'trainer.losses.rl: "rl" is the loss of [trainer.loss]. Set it there.'
            )
        for name in found.tables:
            found[name]
        return found

    def with_rl(self, loss: Loss, table: LossTable | None = None) -> Components:
        """The same, with ``loss`` as rl under the settings of ``table``."""
        found = Components({**self.tables, "rl": table or LossTable()}, self.installed)
        found.made["rl"] = component = found._component("rl", type(loss), loss.config)
        component.__dict__["loss"] = loss
        return found

    def __getitem__(self, name: LossComponent) -> Component:
        """Raises ``ConfigError`` if no such loss is installed, or its settings are wrong."""
        if name not in self.made:
            rl, table = name == "rl", self.tables.get(name, LossTable())
            where = "trainer.loss" if rl else f"trainer.losses.{name}"
            kind = getattr(table, "type", "") if rl else name
            chosen = select(LOSS, kind, self.installed, where)
            settings = settings_of(chosen, LOSS, table.settings, where)
            self.made[name] = self._component(name, chosen, settings)
        return self.made[name]

    def __contains__(self, name: object) -> bool:
        return name in self.made or name in self.installed

    def _component(self, name: str, cls: type[Loss], settings: PluginConfig) -> Component:
        """Raises ``ConfigError`` if the run divides by what the loss cannot be divided by."""
        table, run = self.tables.get(name, LossTable()), self.tables["rl"]
        asked = table.normalize_by or ("env" if run.normalize_by == "env" else None)
        per_env = table.per_env
        if per_env is None:
            per_env = asked == "env" or bool(run.per_env)
        unit: Unit = cls.normalize_by
        if asked is not None and asked != "env":
            unit = asked
        where = "trainer.loss" if name == "rl" else f"trainer.losses.{name}"
        if unit not in ("constant", cls.normalize_by) and cls.normalize_by != "tokens":
            raise ConfigError(
                f"{where}.normalize_by is {unit!r}, and the loss {cls.name!r} is a sum over "
                f"{cls.normalize_by}. Leave the key out, or set it to {cls.normalize_by!r} or "
                '"constant".'
            )
        if unit == "constant" and table.constant is None:
            raise ConfigError(f"{where}: the loss is divided by a constant. Set the key constant.")
        return Component(name, cls, settings, unit, per_env, table.constant)


@cache
def installed_losses() -> Components:
    """Every installed loss with default settings; rl is any loss of contract 1."""
    found = Components({"rl": LossTable()}, collect(load_plugins(TRAINER_GROUP), LOSS))
    found.made["rl"] = Component("rl", Loss)
    return found
