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
from typing import TYPE_CHECKING, Any

import pluggy

from prime_rl.entries import (
    DISABLE,
    entries,
    installed_entries,
    leaving_out,
    names_of,
)
from prime_rl.errors import PluginError, Terminated
from prime_rl.plugins import hookspecs
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.registry.calls import run_as, running
from prime_rl.registry.checks import ASYNC_HOOKS, SPECS, check_plugin

if TYPE_CHECKING:
    import numpy as np

    from prime_rl.plugins.sampler import RolloutPlan
    from prime_rl.rollout import Group, Rollout, Sample

TRACE = "PRIME_RL_TRACE"
"""Environment variable: print every hook call, by the function in the entry-point group
``prime_rl.tracers``."""


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
        self.offers.clear()
        label = name or self.get_canonical_name(plugin)
        where = str(self.sources.get(label, repr(label)))
        check_plugin(plugin, where, self.group)
        try:
            registered = super().register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {where}: {error}") from error

        for caller in self.get_hookcallers(plugin) or ():
            if caller.name not in ASYNC_HOOKS and not caller.name.startswith("register_"):
                (impl,) = (each for each in caller.get_hookimpls() if each.plugin is plugin)
                known = _name(impl), caller.name, plugin, impl.argnames
                impl.function = run_as(*known, impl.function)  # type: ignore[misc]

        if registered is not None and os.environ.get(TRACE, "0") not in ("", "0"):
            tracers = entries("prime_rl.tracers")
            if not tracers:
                raise PluginError(f"{TRACE} is set, and no tracer is installed. Unset it.")
            for entry in tracers:
                entry.load()(self, registered, self.label)

        return registered

    async def prepare_rollout(self, plan: RolloutPlan) -> None:
        """Run every ``prepare_rollout``, one after the other."""
        await _call_async(self.hook.prepare_rollout, plan=plan)

    async def score_rollout(self, rollout: Rollout) -> None:
        """Run every ``score_rollout``, one after the other."""
        await _call_async(self.hook.score_rollout, rollout=rollout)

    async def score_group(self, group: Group) -> None:
        """Run every ``score_group``, one after the other."""
        await _call_async(self.hook.score_group, group=group)

    async def score_batch(self, groups: Sequence[Group]) -> None:
        """Run every ``score_batch``, one after the other."""
        await _call_async(self.hook.score_batch, groups=groups)

    @property
    def scores_batches(self) -> bool:
        """Whether a plugin has ``score_batch``, after which the streams freeze."""
        return bool(self.hook.score_batch.get_hookimpls())

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


async def _call_async(hook: pluggy.HookCaller, **arguments: object) -> None:
    """Call in pluggy's order and await each: a wrapper's code after its ``yield`` finds the work
    done, sync or async."""
    with ExitStack() as wrappers:
        for impl in reversed(hook.get_hookimpls()):
            given = [arguments[name] for name in impl.argnames]
            function: Callable[..., Any] = impl.function
            call = running(_name(impl), hook=hook.name, owner=impl.plugin, arguments=arguments)
            if impl.wrapper:
                wrappers.enter_context(call)
                wrappers.enter_context(contextmanager(function)(*given))
                continue
            with call:
                if inspect.isawaitable(result := function(*given)):
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
    """Of the algorithm or filter (see ``scope``), else of the plugin."""
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
        return _load(group, (*entries(group),))


@cache
def _load(group: str, loaded: tuple[EntryPoint, ...]) -> Hooks:
    hooks = Hooks(group)
    for entry in loaded:
        source = source_of(entry)
        first = hooks.sources.get(entry.name)
        if first:
            raise PluginError(
                f"two distributions name a plugin {entry.name!r}: {first.distribution} "
                f"{first.version} and {source.distribution} {source.version}. Uninstall one, or "
                f"list {source.distribution!r} under plugins.disabled."
            )

        add_entry(hooks, entry, source)
        misfit = core_misfit(entry)
        if misfit:
            logging.getLogger(__name__).warning("plugin %s: %s", source, misfit)

    return hooks


def disabled_names() -> list[str]:
    """The plugins that ``PRIME_RL_DISABLE`` names; ``prime-rl --without NAME`` adds to it. Raises
    ``PluginError`` for one that is not installed."""
    names = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    known = {n for group in GROUPS if names for e in installed_entries(group) for n in names_of(e)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PluginError(
            f"--without ({DISABLE}): no installed plugin is called {unknown[0]!r} (installed: "
            f"{', '.join(sorted(known))})"
        )

    return names


def add_entry(hooks: Hooks, entry: EntryPoint, source: Origin) -> None:
    """Import what an entry point names, and register it. Raises ``PluginError``."""
    hooks.sources[entry.name] = source
    try:
        plugin = entry.load()
    except Terminated:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {source} failed to import: {type(error).__name__}: {error}. "
            f"Fix or uninstall {source.distribution}, or list "
            f"{entry.name!r} under plugins.disabled."
        ) from error

    hooks.register(plugin, entry.name)


def source_of(entry: EntryPoint) -> Origin:
    if entry.dist is None:
        return Origin(entry.name, "unknown distribution", "")
    return Origin(entry.name, entry.dist.name, entry.dist.version)


def core_misfit(entry: EntryPoint) -> str:
    """Why this core is not what the plugin's distribution requires; empty if it is, or unknown."""
    if find_spec("packaging") is None:  # the slim contract comes without
        return ""
    from packaging.requirements import Requirement

    for each in (entry.dist.requires or []) if entry.dist else []:
        if each.startswith("prime-rl-core"):
            here = version("prime-rl-core")
            if not Requirement(each).specifier.contains(here, prereleases=True):
                return f"it asks for {each}; {here} is here. Install a version that fits."

    return ""


def scope(label: str, shared: Hooks, own: Iterable[object]) -> Hooks:
    """The shared plugins plus one env's (or one filter slot's) own, in a manager of their own: no
    scope can reach another one's plugins."""
    hooks = Hooks(shared.group, label)
    hooks.sources |= shared.sources
    for name, plugin in shared.list_name_plugin():
        if plugin is not None:
            hooks.register(plugin, name)
    for plugin in own:
        hooks.register(plugin, f"{label}:{getattr(plugin, 'name', type(plugin).__name__)}")
    return hooks


GROUPS = (PROJECT, TRAINER_GROUP)
"""Every entry-point group a plugin may be found in."""


def installed_versions() -> dict[str, str]:
    """Version of core and of every distribution with plugins. Imports none of them."""
    entries = [entry for group in GROUPS for entry in installed_entries(group)]
    found = {entry.dist.name: entry.dist.version for entry in entries if entry.dist is not None}
    return {"prime-rl-core": version("prime-rl-core")} | dict(sorted(found.items()))
