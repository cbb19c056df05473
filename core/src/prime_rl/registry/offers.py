"""From a name in the TOML to a validated instance of a class that some plugin registered."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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
from prime_rl.config.removed import without_removed_settings
from prime_rl.config.run import LauncherConfig, ModelConfig, ViewConfig, WeightBroadcastConfig
from prime_rl.config.trainer import HeadTable, LossConfig, OptimConfig, TrainerConfig
from prime_rl.entries import entries, misspelt_groups
from prime_rl.errors import ConfigError, PluginError, PrimeRLError, Terminated, line_in, text_of
from prime_rl.plugins.algorithm import Algorithm, Filter
from prime_rl.plugins.base import Offer, PluginConfig
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
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
from prime_rl.registry.manager import Hooks, Origin, installed_versions
from prime_rl.registry.members import missing, misspelt_attribute, problem_of

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
    places: tuple[str, ...] = ()
    """Where its settings stand, if ``key`` does not say it: dotted names of tables, in which ``*``
    is any part."""
    observes: str = ""
    """The entry-point group of the processes in which a sort of ``RunObserver`` runs."""
    elsewhere: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Names that users try and no package brings; with each, what to do instead."""

    def selected_at(self, place: Sequence[str], settings: Mapping[str, Any]) -> str | None:
        """The name of the class that the table ``settings`` at a place of the TOML belongs to, if
        it is of this kind."""
        table, _, selector = self.key.rpartition(".")
        # ``monitors.<name>``: the table's own name selects the class.
        is_named_by_table = selector.startswith("<")
        default = f"{table}.*" if is_named_by_table else table
        for pattern in self.places or (default,):
            parts = pattern.split(".")
            is_here = len(parts) == len(place) and all(
                part in ("*", place_part) for part, place_part in zip(parts, place, strict=True)
            )
            if not is_here:
                continue
            # The last part of a list's entry is a number, and no name.
            if parts[-1] == "*" and not place[-1].isdecimal():
                return place[-1]

            name = settings.get(selector)
            return name if isinstance(name, str) else None

        return None

    @property
    def plural(self) -> str:
        return f"{self.name}es" if self.name.endswith("s") else f"{self.name}s"

    @property
    def hook(self) -> str:
        """The hook that registers it."""
        return "register_observers" if self.observes else f"register_{self.plural}"

    @property
    def registration_hooks(self) -> tuple[str, ...]:
        """``hook``, and the one before it, which is deprecated."""
        return tuple(dict.fromkeys((self.hook, f"register_{self.plural}")))

    @property
    def bases(self) -> str:
        """The classes that ``hook`` takes subclasses of, in words."""
        names = [kind.base.__name__ for kind in KINDS if kind.hook == self.hook]
        *others, last = sorted(names)
        return f"{', '.join(others)} or {last}" if others else last


SCORING = frozenset(
    {"score_rollout", "observation_weights", "score_group", "score_batch", "score_envs"}
)

ALGORITHM = Kind(
    "algorithm",
    Algorithm,
    "algo.type",
    hooks=SCORING | {"prepare_rollout", "wanted_members"},
    table=AlgoConfig,
    places=("orchestrator.algo", "orchestrator.train.env.*.algo"),
)
FILTER = Kind(
    "filter",
    Filter,
    "type",
    hooks=frozenset({"filter_rollout"}),
    table=FilterConfig,
    places=("orchestrator.pre_batch_filters.*", "orchestrator.post_batch_filters.*"),
)
RENDERER = Kind("renderer", RendererOffer, "orchestrator.renderer.name", table=RendererConfig)
SAMPLER = Kind("sampler", Sampler, "orchestrator.sampler.type", table=SamplerConfig)
SOURCE = Kind(
    "source",
    Source,
    "algo.sampling.source.type",
    table=SourceTable,
    places=tuple(f"{algorithm}.sampling.source" for algorithm in ALGORITHM.places),
)
ENGINE = Kind("engine", Engine, "inference.engine", places=("inference.*",))
MONITOR = Kind("monitor", Monitor, "monitors.<name>", observes=PROJECT)
OBSERVER = Kind("observer", Observer, "observers.<name>", observes=PROJECT)
MODEL = Kind("model", ModelMaker, "model.name", table=ModelConfig)
_ON_RAY = (
    "{} is no launcher: its job starts a Ray cluster, and the run in it takes the launcher of "
    "that cluster (docs/multi-node.md)."
)
LAUNCHER = Kind(
    "launcher",
    Launcher,
    "launcher.type",
    table=LauncherConfig,
    elsewhere={
        "slurm": _ON_RAY.format("Slurm"),
        "kubernetes": _ON_RAY.format("Kubernetes"),
        "k8s": _ON_RAY.format("Kubernetes"),
    },
)
VIEW = Kind("view", RunView, "view.type", table=ViewConfig)
LOSS = Kind(
    "loss",
    Loss,
    "trainer.loss.type",
    table=LossConfig,
    places=("trainer.loss", "trainer.losses.*"),
)
HEAD = Kind("head", Head, "trainer.heads.<name>", table=HeadTable)
TRAINER_OBSERVER = Kind(
    "trainer_observer", TrainerObserver, "trainer.<name>", observes=TRAINER_GROUP
)
KERNEL = Kind("kernel", Kernel, "trainer.attention")
OPTIMIZER = Kind("optimizer", OptimizerMaker, "trainer.optim.type", table=OptimConfig)
TUNING = Kind("tuning", Tuning, "trainer.<name>")
WEIGHT_TRANSPORT = Kind(
    "weight_transport", WeightTransport, "weight_broadcast.type", table=WeightBroadcastConfig
)

