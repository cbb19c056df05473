"""Find plugins, check them, and give each env its own hooks.

pluggy is lenient: a misspelled hook is never called, an ``async def`` is never awaited. Both are
errors here: at start-up, they name the plugin, its distribution, the fault and the fix.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from prime_rl.entries import (
    DISABLE,
    entries,
    installed_entries,
    installed_groups,
    leaving_out,
    load_entry,
)
from prime_rl.errors import PluginError, Terminated, line_in, text_of
from prime_rl.plugins import hookspecs
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.registry.calls import passing_on, run_as, running
from prime_rl.registry.checks import ASYNC_HOOKS, CONTRACT_VERSION, SPECS, check_plugin
from prime_rl.registry.guards import Guard, members

if TYPE_CHECKING:
    import numpy as np

    from prime_rl.plugins.sampler import GroupProgress, RolloutPlan
    from prime_rl.rollout import Group, Rollout, Sample

TRACE = "PRIME_RL_TRACE"
"""Environment variable: print every hook call, by the function in the entry-point group
``prime_rl.tracers``."""


CONTRACT = "prime-rl-contract"
"""The distribution whose version is that of the contract. Plugins require it."""


@dataclass(frozen=True)
class Origin:
    """The entry point and distribution of a plugin."""

    plugin: str
    """Entry-point name."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.plugin!r} ({self.distribution} {self.version})".replace(" )", ")")


