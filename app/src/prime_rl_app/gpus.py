"""The GPUs of this machine, and their division among the processes. This module does not import
torch, which would hold a CUDA context in the supervisor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from prime_rl.config.run import DeploymentConfig, RunConfig
from prime_rl.config.trainer import divisors
from prime_rl.errors import ConfigError
from prime_rl.plugins.launchers import Launcher
from prime_rl.rundir.machine import VISIBLE
from prime_rl_app.output import counted

Gpus = tuple[int, ...]
"""Indices into the visible GPUs."""


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of each process. None: it gets no ``CUDA_VISIBLE_DEVICES``."""

    engines: tuple[Gpus, ...] | None
    """One entry per engine."""
    trainer: Gpus | None


NOTHING = GpuPlan(None, None)


def gpus_of(config: RunConfig, launcher: Launcher, earlier: Sequence[str]) -> GpuPlan:
    """Split the visible GPUs: the engines get the first, the trainer the last. ``earlier``: the
    earlier weights that engines of their own serve.

    Nothing is assigned by a remote launcher, without a GPU, or with a single one that the config
    assigns to neither side. Raises ``ConfigError`` for GPUs that do not exist, that both sides
    have, or that do not divide.
    """
    deployment = config.deployment
    on_cpu = config.trainer.device == "cpu"
    if launcher.is_remote:
        _check_remote(deployment, launcher.name)
        return NOTHING

    num_gpus = launcher.num_gpus()
    engines = num_engines(config, earlier)
    _check_lists(deployment, num_gpus, engines=engines, on_cpu=on_cpu)
    wants_gpus = deployment.inference_gpus or deployment.trainer_gpus or deployment.colocated
    if num_gpus == 0 or (num_gpus == 1 and not wants_gpus):
        return NOTHING
    ranks = 0 if on_cpu else config.trainer.num_ranks or 0
    everything = tuple(range(num_gpus))
    inference = deployment.inference_gpus or everything
    trainer = Gpus()
    if engines == 0 and not on_cpu:
        inference = ()
        trainer = deployment.trainer_gpus or everything
    elif not on_cpu:
        split = _shared if deployment.colocated else _separate
        inference, trainer = split(deployment, everything, ranks)

    if ranks > len(trainer):
        raise ConfigError(
            f"trainer.num_ranks is {ranks}, and the trainer has {counted(len(trainer), 'GPU')} "
            f"({list(trainer)}): a rank needs one of its own. Lower it, or give it more GPUs "
            "(deployment.trainer_gpus)."
        )

    # A list of the config must divide; our own choice may leave a rest.
    share, rest = divmod(len(inference), max(engines, 1))
    if engines and (share == 0 or (rest and deployment.inference_gpus)):
        more = "".join(f" (one for host.{name})" for name in earlier)
        raise ConfigError(
            f"inference.replicas: {counted(engines, 'engine')}{more} cannot share "
            f"{counted(len(inference), 'GPU')} ({list(inference)}) "
            "equally. Change it, or deployment.inference_gpus."
        )

    shares = tuple(inference[n * share : (n + 1) * share] for n in range(engines))
    return GpuPlan(shares, trainer[: ranks or None])


def num_engines(config: RunConfig, earlier: Sequence[str]) -> int:
    """Engines that this run starts, those of earlier weights included."""
    if config.inference.base_url is not None:
        return 0
    return config.inference.replicas + len(earlier)


def check_shares(gpus: GpuPlan, needed: int) -> None:
    """Raises ``ConfigError`` if an engine that needs ``needed`` GPUs has fewer."""
    for number, share in enumerate(gpus.engines or ()):
        if len(share) < needed:
            raise ConfigError(
                f"inference: one engine spreads over {needed} GPUs (its tensor parallelism), and "
                f"replica {number} has {len(share)}: {list(share)}. Lower it, or give the engines "
                "more (deployment.inference_gpus, inference.replicas)."
            )