KINDS: tuple[Kind[Any], ...] = (
    ALGORITHM,
    FILTER,
    RENDERER,
    SAMPLER,
    SOURCE,
    ENGINE,
    MONITOR,
    OBSERVER,
    MODEL,
    LAUNCHER,
    VIEW,
    LOSS,
    HEAD,
    TRAINER_OBSERVER,
    TUNING,
    KERNEL,
    OPTIMIZER,
    WEIGHT_TRANSPORT,
)


@dataclass(frozen=True)
class Offered(Generic[AnyOffer]):
    """A registered class and the plugin it comes from."""

    cls: type[AnyOffer]
    source: Origin


def collect(hooks: Hooks, kind: Kind[AnyOffer]) -> dict[str, Offered[AnyOffer]]:
    """Every class of one kind, by name. Raises ``PluginError`` if two share a name or one breaks
    the contract."""
    # Checked once: a further plugin clears the table (``Hooks.register``).
    if kind.name in hooks.offers:
        return hooks.offers[kind.name]

    by_name: dict[str, Offered[AnyOffer]] = {}
    for hook, offered in _registered(hooks, kind):
        if kind.observes not in ("", hooks.group):
            continue  # its process loads it from there: see ``unreached_observers``

        _check_class(offered, kind, hook)
        check_plugin(offered.cls, str(offered.source), hooks.group)
        # The same class from two plugins is no clash: one re-exports it.
        first = by_name.setdefault(offered.cls.name, offered)
        if first.cls is not offered.cls:
            raise PluginError(_registered_twice(kind, offered, first))

    hooks.offers[kind.name] = dict(sorted(by_name.items()))
    return hooks.offers[kind.name]


def _registered(hooks: Hooks, kind: Kind[Any]) -> Iterator[tuple[str, Offered[Any]]]:
    """What the hooks of a kind give, each with its hook, without the classes of another kind with
    the same hook."""
    for hook in kind.registration_hooks:
        # Each plugin by itself: of one call for all, no class and no error would name its plugin.
        for impl in getattr(hooks.hook, hook).get_hookimpls():
            unknown = Origin(impl.plugin_name, "not installed", "")
            source = hooks.sources.get(impl.plugin_name, unknown)
            try:
                classes = list(impl.function())
            except Terminated:
                raise
            except (Exception, SystemExit) as error:
                place = line_in(error, impl.function.__module__.partition(".")[0])
                raise PluginError(
                    f"plugin {source}: {hook} failed: {type(error).__name__}: {text_of(error)}"
                    f"{place}. It must give a list of subclasses of {kind.bases}."
                ) from error

            # One hook takes three sorts. What is none of them stays: `_check_class` refuses it.
            for cls in classes:
                if hook == kind.hook and kind.observes and _sort(cls, source) not in (None, kind):
                    continue

                yield hook, Offered(cls, source)


def _sort(cls: Any, source: Origin) -> Kind[Any] | None:
    """Which sort of ``RunObserver`` a class is; None: not one of them."""
    sorts = [
        kind
        for kind in (OBSERVER, MONITOR, TRAINER_OBSERVER)
        if isinstance(cls, type) and issubclass(cls, kind.base)
    ]
    if len(sorts) > 1:
        names = " and ".join(kind.base.__name__ for kind in sorts)
        raise PluginError(
            f"plugin {source}: {cls.__qualname__} is {names}, which run in processes or threads of "
            "their own and share no instance. Offer a class for each."
        )

    return sorts[0] if sorts else None


