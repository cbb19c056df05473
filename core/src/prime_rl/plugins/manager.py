"""Find plugins, check them, and give each env its own hooks.

pluggy is lenient: a misspelt hook is never called, an ``async def`` is never awaited. Here each
such silence is an error at start-up that names the plugin, its distribution, the fault and the way
out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Any

import numpy as np
import pluggy

from prime_rl.errors import PluginError
from prime_rl.plugins import hookspecs
from prime_rl.plugins.checks import check_plugin
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.plugins.trace import trace_calls, wanted
from prime_rl.rollout import Group, Rollout, Sample

UNKNOWN = "unknown distribution"


@dataclass(frozen=True)
class Source:
    """Where a plugin came from."""

    plugin: str
    """Entry-point name."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.plugin!r} ({self.distribution} {self.version})".replace(" )", ")")


class Hooks(pluggy.PluginManager):
    """A pluggy manager that turns pluggy's silences into errors, and the typed front of every
    hook."""

    def __init__(self, group: str = PROJECT, label: str = "") -> None:
        super().__init__(PROJECT)
        self.group = group
        self.label = label
        """Whose hooks these are: an env, a filter slot; empty: everyone's."""
        self.sources: dict[str, Source] = {}
        self.add_hookspecs(hookspecs)

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Add a plugin. Raises ``PluginError`` for anything pluggy would accept and never call."""
        label = name or self.get_canonical_name(plugin)
        where = str(self.sources.get(label, repr(label)))
        check_plugin(plugin, where, self.group)
        try:
            registered = super().register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {where}: {error}") from error
        if registered is not None and wanted():
            trace_calls(self, registered, self.label)
        return registered

    # The only places hooks are called by name: typed once, awaited once.

    async def score_rollout(self, rollout: Rollout) -> None:
        """Run every ``score_rollout``, one after the other."""
        await _call_async(self.hook.score_rollout, rollout=rollout)

    async def score_group(self, group: Group) -> None:
        """Run every ``score_group``, one after the other."""
        await _call_async(self.hook.score_group, group=group)

    def observation_weights(self, rollout: Rollout) -> list[np.ndarray | None]:
        """The ce weights of each sample: the largest that any plugin gives each token, None where
        nobody does.

        Raises ``PluginError`` if an answer does not have one array per sample, each as long as its
        tokens.
        """
        combined: list[np.ndarray | None] = [None] * len(rollout.samples)
        for answer in self.hook.observation_weights(rollout=rollout):
            if len(answer) != len(rollout.samples):
                raise PluginError(
                    f"env {rollout.env!r}: observation_weights gave {len(answer)} arrays, "
                    "expected one for each of "
                    f"the rollout's {len(rollout.samples)} samples"
                )
            for index, (sample, weights) in enumerate(zip(rollout.samples, answer, strict=True)):
                if weights is not None:
                    column = _weights(rollout, sample, weights)
                    before = combined[index]
                    combined[index] = column if before is None else np.maximum(before, column)
        return combined

    def batch_packed(self, step: int, samples: Sequence[Sample]) -> None:
        """Tell everyone that a batch leaves for the trainer."""
        self.hook.batch_packed(step=step, samples=samples)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell everyone that the trainer took a step."""
        self.hook.step_finished(step=step, metrics=metrics)

    def weights_published(self, version: int) -> None:
        """Tell everyone that inference samples from new weights."""
        self.hook.weights_published(version=version)


async def _call_async(hook: pluggy.HookCaller, **arguments: object) -> None:
    """pluggy's own order of calls, each awaited before the next.

    So a wrapper's code after its ``yield`` finds the work done, be what it wraps sync or async.
    """
    with ExitStack() as wrappers:
        for impl in reversed(hook.get_hookimpls()):
            given = [arguments[name] for name in impl.argnames]
            function: Callable[..., Any] = impl.function
            if impl.wrapper:
                wrappers.enter_context(contextmanager(function)(*given))
            elif inspect.isawaitable(result := function(*given)):
                await result


def _weights(rollout: Rollout, sample: Sample, weights: Iterable[float]) -> np.ndarray:
    column = np.asarray(weights, np.float32)
    if (
        column.shape != sample.token_ids.shape
        or not np.isfinite(column).all()
        or (column < 0).any()
    ):
        raise PluginError(
            f"env {rollout.env!r}: observation_weights must give one finite weight >= 0 per token: "
            f"got shape {column.shape}, expected {sample.token_ids.shape}"
        )
    return column


def load_plugins(group: str = PROJECT, *, disabled: Iterable[str] = ()) -> Hooks:
    """Load every installed plugin of an entry-point group, in name order. Raises
    ``PluginError``."""
    hooks, skip = Hooks(group), frozenset(disabled)
    for entry in sorted(installed_entries(group), key=lambda entry: entry.name):
        if entry.name in skip:
            continue
        source = source_of(entry)
        first = hooks.sources.get(entry.name)
        if first is not None:
            raise PluginError(
                f"two distributions name a plugin {entry.name!r}: {first.distribution} "
                f"{first.version} and "
                f"{source.distribution} {source.version}. Uninstall one, or list the name under "
                "plugins.disabled."
            )
        add_entry(hooks, entry, source)
    return hooks


def add_entry(hooks: Hooks, entry: EntryPoint, source: Source) -> None:
    """Import what an entry point names, and register it. Raises ``PluginError``."""
    hooks.sources[entry.name] = source
    hooks.register(_load(entry, source), entry.name)


def installed_entries(group: str) -> Iterable[EntryPoint]:
    """Entry points of a group; an editable install may be listed twice, so equal ones count
    once."""
    found = {(e.name, e.value, e.dist.name if e.dist else ""): e for e in entry_points(group=group)}
    return found.values()


def source_of(entry: EntryPoint) -> Source:
    """The distribution of an entry point."""
    if entry.dist is None:
        return Source(entry.name, UNKNOWN, "")
    return Source(entry.name, entry.dist.name, entry.dist.version)


def _load(entry: EntryPoint, source: Source) -> object:
    try:
        return entry.load()
    except Exception as error:
        raise PluginError(
            f"plugin {source} failed to import: {type(error).__name__}: {error}. "
            f"{_asked_for(entry)}Mend or uninstall {source.distribution}, or list {entry.name!r} "
            "under plugins.disabled."
        ) from error


def _asked_for(entry: EntryPoint) -> str:
    """Which core the plugin's distribution is made for, and which is here; nothing if unknown."""
    named = (entry.dist.requires or []) if entry.dist else []
    wanted = next((each for each in named if each.startswith("prime-rl-core")), None)
    try:
        return f"It asks for {wanted}; {version('prime-rl-core')} is here. " if wanted else ""
    except PackageNotFoundError:
        return ""


def scope(label: str, shared: Hooks, own: Iterable[object]) -> Hooks:
    """The shared plugins plus one env's (or one filter slot's) own.

    One manager per scope: isolation comes from construction, not from a list of other scopes'
    plugins to leave out.
    """
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