def num_ranks(config: RunConfig, gpus: GpuPlan) -> int:
    """Trainer ranks: as configured, else one per GPU of the trainer. Raises ``ConfigError``."""
    ranks = config.trainer.num_ranks or len(gpus.trainer or ()) or config.deployment.trainer_nodes
    if ranks % config.deployment.trainer_nodes:
        raise ConfigError(
            f"trainer.num_ranks is {ranks} and deployment.trainer_nodes is "
            f"{config.deployment.trainer_nodes}: every node runs as many ranks as the others. Set "
            f"trainer_nodes to one of {divisors(ranks)}, or num_ranks to a multiple of "
            f"{config.deployment.trainer_nodes}."
        )

    config.trainer.check_ranks(ranks)
    return ranks


def _shared(config: DeploymentConfig, everything: Gpus, ranks: int) -> tuple[Gpus, Gpus]:
    """Engines and trainer share the GPUs of either list, which must agree; else all GPUs."""
    inference = config.inference_gpus
    trainer = config.trainer_gpus
    if inference and trainer and set(inference) != set(trainer):
        raise ConfigError(
            f"deployment: colocated, but inference_gpus is {list(inference)} and trainer_gpus is "
            f"{list(trainer)}. Give the same GPUs, or only one of the two lists."
        )

    gpus = inference or trainer or everything[: ranks or None]
    return inference or gpus, trainer or gpus


def _separate(config: DeploymentConfig, everything: Gpus, ranks: int) -> tuple[Gpus, Gpus]:
    """Disjoint GPUs for the engines and the trainer."""
    inference = config.inference_gpus
    trainer = config.trainer_gpus
    if inference is None and trainer is None:
        trainer = everything[-(ranks or 1) :]
    if trainer is None:
        trainer = tuple(number for number in everything if number not in (inference or ()))
        trainer = trainer[-ranks:] if ranks else trainer

    if inference is None:
        inference = tuple(number for number in everything if number not in trainer)
    both = sorted(set(inference) & set(trainer))
    if both:
        raise ConfigError(
            f"deployment: inference_gpus {list(inference)} and trainer_gpus {list(trainer)} both "
            f"have {both}. Give each GPU to one of them, or set deployment.colocated = true."
        )

    for key, numbers in (("inference_gpus", inference), ("trainer_gpus", trainer)):
        if not numbers:
            raise ConfigError(
                f"deployment.{key}: no GPU is left of the {len(everything)} on this machine. Give "
                "the other side fewer, or set deployment.colocated = true."
            )

    return inference, trainer


def _check_remote(config: DeploymentConfig, launcher: str) -> None:
    """Refuse settings of one machine where the launcher chooses among several."""
    for key in ("inference_gpus", "trainer_gpus"):
        if getattr(config, key) is not None:
            raise ConfigError(
                f"deployment.{key} numbers the GPUs of one machine, and the launcher "
                f"{launcher!r} chooses among several. Leave it out."
            )

    if config.colocated:
        raise ConfigError(
            "deployment.colocated shares one machine's GPUs, which the launcher "
            f"{launcher!r} cannot promise. Use the launcher 'local', or leave it out."
        )


def _check_lists(config: DeploymentConfig, num_gpus: int, engines: int, on_cpu: bool) -> None:
    """The config's lists name GPUs that exist, of processes that use GPUs here."""
    visible = f"{VISIBLE} is {os.environ.get(VISIBLE, 'unset')}"
    for key in ("inference_gpus", "trainer_gpus"):
        numbers = getattr(config, key) or ()
        if numbers and num_gpus == 0:
            raise ConfigError(
                f"deployment.{key} is {list(numbers)}, and no GPU was found: nvidia-smi counts "
                f"none, {visible}. Leave it out to run on CPU."
            )

        if numbers and max(numbers) >= num_gpus:
            raise ConfigError(
                f"deployment.{key}: there is no GPU {max(numbers)}; {num_gpus} can be used here, "
                f"numbered from 0 ({visible})"
            )

        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"deployment.{key}: a GPU is listed twice: {list(numbers)}")

    if engines == 0 and config.inference_gpus is not None:
        raise ConfigError(
            "deployment.inference_gpus is set, and inference.base_url names engines that run "
            "elsewhere. Leave it out."
        )

    if on_cpu and config.trainer_gpus is not None:
        raise ConfigError(
            'deployment.trainer_gpus is set, and trainer.device is "cpu". Leave one of them out.'
        )