def unreached_observers(*managers: Hooks, partly: Collection[str] = ()) -> list[str]:
    """What is wrong with observers that a plugin offers to a process that does not load it, in
    words. ``managers``: those of both entry-point groups, without plugins that are disabled.
    ``partly``: distributions of which a plugin is disabled, so that others may be unreached on
    purpose."""
    kinds: tuple[Kind[Any], ...] = (OBSERVER, MONITOR, TRAINER_OBSERVER)
    reached = {
        offered.cls
        for hooks in managers
        for kind in kinds
        for offered in collect(hooks, kind).values()
    }

    problems = []
    for hooks in managers:
        for kind in kinds:
            for _, offered in _registered(hooks, kind):
                if offered.cls not in reached and offered.source.distribution not in partly:
                    problems.append(
                        f"plugin {offered.source}: the {kind.base.__name__} "
                        f"{offered.cls.__qualname__} would never run. Its process loads the "
                        f"entry-point group {kind.observes!r}: name the plugin's module there too."
                    )

    return problems


def _registered_twice(kind: Kind[Any], second: Offered[Any], first: Offered[Any]) -> str:
    name = second.cls.name
    if first.source == second.source:
        classes = [f"{each.cls.__module__}.{each.cls.__qualname__}" for each in (first, second)]
        return (
            f"plugin {first.source} registers two {kind.plural} {name!r}: {classes[0]} and "
            f"{classes[1]}. Give each class a 'name' of its own."
        )

    return (
        f"{kind.name} {name!r} is registered twice: by plugin {first.source} and by plugin "
        f"{second.source}. Uninstall one, or list its plugin under plugins.disabled."
    )


def _check_class(offered: Offered[Any], kind: Kind[Any], hook: str) -> None:
    cls: Any = offered.cls
    source = offered.source
    if not (isinstance(cls, type) and issubclass(cls, kind.base)):
        bases = kind.bases if hook == kind.hook else kind.base.__name__
        raise PluginError(f"plugin {source}: {hook} must give subclasses of {bases}, got {cls!r}")

    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise PluginError(
            f"plugin {source}: class {cls.__qualname__} needs a class attribute 'name'"
        )

    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)*", name, re.ASCII):
        simple = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "my_name"
        raise PluginError(
            f"plugin {source}: {cls.__qualname__}.name is {name!r}, and names stand in TOML keys, "
            "metrics and commands. Use letters, digits and _.- only, without spaces: "
            f"{simple!r}, for example."
        )

    problem = problem_of(cls, kind.base, kind.hooks)
    if not problem and kind in (SAMPLER, MONITOR):
        problem = missing(cls, kind.base)
    if problem:
        raise PluginError(f"plugin {source}: {problem}")

    config_class = getattr(cls, "config_class", None)
    if not (isinstance(config_class, type) and issubclass(config_class, PluginConfig)):
        raise PluginError(
            f"plugin {source}: {cls.__qualname__}.config_class must be a subclass of PluginConfig, "
            f"got {config_class!r}"
        )

    # Core's table takes its keys first: `settings` has what it does not declare.
    taken = sorted(config_class.model_fields.keys() & kind.table.model_fields.keys())
    if taken:
        raise PluginError(
            f"plugin {source}: {config_class.__qualname__} has a setting {taken[0]!r}, which "
            f"no TOML can set: the key is core's in the table of {kind.plural}. Rename it."
        )

    # Python would make a coroutine, which nothing awaits, and pluggy has no say here.
    for member in _plain_methods(kind):
        if inspect.iscoroutinefunction(getattr(cls, member)):
            raise PluginError(
                f"plugin {source}: {cls.__qualname__}.{member} is 'async def' and core calls it "
                "without 'await', so its body would never run. Make it a plain 'def'."
            )

    if kind is FILTER and not marked_hooks(cls):
        raise PluginError(
            f"plugin {source}: filter {name!r} has no filter_rollout, so it would never drop "
            "anything. Implement it: @hookimpl def filter_rollout(self, rollout, group)."
        )

    for hook in marked_hooks(cls):
        if hook not in kind.hooks:
            called = ", ".join(sorted(kind.hooks)) or "none"
            raise PluginError(
                f"plugin {source}: {hook!r} on {kind.name} {name!r} would never be called "
                f"(called on {kind.plural}: {called}). Implement it in the plugin's module instead."
            )


