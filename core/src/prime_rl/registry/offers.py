"""From a name in the TOML to a validated instance of a class that some plugin registered."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from sys import modules
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from prime_rl.config.base import Settings
from prime_rl.config.explain import explain, fits
from prime_rl.config.orchestrator import (
    AlgoConfig,
    FilterConfig,
    RendererConfig,
    SamplerConfig,
    SourceTable,
)
from prime_rl.config.run import LauncherConfig, ModelConfig, ViewConfig, WeightBroadcastConfig
from prime_rl.config.trainer import HeadTable, LossConfig, OptimConfig, TrainerConfig
from prime_rl.entries import entries
from prime_rl.errors import ConfigError, PluginError, PrimeRLError, Terminated
from prime_rl.plugins.algorithm import Algorithm, Filter
from prime_rl.plugins.base import Offer, PluginConfig
from prime_rl.plugins.launchers import Engine, Launcher
from prime_rl.plugins.loss import Head, Loss
from prime_rl.plugins.model import ModelMaker, RendererOffer
from prime_rl.plugins.observer import Monitor, Observer
from prime_rl.plugins.sampler import Sampler, Source
from prime_rl.plugins.trainer import AdamWMaker, Kernel, OptimizerMaker, TrainerObserver, Tuning
from prime_rl.plugins.view import RunView
from prime_rl.plugins.weight_transports import WeightTransport
from prime_rl.registry.calls import Call, blame, fault
from prime_rl.registry.checks import check_plugin, marked_hooks
from prime_rl.registry.manager import Hooks, Origin

AnyOffer = TypeVar("AnyOffer", bound=Offer)


@dataclass(frozen=True)
class Kind(Generic[AnyOffer]):
    """One sort of thing a plugin may offer."""

    name: str
    """In messages: ``algorithm``."""
    base: type[AnyOffer]
    key: str
    """The key that selects it in the TOML."""
    hooks: frozenset[str] = frozenset()
    """Hooks that are called on its instances; any other on the class would never be."""
    table: type[Settings] = Settings
    """The TOML table that its settings share with core's keys."""

    @property
    def plural(self) -> str:
        return f"{self.name}es" if self.name.endswith("s") else f"{self.name}s"

    @property
    def hook(self) -> str:
        """The hook that registers it."""
        return f"register_{self.plural}"


SCORING = frozenset({"score_rollout", "observation_weights", "score_group", "score_batch"})

ALGORITHM = Kind("algorithm", Algorithm, "algo.type", SCORING | {"prepare_rollout"}, AlgoConfig)
FILTER = Kind("filter", Filter, "type", frozenset({"filter_rollout"}), FilterConfig)
RENDERER = Kind("renderer", RendererOffer, "orchestrator.renderer.name", table=RendererConfig)
SAMPLER = Kind("sampler", Sampler, "orchestrator.sampler.type", table=SamplerConfig)
SOURCE = Kind("source", Source, "algo.sampling.source.type", table=SourceTable)
ENGINE = Kind("engine", Engine, "inference.engine")
MONITOR = Kind("monitor", Monitor, "monitors.<name>")
OBSERVER = Kind("observer", Observer, "observers.<name>")
MODEL = Kind("model", ModelMaker, "model.name", table=ModelConfig)
LAUNCHER = Kind("launcher", Launcher, "launcher.type", table=LauncherConfig)
VIEW = Kind("view", RunView, "view.type", table=ViewConfig)
LOSS = Kind("loss", Loss, "trainer.loss.type", table=LossConfig)
HEAD = Kind("head", Head, "trainer.heads.<name>", table=HeadTable)
TRAINER_OBSERVER = Kind("trainer_observer", TrainerObserver, "trainer.<name>")
KERNEL = Kind("kernel", Kernel, "trainer.attention")
OPTIMIZER = Kind("optimizer", OptimizerMaker, "trainer.optim.type", table=OptimConfig)
TUNING = Kind("tuning", Tuning, "trainer.<name>")
WEIGHT_TRANSPORT = Kind(
    "weight_transport", WeightTransport, "weight_broadcast.type", table=WeightBroadcastConfig
)

KINDS: tuple[Kind[Any], ...] = (
    *(ALGORITHM, FILTER, RENDERER, SAMPLER, SOURCE, ENGINE, MONITOR, OBSERVER, MODEL, LAUNCHER),
    *(VIEW, LOSS, HEAD, TRAINER_OBSERVER, TUNING, KERNEL, OPTIMIZER, WEIGHT_TRANSPORT),
)


@dataclass(frozen=True)
class Offered(Generic[AnyOffer]):
    """A registered class and the plugin it comes from."""

    cls: type[AnyOffer]
    source: Origin


