"""The GPUs of this machine, and their division among the processes. This module does not import
torch, which would hold a CUDA context in the supervisor."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from prime_rl.config.deployment import DeploymentConfig
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError
from prime_rl.plugins.launchers import Launcher

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
ASK_SECONDS = 30.0


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that this process may use, in CUDA's order: those of
    ``CUDA_VISIBLE_DEVICES``, else all that ``nvidia-smi`` lists. Empty: none."""
    told = os.environ.get(VISIBLE)
    if told is None:
        return list(_counted(os.environ.get("PATH", "")))
    names = [name.strip() for name in told.split(",") if name.strip()]
    # CUDA stops at the first invalid entry: -1 hides all that follow.
    return names[: names.index("-1")] if "-1" in names else names


@cache
def _counted(path: str) -> tuple[str, ...]:
    """Cached for each search path, because the driver takes a second to answer."""
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip().isdecimal())


@dataclass(frozen=True)
class GpuPlan:
    """Indices into the visible GPUs. None: the process gets no ``CUDA_VISIBLE_DEVICES``."""

    engines: tuple[tuple[int, ...], ...] | None
    """One entry per engine."""
    trainer: tuple[int, ...] | None

    def of_engine(self, number: int) -> tuple[int, ...] | None:
        """The GPUs of one engine."""
        return None if self.engines is None else self.engines[number]


NOTHING = GpuPlan(None, None)


def gpus_of(config: RunConfig, launcher: Launcher) -> GpuPlan:
    """The GPUs of each process on this machine. Raises ``ConfigError``."""
    deployment = config.deployment
    if not launcher.is_remote:
        return plan_gpus(
            deployment,
            launcher.num_gpus(),
            num_engines(config),
            config.trainer.num_ranks or 0,
            config.trainer.device == "cpu",
        )
    for key in ("inference_gpus", "trainer_gpus"):
        if getattr(deployment, key) is not None:
            raise ConfigError(
                f"deployment.{key} numbers the GPUs of one machine, and the launcher "
                f"{launcher.name!r} chooses among several. Leave it out."
            )
    if deployment.colocated:
        raise ConfigError(
            "deployment.colocated shares one machine's GPUs, which the launcher "
            f"{launcher.name!r} cannot promise. Use the launcher 'local', or leave it out."
        )
    return NOTHING


def num_engines(config: RunConfig) -> int:
    """Engines that this run starts."""
    return 0 if config.inference.base_url is not None else config.inference.replicas


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
            f"{config.deployment.trainer_nodes}: every node runs as many ranks as the others. Make "
            "one a multiple of the other."
        )
    config.trainer.check_ranks(ranks)
    return ranks


def plan_gpus(
    config: DeploymentConfig, num_gpus: int, num_engines: int, ranks: int, on_cpu: bool = False
) -> GpuPlan:
    """Split ``num_gpus`` visible GPUs: the engines get the first, the trainer the last.

    ``num_engines``: engines that this run starts; 0 if they run elsewhere. ``ranks``: trainer
    ranks; 0 if the config does not set them. ``on_cpu``: the trainer uses no GPU. Nothing is
    assigned without a GPU, or with a single one that the config assigns to neither side. Raises
    ``ConfigError`` for GPUs that do not exist, that both sides have, or that do not divide.
    """
    _check_lists(config, num_gpus, num_engines, on_cpu)
    given = (config.inference_gpus, config.trainer_gpus)
    unsaid = given == (None, None) and not config.colocated
    if num_gpus == 0 or (num_gpus == 1 and unsaid):
        return NOTHING
    everything = tuple(range(num_gpus))
    if on_cpu:
        return GpuPlan(_split(config, everything, num_engines), ())
    if num_engines == 0:
        return GpuPlan((), _trainer(config.trainer_gpus or everything, ranks))
    if config.colocated:
        return _shared(config, everything, num_engines, ranks)
    engines, trainer = _separate(config, everything, ranks)
    return GpuPlan(_split(config, engines, num_engines), _trainer(trainer, ranks))


