"""The losses of a run as components: what each reads, sees whole and is divided by.

Both sides use it and neither imports torch for it. The orchestrator checks streams and packs what
the losses declare; the trainer calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import get_args

from prime_rl.config.trainer import HeadTable, LossTable, TrainerConfig
from prime_rl.errors import ConfigError, PluginError
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.plugins.loss import SCOPES, Head, Loss, Read, Scope, Unit
from prime_rl.registry.manager import Hooks, load_plugins
from prime_rl.registry.offers import HEAD, LOSS, Offered, collect, select, settings_of
from prime_rl.streams import (
    COMPUTED,
    RESERVED,
    STREAMS,
    TOP_IDS,
    WEIGHTS,
    LossComponent,
    can_be_stream,
)

HEAD_COLUMNS = frozenset({"initial_logprobs", "ema_logprobs"})
"""The computed columns that a head may read: those of earlier weights."""


def names_of(reads: Iterable[Read]) -> list[str]:
    """What is read, with a default or without."""
    return [item if isinstance(item, str) else item[0] for item in reads]


def head_defaults(head: Head) -> dict[str, float | None]:
    """By stream that a head reads, the value of tokens that do not have it."""
    return dict(item for item in head.reads if not isinstance(item, str))


def head_required(head: Head) -> list[str]:
    """The streams that an algorithm has to assign for a head."""
    return [item for item in head.reads if isinstance(item, str) and item not in COMPUTED]


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
    heads: Mapping[str, Head] = field(default_factory=dict)
    """The heads of the run."""
    instance: Loss | None = None
    """The loss itself, if it exists already. None: made when it is first read."""

    @cached_property
    def loss(self) -> Loss:
        """The loss itself; a user's own may import torch."""
        return self.instance or self.cls(self.settings)

    @property
    def scope(self) -> Scope:
        return "token" if self.cls.token_wise else self.cls.scope

    @cached_property
    def defaults(self) -> dict[str, float | None]:
        """By stream, the value of tokens that do not have it."""
        pairs = [item for item in self.cls.reads if not isinstance(item, str)]
        return {name: default for name, default in pairs if name not in self.heads}

    @cached_property
    def read_heads(self) -> list[Head]:
        """The heads whose outputs it reads."""
        return [self.heads[name] for name in names_of(self.cls.reads) if name in self.heads]

    @cached_property
    def computed(self) -> frozenset[str]:
        """The computed columns that it and its heads read, and the heads."""
        names = COMPUTED.intersection(name for name in self.cls.reads if isinstance(name, str))
        for head in self.read_heads:
            names |= {head.name, *HEAD_COLUMNS.intersection(head.reads)}
        return names

    @cached_property
    def required(self) -> list[str]:
        """The streams that its members must have."""
        names = [name for name in self.cls.reads if isinstance(name, str)]
        names = [name for name in names if name not in self.computed]
        # `top_logprobs` are those of the tokens in this stream.
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
    def whole(self) -> Scope:
        """What has to lie in one row: the larger scope of the loss and of its heads."""
        return max([self.scope, *(head.scope for head in self.read_heads)], key=SCOPES.index)

    @property
    def needs(self) -> frozenset[str]:
        """The computed columns that it, its heads, its scope or its divisor take."""
        units = {self.unit, f"{self.scope}s", f"{self.whole}s"} & {"rollouts", "groups"}
        # `HeadInputs.rollouts` tells the rollouts of a group apart.
        if any(head.scope == "group" for head in self.read_heads):
            units.add("rollouts")
        # The column of "rollouts" is `rollout_ids`, that of "groups" `group_ids`.
        return self.computed | {f"{unit[:-1]}_ids" for unit in units}