def collect(hooks: Hooks, kind: Kind[AnyOffer]) -> dict[str, Offered[AnyOffer]]:
    """Every class of one kind, by name. Raises ``PluginError`` if two share a name or one breaks
    the contract."""
    if kind.name in hooks.offers:
        return hooks.offers[kind.name]
    by_name: dict[str, Offered[AnyOffer]] = {}
    for impl in getattr(hooks.hook, kind.hook).get_hookimpls():
        unknown = Origin(impl.plugin_name, "not installed", "")
        source = hooks.sources.get(impl.plugin_name, unknown)
        try:
            classes = list(impl.function())
        except Terminated:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {source}: {kind.hook} failed: {type(error).__name__}: {error}. It must "
                f"give a list of subclasses of {kind.base.__name__}."
            ) from error

        for cls in classes:
            _check_class(cls, kind, source)
            check_plugin(cls, str(source), hooks.group)
            first = by_name.setdefault(cls.name, Offered(cls, source))
            if first.cls is not cls:
                raise PluginError(
                    f"{kind.name} {cls.name!r} is registered twice: by plugin {first.source} and "
                    f"by plugin {source}. Uninstall one, or list its plugin under plugins.disabled."
                )

    hooks.offers[kind.name] = dict(sorted(by_name.items()))
    return hooks.offers[kind.name]


