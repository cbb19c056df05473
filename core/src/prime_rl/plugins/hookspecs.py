# mypy: disable-error-code="empty-body"
"""Every hook, in the order a run meets them.

    sampler -> [prepare_rollout] -> rollout -> [score_rollout] [observation_weights]
            -> [wanted_members] -> [score_group] -> [filter_rollout] -> [score_batch]
            -> [score_envs] -> packer -> [batch_packed] -> wire -> trainer -> [step_finished]
            -> weights -> [weights_published] -> sampler

A plugin implements a hook by decorating a function of that name with ``@hookimpl``; it may take any
subset of the arguments, by name. Five rules:

* ``async def`` here: implementations may be sync or async, and the caller awaits. ``def`` here:
  implementations must be sync; ``async def`` is refused.
* Every implementation runs. The last registered runs first; ``tryfirst`` and ``trylast`` move one.
  No hook stops at the first result.
* A wrapper (``@hookimpl(wrapper=True)``) is a generator with one ``yield``. The code after the
`yield` runs when everything inside is done, async implementations included.
* An exception stops the run: handle expected failures inside the hook.
* Hooks run per rollout, per group or per step; never per token.

Scoring and filtering happen in a scope: the env's own algorithm, or one filter slot's own filters,
plus every installed plugin, which may add to them or wrap them (``@hookimpl(wrapper=True)``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import numpy as np
    import typer

    from prime_rl.plugins.algorithm import Algorithm, Filter
    from prime_rl.plugins.launchers import Engine, Launcher
    from prime_rl.plugins.loss import Head, Loss
    from prime_rl.plugins.model import ModelMaker, RendererOffer
    from prime_rl.plugins.observer import Monitor, RunObserver
    from prime_rl.plugins.sampler import GroupProgress, RolloutPlan, Sampler, Source
    from prime_rl.plugins.trainer import Kernel, OptimizerMaker, TrainerObserver, Tuning
    from prime_rl.plugins.view import RunView
    from prime_rl.plugins.weight_transports import WeightTransport
    from prime_rl.rollout import Group, Rollout, Sample

PROJECT = "prime_rl"
TRAINER_GROUP = "prime_rl.trainer"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# -- registration: called once, at start-up; every answer is collected ------------------


@hookspec
def register_algorithms() -> Iterable[type[Algorithm]]:
    """Offer algorithms, selected by ``algo.type``. Two classes of one ``name`` stop the run."""


@hookspec
def register_filters() -> Iterable[type[Filter]]:
    """Offer filters, selected by ``type`` in a filter slot."""


@hookspec
def register_renderers() -> Iterable[type[RendererOffer]]:
    """Offer renderers, selected by ``orchestrator.renderer.name``."""


@hookspec
def register_samplers() -> Iterable[type[Sampler]]:
    """Offer samplers, selected by ``orchestrator.sampler.type``."""


@hookspec
def register_sources() -> Iterable[type[Source]]:
    """Offer sources of rollouts, selected by ``algo.sampling.source.type``."""


@hookspec
def register_engines() -> Iterable[type[Engine]]:
    """Offer inference engines, selected by ``inference.engine``."""


@hookspec
def register_observers() -> Iterable[type[RunObserver]]:
    """Offer what sees a run: subclasses of ``Observer``, ``Monitor`` and ``TrainerObserver``.

    An ``Observer`` or ``TrainerObserver`` takes part where it is installed; ``[observers.<name>]``
    or ``[trainer.<name>]`` has its settings. A ``Monitor`` takes part in a run with a table
    ``[monitors.<name>]``. The trainer loads the entry-point group ``prime_rl.trainer`` only: name
    a plugin with a ``TrainerObserver`` there, and one with both sorts under both groups.
    """


@hookspec
def register_models() -> Iterable[type[ModelMaker]]:
    """Offer models made on this machine, selected by ``model.name``."""


@hookspec
def register_launchers() -> Iterable[type[Launcher]]:
    """Offer launchers, which start the processes of a run, selected by ``launcher.type``."""


@hookspec
def register_views() -> Iterable[type[RunView]]:
    """Offer views, which show a run to the user who started it, selected by ``view.type``."""


@hookspec
def register_commands(cli: typer.Typer, plugins: typer.Typer) -> None:
    """Add commands to ``prime-rl`` (``cli``) and to ``prime-rl plugins``.

    Called whenever the command line starts: import what a command needs inside it. ``prime-rl
    --help`` loads only plugins that the entry-point group ``prime_rl.commands`` names too, so name
    the plugin there as well; otherwise its commands work, and the help does not list them.
    """


# The trainer loads the entry-point group ``prime_rl.trainer`` only. Offer there what follows, up to
# weight transports.


@hookspec
def register_losses() -> Iterable[type[Loss]]:
    """Offer losses of the rl component, selected by ``trainer.loss.type``."""


@hookspec
def register_heads() -> Iterable[type[Head]]:
    """Offer heads, selected by a table ``[trainer.heads.<name>]``.

    Called in the orchestrator and in the trainer: both load them from the entry-point group
    ``prime_rl.trainer``.
    """


@hookspec
def register_tunings() -> Iterable[type[Tuning]]:
    """Offer tunings, each selected by a table ``[trainer.<name>]``; a run has one at most."""


@hookspec
def register_optimizers() -> Iterable[type[OptimizerMaker]]:
    """Offer optimizers of the policy, selected by ``trainer.optim.type``."""


@hookspec
def register_kernels() -> Iterable[type[Kernel]]:
    """Offer kernels, which compute packed rows, selected by ``trainer.attention``."""


@hookspec
def register_weight_transports() -> Iterable[type[WeightTransport]]:
    """Offer weight transports, selected by ``weight_broadcast.type``.

    Called in the orchestrator and in the trainer: name the plugin under both entry-point groups.
    """


# -- sampling: called in the scope of one env ----------------------------------------------


@hookspec
async def prepare_rollout(plan: RolloutPlan) -> None:
    """Change how one rollout is sampled: its prompt, temperature, length; or shrink its group.

    Not called for the groups of a ``Source``, nor in an evaluation.
    """


@hookspec
def wanted_members(progress: GroupProgress) -> int | None:
    """How many members the group shall have; None: as many as now.

    Called whenever the next member by number has ended and its ``score_rollout`` is done. More than
    ``progress.size``: further members are sampled, at most ``progress.max_group_size``
    (``max_group_size`` of the env). Fewer: those with higher numbers are cancelled, or left out if
    they have ended; up to ``progress.ended``, the group is complete. The largest answer of several
    plugins counts. Decide by ``progress`` alone, so that a resumed run decides the same.

    Not called for the groups of a ``Source``.
    """


# -- scoring: called in the scope of one env ---------------------------------------------


@hookspec
async def score_rollout(rollout: Rollout) -> None:
    """Score one rollout as it arrives, before its siblings are known.

    The place for model I/O (a teacher's logprobs, a judge's verdict) and for credit that needs no
    baseline. Rollouts that a filter drops later are scored too.
    """


@hookspec
def observation_weights(rollout: Rollout) -> Sequence[np.ndarray | Sequence[float] | None] | None:
    """Weigh env-provided tokens for the ce component: one array per sample of the rollout, one
    weight per token.

    ``None``, for a sample or altogether, leaves observations masked out. Answers of several plugins
    combine by the larger weight of each token. Called on arrival, after ``score_rollout``.
    """


@hookspec
async def score_group(group: Group) -> None:
    """Score a complete group: group-relative credit, by ``rollout.assign_advantages``.

    Runs once, after ``score_rollout`` has finished for every member. Failed members are missing, so
    expect fewer than ``group_size``, or more where ``wanted_members`` asked for more.
    """


@hookspec
async def score_batch(groups: Sequence[Group]) -> None:
    """Score the env's part of a batch, after the post-batch filters: whitening, for example.

    Runs once per batch. ``groups`` are in the order of ``group_id``, each with the rollouts that
    train in this batch: others were dropped, or train in another. Filters run before it, so they
    see the streams of ``score_group``.
    """


@hookspec
async def score_envs(batches: Mapping[str, Sequence[Group]]) -> None:
    """Score a batch over several envs: one mean and deviation for all of them, for example.

    Envs share a call if their algorithms are of one class with equal settings. Each such set is
    called once per batch, after ``score_batch`` of each of its envs. The first of them in the
    config is called, and its algorithm keeps the state of the set. ``batches``: one for each env,
    in the order of the config, what ``score_batch`` of that env got; an env without a rollout in
    the batch is missing.

    Implement it in an algorithm. In the package of an env it would also see the rollouts of the
    other envs.
    """


# -- filtering: called in the scope of one filter slot -------------------------------------


@hookspec
def filter_rollout(rollout: Rollout, group: Group) -> str | None:
    """The reason to drop the rollout, or None to keep it. ``group``: the rollout and the siblings
    that were scored with it, dropped ones too; after a resume, those that have trained before are
    missing. A filter that takes ``group`` makes all envs wait for siblings.

    Every filter is called, also after an objection, so that each rate can be logged.
    """


# -- deprecated: called as before, until contract version 4 --------------------------------


@hookspec
def register_monitors() -> Iterable[type[Monitor]]:
    """Offer monitors.

    Deprecated: use ``register_observers``.
    """


@hookspec
def register_trainer_observers() -> Iterable[type[TrainerObserver]]:
    """Offer observers of the trainer, from the entry-point group ``prime_rl.trainer``.

    Deprecated: use ``register_observers``.
    """


@hookspec
def batch_packed(step: int, samples: Sequence[Sample]) -> None:
    """A batch is about to leave for the trainer. It is frozen: read only.

    Deprecated: use ``Observer.batch_sent``.
    """


@hookspec
def step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """The trainer took optimizer step ``step``; these are its metrics.

    Deprecated: use ``Observer.step_trained``.
    """


@hookspec
def weights_published(version: int) -> None:
    """Inference samples from policy ``version`` from now on.

    Deprecated: use ``Observer.version_served``.
    """