@cache
def _plain_methods(kind: Kind[Any]) -> tuple[str, ...]:
    """Names of the methods of its base class that core calls without ``await``."""
    methods = inspect.getmembers(kind.base, inspect.isroutine)
    return tuple(name for name, method in methods if not inspect.iscoroutinefunction(method))


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

    # From the surest way out to a guess.
    package = bringer(kind.name, name)
    close = difflib.get_close_matches(name, offers, n=1)
    if package in installed_versions():
        way_out = (
            f"{package} is installed and brings it, but is disabled: see plugins.disabled and "
            "--without."
        )
    elif package is not None:
        way_out = f"Install the package that brings it: pip install {package}"
    elif name in kind.elsewhere:
        way_out = kind.elsewhere[name]
    elif close:
        way_out = f"Did you mean {close[0]!r}?"
    else:
        guess = f"prime-rl-{name.replace('_', '-')}"
        way_out = (
            "Check the spelling, or install the package that brings it (by convention "
            f"{guess}, if there is one)."
        )

    # Its plugin may be here, in a group of entry points that nothing reads.
    way_out = " ".join([way_out, *(f"{each}" for each in misspelt_groups())])
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

    table = where.removesuffix(".type")  # the settings stand beside the key that selects the class
    try:
        kept = without_removed_settings(settings, cls.config_class.removed, table)
        return cls.config_class.model_validate(kept)
    except ValidationError as error:
        place = f"{table} ({kind.name} {cls.name!r})"
        raise ConfigError(explain(error, cls.config_class, place)) from error


def make_observers(tables: Mapping[str, Any], hooks: Hooks) -> list[TrainerObserver]:
    """Every installed observer of the trainer, with the settings of its table. Raises
    ``ConfigError``, also for a table of nothing that is installed."""
    offers = collect(hooks, TRAINER_OBSERVER)
    tunings = collect(hooks, TUNING)
    problems = []

    for name in sorted(tables.keys() - tunings.keys() - offers.keys()):
        close = difflib.get_close_matches(name, TrainerConfig.model_fields, n=1)
        # A misspelt key of core lands here too. Its value tells: it fits the key that was meant.
        if close and fits(TrainerConfig.model_fields[close[0]], tables[name]):
            problems.append(f"trainer.{name}: unknown key; did you mean {close[0]!r}?")
            continue

        # Tunings and observers share [trainer]: the index knows of which kind a missing one is.
        kind: Kind[Any] = TUNING if bringer(TUNING.name, name) else TRAINER_OBSERVER
        try:
            select(kind, name, offers=offers, where=f"trainer.{name}")
        except ConfigError as error:
            problems.append(str(error))

    if problems:
        raise ConfigError("\n".join(problems))

    return [
        each.cls(
            settings_of(
                each.cls, TRAINER_OBSERVER, settings=tables.get(name, {}), where=f"trainer.{name}"
            )
        )
        for name, each in offers.items()
    ]


def make_tuning(tables: Mapping[str, Any], hooks: Hooks) -> Tuning | None:
    """The tuning that a table of ``[trainer]`` selects; None: all weights train. Raises
    ``ConfigError``."""
    names = sorted(tables.keys() & collect(hooks, TUNING).keys())
    if len(names) > 1:
        raise ConfigError(f"[trainer] selects the tunings {', '.join(names)}; expected at most one")
    return (
        make(TUNING, names[0], table=tables[names[0]], hooks=hooks, where=f"trainer.{names[0]}")
        if names
        else None
    )


class _Plain(Kernel):
    """Core's own way of rows through the model."""

    name = "auto"


def make_kernel(config: TrainerConfig, hooks: Hooks) -> Kernel:
    """The kernel that ``trainer.attention`` selects, with the keys that the run sets; for ``auto``
    where none is installed, core's own. Raises ``ConfigError``."""
    default = Offered[Kernel](_Plain, Origin("core", "prime-rl-core", ""))
    offers = {_Plain.name: default, **collect(hooks, KERNEL)}
    cls = select(KERNEL, config.attention, offers=offers, where="trainer.attention")

    fields = TrainerConfig.model_fields
    keys = (
        "fused_lm_head",
        "share_prompts",
        "triton_kernels",
        "keep_attention",
        "offload_activations",
    )

    values = {key: getattr(config, key) for key in keys}
    # A kernel need not know these keys. It refuses one only where the user has set it.
    changed = {key: value for key, value in values.items() if value != fields[key].default}
    return cls(settings_of(cls, KERNEL, changed, where="trainer"))