@dataclass(frozen=True, eq=False)
class Components:
    """Every loss that a batch of the run may name."""

    tables: Mapping[LossComponent, LossTable]
    installed: Mapping[str, Offered[Loss]]
    heads: Mapping[str, Head] = field(default_factory=dict)
    """The heads of the run by name."""
    made: dict[LossComponent, Component] = field(default_factory=dict)

    @classmethod
    def load(cls, config: TrainerConfig, hooks: Hooks) -> Components:
        """``hooks``: those of the entry-point group ``prime_rl.trainer``. Raises ``ConfigError``
        for a table that no head takes; those of losses are checked when they are read."""
        installed = collect(hooks, HEAD)
        heads = {}
        for name, table in config.heads.items():
            where = f"trainer.heads.{name}"
            chosen = select(HEAD, name, offers=installed, where=where)
            head = chosen(settings_of(chosen, HEAD, settings=table.settings, where=where))
            heads[name] = head
            _check_head(head, table, where)

            for each in (head.name, *head.writes):
                if not can_be_stream(each) or (each == head.name and each in STREAMS):
                    raise PluginError(
                        f"head {head.name!r} gives {each!r}, and no stream can have this name. "
                        "Rename it."
                    )

        if "rl" in config.losses:
            raise ConfigError(
                'trainer.losses.rl: "rl" is the loss of [trainer.loss]. Set it there.'
            )

        return cls({"rl": config.loss, **config.losses}, collect(hooks, LOSS), heads)

    def with_rl(self, loss: Loss, table: LossTable | None = None) -> Components:
        """The same, with ``loss`` as rl under the settings of ``table``."""
        tables = {**self.tables, "rl": table or LossTable()}
        # Losses that were made before are made again: they follow some keys of the rl table.
        losses = Components(tables, self.installed, self.heads)
        component = losses._component("rl", type(loss), settings=loss.config)
        losses.made["rl"] = replace(component, instance=loss)
        return losses

    def __getitem__(self, name: LossComponent) -> Component:
        """Made when it is first read. Raises ``ConfigError`` if no such loss is installed, or its
        settings are wrong."""
        if name not in self.made:
            self._make(name)
        return self.made[name]

    def __contains__(self, name: object) -> bool:
        return name in self.made or name in self.installed

    def make_all(self) -> None:
        """Make the loss of every table now. Raises ``ConfigError`` as for one that is read."""
        for name in self.tables:
            if name not in self.made:
                self._make(name)

    def _make(self, name: LossComponent) -> None:
        is_rl = name == "rl"
        table = self.tables.get(name, LossTable())
        where = "trainer.loss" if is_rl else f"trainer.losses.{name}"

        type_name = getattr(table, "type", "") if is_rl else name
        chosen = select(LOSS, type_name, offers=self.installed, where=where)
        settings = settings_of(chosen, LOSS, settings=table.settings, where=where)
        self.made[name] = self._component(name, chosen, settings=settings)

    def _component(self, name: str, cls: type[Loss], settings: PluginConfig) -> Component:
        """Raises ``ConfigError`` if the run selects a divisor that the loss does not allow."""
        _check_declared(cls)
        table = self.tables.get(name, LossTable())
        run = self.tables["rl"]

        # "env" is the loss's own unit per env. A loss without the key follows the run's key.
        normalize_by = table.normalize_by
        if normalize_by is None and run.normalize_by == "env":
            normalize_by = "env"

        per_env = table.per_env
        if per_env is None:
            per_env = "env" in (normalize_by, run.normalize_by) or bool(run.per_env)

        unit: Unit = cls.normalize_by
        if normalize_by is not None and normalize_by != "env":
            unit = normalize_by

        where = "trainer.loss" if name == "rl" else f"trainer.losses.{name}"
        # A sum over tokens may be divided by any unit, any other sum only by its own.
        if unit not in ("constant", cls.normalize_by) and cls.normalize_by != "tokens":
            raise ConfigError(
                f"{where}.normalize_by is {unit!r}, and the loss {cls.name!r} is a sum over "
                f"{cls.normalize_by}. Leave the key out, or set it to {cls.normalize_by!r} or "
                '"constant".'
            )

        if unit == "constant" and table.constant is None:
            raise ConfigError(f"{where}: the loss is divided by a constant. Set the key constant.")
        if unit != "constant" and table.constant is not None:
            raise ConfigError(
                f"{where}.constant: the loss is divided by its {unit}. Leave the key out, or set "
                'normalize_by = "constant".'
            )

        return Component(
            name=name,
            cls=cls,
            settings=settings,
            unit=unit,
            per_env=per_env,
            constant=table.constant,
            heads=self.heads,
        )

    @property
    def heads_of_groups(self) -> list[str]:
        """The heads of the run that see whole groups."""
        return [name for name, head in self.heads.items() if head.scope == "group"]

    def readers(self, stream: str) -> list[str]:
        """The losses of the run that read a stream, each with its plugin."""
        return [
            f"loss {component.cls.name!r} of plugin {self.installed[component.cls.name].source}"
            for component in self.made.values()
            if stream in component.streams and component.cls.name in self.installed
        ]

    def writers(self, names: Iterable[LossComponent]) -> dict[str, Head]:
        """The streams that heads write for a rollout whose tokens train in these components."""
        read = [head for name in names for head in self[name].read_heads]
        return {stream: head for head in read for stream in head.writes}