def _shared(
    config: DeploymentConfig, everything: tuple[int, ...], num_engines: int, ranks: int
) -> GpuPlan:
    """Engines and trainer share the GPUs of either list, which must agree; else all GPUs."""
    inference, trainer = config.inference_gpus, config.trainer_gpus
    if inference and trainer and set(inference) != set(trainer):
        raise ConfigError(
            f"deployment: colocated, but inference_gpus is {list(inference)} and trainer_gpus is "
            f"{list(trainer)}. Give the same GPUs, or only one of the two lists."
        )
    gpus = inference or trainer or (everything[:ranks] if ranks else everything)
    return GpuPlan(_split(config, gpus, num_engines), _trainer(trainer or gpus, ranks))


def _separate(
    config: DeploymentConfig, everything: tuple[int, ...], ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Disjoint GPUs for the engines and the trainer."""
    inference, trainer = config.inference_gpus, config.trainer_gpus
    if inference is None and trainer is None:
        trainer = everything[-(ranks or 1) :]
    if trainer is None:
        trainer = tuple(number for number in everything if number not in (inference or ()))
        trainer = trainer[-ranks:] if ranks else trainer
    if inference is None:
        inference = tuple(number for number in everything if number not in trainer)
    if both := sorted(set(inference) & set(trainer)):
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


def _trainer(gpus: Sequence[int], ranks: int) -> tuple[int, ...]:
    if ranks > len(gpus):
        raise ConfigError(
            f"trainer.num_ranks is {ranks}, and the trainer has {len(gpus)} GPUs "
            f"({list(gpus)}): a rank needs one of its own. Lower it, or give it more GPUs "
            "(deployment.trainer_gpus)."
        )
    return tuple(gpus[: ranks or None])


def _split(
    config: DeploymentConfig, gpus: Sequence[int], num_engines: int
) -> tuple[tuple[int, ...], ...]:
    """Equal shares, in order. A list of the config must divide; our own choice may leave a rest."""
    gpus = config.inference_gpus or gpus
    share, rest = divmod(len(gpus), max(num_engines, 1))
    if share == 0 or (rest and config.inference_gpus):
        raise ConfigError(
            f"inference.replicas: {num_engines} engines cannot share {len(gpus)} GPUs "
            f"({list(gpus)}) equally. Change it, or deployment.inference_gpus."
        )
    return tuple(tuple(gpus[n * share : (n + 1) * share]) for n in range(num_engines))


def _check_lists(config: DeploymentConfig, num_gpus: int, num_engines: int, on_cpu: bool) -> None:
    for key in ("inference_gpus", "trainer_gpus"):
        numbers = getattr(config, key)
        if numbers is not None:
            _check_numbers(f"deployment.{key}", numbers, num_gpus)
    if num_engines == 0 and config.inference_gpus is not None:
        raise ConfigError(
            "deployment.inference_gpus is set, and inference.base_url names engines that run "
            "elsewhere. Leave it out."
        )
    if on_cpu and config.trainer_gpus is not None:
        raise ConfigError(
            'deployment.trainer_gpus is set, and trainer.device is "cpu". Leave one of them out.'
        )


def _check_numbers(key: str, numbers: Sequence[int], num_gpus: int) -> None:
    told = f"{VISIBLE} is {os.environ.get(VISIBLE, 'unset')}"
    if num_gpus == 0:
        raise ConfigError(
            f"{key} is {list(numbers)}, and no GPU was found: nvidia-smi counts none, {told}. "
            "Leave it out to run on CPU."
        )
    if too_high := [number for number in numbers if number >= num_gpus]:
        raise ConfigError(
            f"{key}: there is no GPU {too_high[0]}; {num_gpus} can be used here, numbered from 0 "
            f"({told})"
        )
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{key}: a GPU is listed twice: {list(numbers)}")