def make_optimizer(config: OptimConfig, hooks: Hooks) -> OptimizerMaker:
    """What makes the optimizer of ``[trainer.optim]``. Raises ``ConfigError``."""
    default = Offered[OptimizerMaker](AdamWMaker, Origin("core", "prime-rl-core", ""))
    offers = {AdamWMaker.name: default, **collect(hooks, OPTIMIZER)}
    cls = select(OPTIMIZER, config.type, offers=offers, where="trainer.optim.type")
    return cls(settings_of(cls, OPTIMIZER, settings=config.settings, where="trainer.optim"))


def choose(
    kind: Kind[AnyOffer], name: str, table: Mapping[str, Any], hooks: Hooks, where: str
) -> tuple[type[AnyOffer], PluginConfig]:
    """The installed class called ``name``, with its settings. Raises ``ConfigError``."""
    cls = select(kind, name, offers=collect(hooks, kind), where=where)
    return cls, settings_of(cls, kind, settings=table, where=where)


def make(
    kind: Kind[AnyOffer],
    name: str,
    *,
    table: Mapping[str, Any],
    hooks: Hooks,
    where: str,
    arguments: Sequence[Any] = (),
) -> AnyOffer:
    """An instance of it; ``arguments``: those of its constructor after the settings."""
    cls, settings = choose(kind, name, table=table, hooks=hooks, where=where)
    return construct(cls, settings, *arguments)


def construct(cls: type[AnyOffer], settings: PluginConfig, *more: Any) -> AnyOffer:
    """An instance. An error of its constructor is a ``PluginError`` with the plugin's frames."""
    try:
        made = cls(settings, *more)
        _check_made(made)
        return made
    # A library may call `sys.exit` in a constructor. That must name the plugin.
    except (Exception, SystemExit) as error:
        if isinstance(error, Terminated):  # by a signal: no fault of the plugin
            raise
        if not isinstance(error, PrimeRLError):
            blame(
                error,
                Call(
                    cls.name,
                    f"{cls.__name__}.__init__",
                    owner=modules[cls.__module__],
                    arguments={},
                ),
            )
            raise PluginError(str(fault(error))) from error
        raise


def _check_made(made: Offer) -> None:
    """Raises ``PluginError`` for an attribute of an instance that nothing would read."""
    base = next(kind.base for kind in KINDS if isinstance(made, kind.base))
    # Attributes that `__init__` sets can only be checked on an instance.
    problem = missing(type(made), base) or misspelt_attribute(made, base)
    if problem:
        error = PluginError(problem)
        raise PluginError(str(fault_of(error, made))) from error


def fault_of(error: PluginError, made: Offer) -> str | None:
    """The error with the plugin and distribution of an offered class before it."""
    cls = type(made)
    blame(error, Call(cls.name, "__init__", owner=modules.get(cls.__module__), arguments={}))
    return fault(error)


def make_transport(table: WeightBroadcastConfig, hooks: Hooks) -> WeightTransport | None:
    """The weight transport of ``[weight_broadcast]``; None where weights go as files."""
    if table.as_files:
        return None
    return make(
        WEIGHT_TRANSPORT, table.type, table=table.settings, hooks=hooks, where="weight_broadcast"
    )


def bringer(kind: str, name: str) -> str | None:
    """The distribution that brings it, as index packages declare under ``prime_rl.known``."""
    for entry in entries("prime_rl.known", name=f"{kind}.{name}"):
        # The value of an entry point is an importable name, so its dashes are underscores.
        return str(entry.value).replace("_", "-")
    return None


def check_attribution(
    where: str, algorithm: type[Algorithm], renderer: type[RendererOffer]
) -> None:
    """The renderer tells what the algorithm reads of each token. Raises ``ConfigError``. Called for
    the renderer of the config before a run starts, and for the one that fits the model after."""
    if algorithm.needs_attribution and not renderer.gives_attribution:
        raise ConfigError(
            f"{where} tells tokens apart by their message's role and body, and renderer "
            f"{renderer.name!r} does not tell it. Set orchestrator.renderer.name to the renderer "
            "of the model's family."
        )