def _check_class(cls: Any, kind: Kind[Any], source: Origin) -> None:
    if not (isinstance(cls, type) and issubclass(cls, kind.base)):
        raise PluginError(
            f"plugin {source}: {kind.hook} must give subclasses of {kind.base.__name__}, got "
            f"{cls!r}"
        )

    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise PluginError(
            f"plugin {source}: class {cls.__qualname__} needs a class attribute 'name'"
        )

    config_class = getattr(cls, "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, PluginConfig)):
        raise PluginError(
            f"plugin {source}: {cls.__qualname__}.config_class must be a subclass of PluginConfig, "
            f"got {config_class!r}"
        )

    taken = sorted(config_class.model_fields.keys() & kind.table.model_fields.keys())
    if taken:
        raise PluginError(
            f"plugin {source}: {config_class.__qualname__} has a setting {taken[0]!r}, which "
            f"no TOML can set: the key is core's in the table of {kind.plural}. Rename it."
        )

    for member, method in inspect.getmembers(kind.base, inspect.isroutine):
        override = getattr(cls, member)
        if inspect.iscoroutinefunction(override) and not inspect.iscoroutinefunction(method):
            raise PluginError(
                f"plugin {source}: {cls.__qualname__}.{member} is 'async def' and core calls it "
                "without 'await', so its body would never run. Make it a plain 'def'."
            )

    for hook in marked_hooks(cls):
        if hook not in kind.hooks:
            called = ", ".join(sorted(kind.hooks)) or "none"
            raise PluginError(
                f"plugin {source}: {hook!r} on {kind.name} {name!r} would never be called "
                f"(called on {kind.plural}: {called}). Implement it in the plugin's module instead."
            )


def select(
    kind: Kind[AnyOffer], name: str, offers: Mapping[str, Offered[AnyOffer]], where: str
) -> type[AnyOffer]:
    """The class called ``name``. Raises ``ConfigError`` that names what is installed and the
    package to install."""
    if name in offers:
        return offers[name].cls
    installed = ", ".join(offers) or "none"
    if not name:
        raise ConfigError(
            f"{where}: no {kind.name} is set, and no installed distribution brings a default. Set "
            f"{kind.key} (installed: {installed}), or pip install prime-rl, which brings defaults."
        )

    close = difflib.get_close_matches(name, offers, n=1)
    if close:
        way_out = f"Did you mean {close[0]!r}?"
    elif package := bringer(kind.name, name):
        way_out = f"Install the package that brings it: pip install {package}"
    else:
        guess = f"prime-rl-{name.replace('_', '-')}"
        way_out = (
            f"Check the spelling, or install the package that brings it (by convention {guess})."
        )

    raise ConfigError(
        f"{where}: no installed plugin offers the {kind.name} {name!r} (installed: {installed}). "
        f"{way_out}"
    )


def settings_of(
    cls: type[Offer], kind: Kind[Any], settings: Mapping[str, Any], where: str
) -> PluginConfig:
    """Validate a table by the config class its plugin brought. Raises ``ConfigError``."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: expected a table, got {settings!r}")
    try:
        return cls.config_class.model_validate(dict(settings))
    except ValidationError as error:
        place = f"{where} ({kind.name} {cls.name!r})"
        raise ConfigError(explain(error, cls.config_class, place)) from error


def make_observers(tables: Mapping[str, Any], hooks: Hooks) -> list[TrainerObserver]:
    """Every installed observer of the trainer, with the settings of its table. Raises
    ``ConfigError``, also for a table of nothing that is installed."""
    offers = collect(hooks, TRAINER_OBSERVER)
    tunings = collect(hooks, TUNING)
    problems = []
    for name in sorted(tables.keys() - tunings.keys() - offers.keys()):
        close = difflib.get_close_matches(name, TrainerConfig.model_fields, n=1)
        if close and fits(TrainerConfig.model_fields[close[0]], tables[name]):
            problems.append(f"trainer.{name}: unknown key; did you mean {close[0]!r}?")
            continue
        kind: Kind[Any] = TUNING if bringer(TUNING.name, name) else TRAINER_OBSERVER
        try:
            select(kind, name, offers, f"trainer.{name}")
        except ConfigError as error:
            problems.append(str(error))

    if problems:
        raise ConfigError("\n".join(problems))
    return [
        each.cls(settings_of(each.cls, TRAINER_OBSERVER, tables.get(name, {}), f"trainer.{name}"))
        for name, each in offers.items()
    ]


def make_tuning(tables: Mapping[str, Any], hooks: Hooks) -> Tuning | None:
    """The tuning that a table of ``[trainer]`` selects; None: all weights train. Raises
    ``ConfigError``."""
    names = sorted(tables.keys() & collect(hooks, TUNING).keys())
    if len(names) > 1:
        raise ConfigError(f"[trainer] selects the tunings {', '.join(names)}; expected at most one")
    return make(TUNING, names[0], tables[names[0]], hooks, f"trainer.{names[0]}") if names else None


class _Plain(Kernel):
    """Core's own way of rows through the model."""

    name = "auto"


def make_kernel(config: TrainerConfig, hooks: Hooks) -> Kernel:
    """The kernel that ``trainer.attention`` selects, with the keys that the run sets; for ``auto``
    where none is installed, core's own. Raises ``ConfigError``."""
    default = Offered[Kernel](_Plain, Origin("core", "prime-rl-core", ""))
    offers = {_Plain.name: default, **collect(hooks, KERNEL)}
    cls = select(KERNEL, config.attention, offers, "trainer.attention")
    fields = TrainerConfig.model_fields
    keys = ("fused_lm_head", "lm_head_block", "share_prompts")
    values = {key: getattr(config, key) for key in keys}
    changed = {key: value for key, value in values.items() if value != fields[key].default}
    return cls(settings_of(cls, KERNEL, changed, where="trainer"))


def make_optimizer(config: OptimConfig, hooks: Hooks) -> OptimizerMaker:
    """What makes the optimizer of ``[trainer.optim]``. Raises ``ConfigError``."""
    default = Offered[OptimizerMaker](AdamWMaker, Origin("core", "prime-rl-core", ""))
    offers = {AdamWMaker.name: default, **collect(hooks, OPTIMIZER)}
    cls = select(OPTIMIZER, config.type, offers, "trainer.optim.type")
    return cls(settings_of(cls, OPTIMIZER, config.settings, "trainer.optim"))


def choose(
    kind: Kind[AnyOffer], name: str, table: Mapping[str, Any], hooks: Hooks, where: str
) -> tuple[type[AnyOffer], PluginConfig]:
    """The installed class called ``name``, with its settings. Raises ``ConfigError``."""
    cls = select(kind, name, collect(hooks, kind), where)
    return cls, settings_of(cls, kind, table, where)


def make(
    kind: Kind[AnyOffer], name: str, table: Mapping[str, Any], hooks: Hooks, where: str, *more: Any
) -> AnyOffer:
    """An instance of it; ``more`` are the further arguments of its constructor."""
    return construct(*choose(kind, name, table, hooks, where), *more)


def construct(cls: type[AnyOffer], settings: PluginConfig, *more: Any) -> AnyOffer:
    """An instance. An error of its constructor is a ``PluginError`` with the plugin's frames."""
    try:
        return cls(settings, *more)
    except Exception as error:
        if not isinstance(error, PrimeRLError):
            blame(error, Call(cls.name, f"{cls.__name__}.__init__", modules[cls.__module__], {}))
            raise PluginError(str(fault(error))) from error
        raise


def make_transport(table: WeightBroadcastConfig, hooks: Hooks) -> WeightTransport | None:
    """The weight transport of ``[weight_broadcast]``; None where weights go as files."""
    if table.as_files:
        return None
    return make(WEIGHT_TRANSPORT, table.type, table.settings, hooks, "weight_broadcast")


def bringer(kind: str, name: str) -> str | None:
    """The distribution that brings it, as index packages declare under ``prime_rl.known``."""
    for entry in entries("prime_rl.known", name=f"{kind}.{name}"):
        return str(entry.value).replace("_", "-")
    return None