class Hooks(pluggy.PluginManager):
    """A pluggy manager that refuses what pluggy would ignore. Its methods are the typed, awaited
    calls of the hooks: no other module calls a hook by name."""

    def __init__(self, group: str = PROJECT, label: str = "") -> None:
        super().__init__(PROJECT)
        self.group = group
        self.label = label
        """The scope: an env, a filter slot; empty: the shared plugins."""
        self.sources: dict[str, Origin] = {}
        self.offers: dict[str, dict[str, Any]] = {}  # of each kind, as ``collect`` found them
        self.add_hookspecs(hookspecs)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Add a plugin. Raises ``PluginError`` for what pluggy would accept and never call."""
        self.offers.clear()  # this plugin may bring a class of any kind
        label = name or self.get_canonical_name(plugin)
        where = str(self.sources.get(label, repr(label)))
        check_plugin(plugin, where, self.group)

        try:
            registered = super().register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {where}: {error}") from error

        # pluggy calls the sync hooks, so each function counts itself as the plugin's code.
        for caller in self.get_hookcallers(plugin) or ():
            if caller.name not in ASYNC_HOOKS and not caller.name.startswith("register_"):
                (impl,) = (each for each in caller.get_hookimpls() if each.plugin is plugin)
                impl.function = run_as(  # type: ignore[misc]
                    _name(impl),
                    caller.name,
                    owner=plugin,
                    names=impl.argnames,
                    function=impl.function,
                )

        if registered is not None and os.environ.get(TRACE, "0") not in ("", "0"):
            tracers = entries("prime_rl.tracers")
            if not tracers:
                raise PluginError(f"{TRACE} is set, and no tracer is installed. Unset it.")

            for entry in tracers:
                load_entry(entry)(self, registered, self.label)

        return registered

    async def prepare_rollout(self, plan: RolloutPlan) -> None:
        """Run every ``prepare_rollout``, one after the other."""
        await _call_async(self.hook.prepare_rollout, plan=plan)

    async def score_rollout(self, rollout: Rollout) -> None:
        """Run every ``score_rollout``, one after the other."""
        await _call_async(self.hook.score_rollout, (rollout,), rollout=rollout)

    @property
    def decides_sizes(self) -> bool:
        """Whether a plugin has ``wanted_members``."""
        return bool(self.hook.wanted_members.get_hookimpls())

    def wanted_members(self, progress: GroupProgress) -> int:
        """The largest answer; as many as now without any. Raises ``PluginError`` for one that is no
        number of members."""
        answers = self.hook.wanted_members(progress=progress)
        limit = progress.max_group_size

        for answer in answers:
            if type(answer) is not int or not 0 < answer <= limit:
                names = ", ".join(self.implementers("wanted_members", without=None))
                raise PluginError(
                    f"env {progress.env!r}, group {progress.group_id}: wanted_members of {names} "
                    f"gave {answer!r}, expected a whole number from 1 to max_group_size = {limit}. "
                    "Fix the plugin, or raise max_group_size in the config."
                )

        return max(answers, default=progress.size)

    async def score_group(self, group: Group) -> None:
        """Run every ``score_group``, one after the other."""
        await _call_async(self.hook.score_group, group, group=members(group))

    async def score_batch(self, groups: Sequence[Group]) -> None:
        """Run every ``score_batch``, one after the other."""
        rollouts = [rollout for group in groups for rollout in group]
        await _call_async(self.hook.score_batch, rollouts, groups=tuple(map(members, groups)))

    async def score_envs(self, batches: Mapping[str, Sequence[Group]]) -> None:
        """Run every ``score_envs``, one after the other."""
        every = [rollout for groups in batches.values() for group in groups for rollout in group]
        read_only = {env: tuple(map(members, groups)) for env, groups in batches.items()}
        await _call_async(self.hook.score_envs, every, batches=MappingProxyType(read_only))

    @property
    def scores_envs(self) -> bool:
        """Whether a plugin has ``score_envs``."""
        return bool(self.hook.score_envs.get_hookimpls())

    @property
    def scores_batches(self) -> bool:
        """Whether a plugin has ``score_batch`` or ``score_envs``, after which the streams
        freeze."""
        return bool(self.hook.score_batch.get_hookimpls()) or self.scores_envs

    def implementers(self, hook: str, without: object) -> list[str]:
        """The plugins that implement or wrap a hook, in words, ``without`` one of them."""
        impls = getattr(self.hook, hook).get_hookimpls()
        others = [impl for impl in impls if impl.plugin is not without]
        return [f"plugin {_name(impl)!r}" for impl in others]

    def observation_weights(self, rollout: Rollout) -> list[np.ndarray | None]:
        """The ce weights of each sample: the largest of all plugins for each token; None without
        any. Raises ``PluginError`` for an answer of another shape."""
        import numpy as np

        combined: list[np.ndarray | None] = [None] * len(rollout.samples)
        for answer in self.hook.observation_weights(rollout=rollout):
            if len(answer) != len(rollout.samples):
                raise PluginError(
                    f"env {rollout.env!r}: observation_weights gave {len(answer)} arrays, "
                    f"expected one for each of the rollout's {len(rollout.samples)} samples"
                )

            for index, (sample, weights) in enumerate(zip(rollout.samples, answer, strict=True)):
                if weights is not None:
                    column = _weights(rollout, sample, weights)
                    before = combined[index]
                    combined[index] = column if before is None else np.maximum(before, column)

        return combined

    def batch_packed(self, step: int, samples: Sequence[Sample]) -> None:
        """A batch leaves for the trainer. Raises ``PluginError`` if a hook has changed it."""
        before = [sample.columns for sample in samples]
        self.hook.batch_packed(step=step, samples=samples)

        for sample, columns in zip(samples, before, strict=True):
            now = sample.columns
            # The arrays are frozen, so what has changed is another array.
            changed = [n for n in {**columns, **now} if now.get(n) is not columns.get(n)]
            if changed:
                names = ", ".join(i.plugin_name for i in self.hook.batch_packed.get_hookimpls())
                raise PluginError(
                    f"step {step}: batch_packed of {names} replaced {changed[0]} of a sample. The "
                    "batch is frozen there: assign credit in score_rollout, score_group or "
                    "score_batch."
                )

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """The trainer took a step."""
        self.hook.step_finished(step=step, metrics=metrics)

    def weights_published(self, version: int) -> None:
        """Inference samples from new weights."""
        self.hook.weights_published(version=version)


async def _call_async(
    hook: pluggy.HookCaller, rollouts: Iterable[Rollout] = (), **arguments: object
) -> None:
    """Call in pluggy's order and await each: a wrapper's code after its ``yield`` finds the work
    done, sync or async.

    pluggy itself cannot: its call returns coroutines that were not awaited, and has run what
    follows the wrappers' ``yield`` by then. A call costs 1 CPU microsecond without an
    implementation and 5 with one; a rollout has two calls, and its group one."""
    guard = Guard(rollouts)
    with ExitStack() as wrappers:
        # pluggy lists implementations in reverse order of the calls.
        for impl in reversed(hook.get_hookimpls()):
            values = [arguments[name] for name in impl.argnames]
            function: Callable[..., Any] = impl.function
            call = running(_name(impl), hook=hook.name, owner=impl.plugin, arguments=arguments)

            if impl.wrapper:
                # The exits run in reverse: the wrapper, the check, the blame for an error.
                wrappers.enter_context(call)
                wrappers.enter_context(guard.checked())
                wrappers.enter_context(contextmanager(passing_on)(function(*values)))
                continue

            with call, guard.checked():
                result = function(*values)
                if inspect.isawaitable(result):
                    await result


def wrappers(hooks: Hooks) -> list[str]:
    """``score_group wrapped by 'clip' (my-dist 0.1)``, for each wrapper, the outermost first."""
    return [
        f"{name} wrapped by {hooks.sources.get(impl.plugin_name, impl.plugin_name)}"
        for name in SPECS
        for impl in reversed(getattr(hooks.hook, name).get_hookimpls())
        if impl.wrapper
    ]


def _name(impl: pluggy.HookImpl) -> str:
    """The name of the algorithm or filter (see ``scope``), else of the plugin."""
    return impl.plugin_name.rpartition(":")[2]


def _weights(rollout: Rollout, sample: Sample, weights: Iterable[float]) -> np.ndarray:
    import numpy as np

    column = np.asarray(weights, np.float32)
    valid = np.isfinite(column) & (column >= 0)
    if column.shape != sample.token_ids.shape or not valid.all():
        raise PluginError(
            f"env {rollout.env!r}: observation_weights must give one finite weight >= 0 per token: "
            f"got shape {column.shape}, expected {sample.token_ids.shape}"
        )

    return column


def load_plugins(group: str = PROJECT, *, disabled: Iterable[str] = ()) -> Hooks:
    """Load every installed plugin of an entry-point group, in name order. The same ones give the
    same object: register nothing in it. Raises ``PluginError``."""
    with leaving_out(disabled):
        plugins = tuple(entries(group))
    if (group, plugins) not in _loaded:
        _loaded[group, plugins] = _load(group, plugins)
    return _loaded[group, plugins]


_loaded: dict[tuple[str, tuple[EntryPoint, ...]], Hooks] = {}


def _load(group: str, plugins: tuple[EntryPoint, ...]) -> Hooks:
    hooks = Hooks(group)
    for entry in plugins:
        source = source_of(entry)
        first = hooks.sources.get(entry.name)
        if first:
            raise PluginError(
                f"two distributions name a plugin {entry.name!r}: {first.distribution} "
                f"{first.version} and {source.distribution} {source.version}. Uninstall one, or "
                f"list {source.distribution!r} under plugins.disabled."
            )

        add_entry(hooks, entry, source)
        misfit = core_misfit(_requirements(entry))
        if misfit:
            logging.getLogger(__name__).warning("plugin %s: %s", source, misfit)

    return hooks


def plugin_names() -> set[str]:
    """What ``--without`` and ``plugins.disabled`` may name: every plugin by its entry point, and
    every distribution that brings anything to a run, ``prime-rl`` with its defaults too. Core is no
    plugin."""
    entries = [entry for group in GROUPS for entry in installed_entries(group)]
    others = [entry for group in installed_groups("prime_rl") for entry in installed_entries(group)]
    names = {entry.name for entry in entries}
    names |= {entry.dist.name for entry in others if entry.dist is not None}
    return names - {"prime-rl-core"}


def disabled_names() -> list[str]:
    """The plugins that ``PRIME_RL_DISABLE`` names; ``prime-rl --without NAME`` adds to it. Raises
    ``PluginError`` for one that is not installed."""
    names = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    installed = plugin_names() if names else set()
    unknown = [name for name in names if name not in installed]
    if unknown:
        raise PluginError(
            f"--without ({DISABLE}): no installed plugin is called {unknown[0]!r} (installed: "
            f"{', '.join(sorted(installed))})"
        )

    return names


def add_entry(hooks: Hooks, entry: EntryPoint, source: Origin) -> None:
    """Import what an entry point names, and register it. Raises ``PluginError``."""
    # The source is stored first, because errors of `register` name it.
    hooks.sources[entry.name] = source
    try:
        plugin = load_entry(entry)
    except (Terminated, PluginError):
        raise
    except (Exception, SystemExit) as error:
        place = line_in(error, entry.module.partition(".")[0])
        raise PluginError(
            f"plugin {source} failed to import: {type(error).__name__}: {text_of(error)}{place}. "
            f"Fix or uninstall {source.distribution}, or list "
            f"{entry.name!r} under plugins.disabled."
        ) from error

    hooks.register(plugin, entry.name)


def source_of(entry: EntryPoint) -> Origin:
    if entry.dist is None:
        return Origin(entry.name, "unknown distribution", "")
    return Origin(entry.name, entry.dist.name, entry.dist.version)


def _requirements(entry: EntryPoint) -> list[str]:
    """What the distribution of a plugin requires."""
    if entry.dist is None:
        return []
    return entry.dist.requires or []


def core_misfit(requires: Iterable[str]) -> str:
    """Why this core is not what the requirements of a plugin's distribution say; empty if it is, or
    unknown."""
    if find_spec("packaging") is None:  # the slim contract comes without
        return ""

    from packaging.requirements import Requirement

    for each in requires:
        requirement = Requirement(each)
        if requirement.name not in ("prime-rl-core", CONTRACT):
            continue

        installed = f"{CONTRACT_VERSION}.0" if requirement.name == CONTRACT else _core_version()
        if not requirement.specifier.contains(installed, prereleases=True):
            return f"it asks for {each}; {installed} is here. Install a version that fits."

    return ""


def contract_of(entry: EntryPoint, plugin: object) -> str | int:
    """The contracts that a plugin was written for: what its distribution requires (``>=2,<4``),
    else its ``prime_rl_contract``, else this core's."""
    for each in _requirements(entry):
        requirement = each.partition(";")[0].replace(" ", "")
        if requirement.startswith(CONTRACT) and requirement != CONTRACT:
            bounds = requirement.removeprefix(CONTRACT).strip("()").split(",")
            return ",".join(sorted(bounds, reverse=True))  # the lower one first
    number: int = getattr(plugin, "prime_rl_contract", CONTRACT_VERSION)
    return number


@cache
def _core_version() -> str:
    return version("prime-rl-core")


def scope(label: str, shared: Hooks, own: Iterable[object]) -> Hooks:
    """The shared plugins plus one env's (or one filter slot's) own, in a manager of their own: no
    scope can reach another one's plugins."""
    hooks = Hooks(shared.group, label)
    hooks.sources |= shared.sources
    for name, plugin in shared.list_name_plugin():
        if plugin is not None:  # pluggy lists a blocked name with None
            hooks.register(plugin, name)

    for plugin in own:
        hooks.register(plugin, f"{label}:{getattr(plugin, 'name', type(plugin).__name__)}")
    return hooks


GROUPS = (PROJECT, TRAINER_GROUP)
"""Every entry-point group a plugin may be found in."""


def installed_versions() -> dict[str, str]:
    """Version of core and of every distribution with plugins. Imports none of them."""
    entries = [entry for group in GROUPS for entry in installed_entries(group)]
    versions = {entry.dist.name: entry.dist.version for entry in entries if entry.dist is not None}
    return {"prime-rl-core": version("prime-rl-core")} | dict(sorted(versions.items()))