def _check_head(head: Head, table: HeadTable, where: str) -> None:
    """Raises ``PluginError`` for a head that reads an unknown column, ``ConfigError`` for a table
    that does not fit the head."""
    pairs = [(item, False) if isinstance(item, str) else (item[0], True) for item in head.reads]
    for name, has_default in pairs:
        if name in HEAD_COLUMNS and not has_default:
            continue
        if not can_be_stream(name):
            columns = ", ".join(sorted(HEAD_COLUMNS))
            raise PluginError(
                f"head {head.name!r} reads {name!r}. Expected streams, each a name or "
                f"(name, default), and columns without a default: {columns}."
            )

    if head.gives_logprobs and (head.gives_vectors or head.reads_ends):
        raise PluginError(
            f"head {head.name!r} gives logprobs: they are one number a token, and there is none "
            "behind the last. Leave gives_vectors and reads_ends out."
        )

    if head.gives_logprobs and not table.own_model:
        raise ConfigError(
            f"{where}: the head {head.name!r} gives log-probabilities of a model of its own. Set "
            "own_model = true."
        )


def _check_declared(cls: type[Loss]) -> None:
    """Raises ``PluginError`` for class attributes that nothing would read as they are meant."""
    problem = ""
    if isinstance(cls.reads, str) or not all(map(_can_be_read, cls.reads)):
        problem = (
            f"reads is {cls.reads!r}. Expected a tuple of streams, each a name or (name, default); "
            f"a column that core computes ({', '.join(sorted(COMPUTED))}) has no default, and the "
            "first six fields of LossInputs are not named"
        )

    for key, values in (("scope", get_args(Scope)), ("normalize_by", get_args(Unit))):
        if getattr(cls, key) not in values:
            problem = f"{key} is {getattr(cls, key)!r}. Expected one of {', '.join(values)}"

    if problem:
        raise PluginError(f"loss class {cls.__qualname__}: {problem}.")


def _can_be_read(read: Read) -> bool:
    """Whether a loss may declare this, a name or ``(name, default)``."""
    name, has_default = (read, False) if isinstance(read, str) else (read[0], True)
    if name in COMPUTED:
        return not has_default
    return name not in RESERVED and not name.endswith(WEIGHTS)


@cache
def installed_losses() -> Components:
    """Every installed loss and head with default settings; rl is any loss of contract 1."""
    hooks = load_plugins(TRAINER_GROUP)
    heads = {
        # No validation: a required setting has no value here.
        name: each.cls(each.cls.config_class.model_construct())
        for name, each in collect(hooks, HEAD).items()
    }
    installed = collect(hooks, LOSS)
    # A loss that is divided by a constant is refused without one. Its value does not matter here.
    tables = {
        name: LossTable(constant=1.0)
        for name, each in installed.items()
        if each.cls.normalize_by == "constant"
    }

    losses = Components(tables | {"rl": LossTable()}, installed, heads)
    losses.made["rl"] = Component("rl", Loss)
    return losses
