"""What to change so that a config fits: each change is planned before it is proposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prime_rl import ConfigError
from prime_rl_plan.estimate import Plan

MOST_TENSOR_PARALLELISM = 8

RATE = "trainer.optim.lr"
"""Adapters take a larger one than a whole model."""

Change = tuple[str, str]
"""Dotted key, and value as in TOML."""


def trainer_changes(plan: Plan) -> Iterator[Change]:
    """Cheapest first; they add up."""
    config = plan.config
    if plan.measured["keeps_gathered"]:
        yield "trainer.reshard_after_forward", "true"
    if not config.trainer.activation_checkpointing:
        yield "trainer.activation_checkpointing", "1"
    if config.row_tokens > config.seq_len:
        yield "trainer.micro_batch_tokens", str(config.seq_len)
    if config.deployment.colocated or config.deployment.trainer_gpus is None:
        most = plan.machines.total if config.deployment.colocated else plan.machines.total // 2
        ranks = plan.ranks * 2
        while ranks <= most:
            yield "trainer.num_ranks", str(ranks)
            ranks *= 2

    if "lora" not in config.trainer.settings:
        yield "trainer.lora.rank", "16"
        yield RATE, "1e-4"


def engine_changes(plan: Plan) -> Iterator[Change]:
    """More memory first, then more GPUs."""
    name = plan.config.inference.engine
    yield f"inference.{name}.gpu_memory_utilization", "0.9"
    size = 2
    while size <= min(plan.machines.count, MOST_TENSOR_PARALLELISM):
        yield f"inference.{name}.tensor_parallel_size", str(size)
        size *= 2


def trainer_fits(plan: Plan) -> bool:
    """Each rank fits its GPU."""
    return plan.trainer.fits


def engine_fits(plan: Plan) -> bool:
    """Each engine fits its GPUs, or there is none."""
    return plan.engine is None or plan.engine.fits


STAGES: tuple[tuple[Callable[[Plan], Iterator[Change]], Callable[[Plan], bool]], ...] = (
    (trainer_changes, trainer_fits),
    (engine_changes, engine_fits),
)


def advise(plan: Plan, again: Callable[[list[Change]], Plan]) -> tuple[list[Change], Plan]:
    """The changes after which it fits, and that plan; no changes if none of ours is enough.
    ``again`` plans the config with changes."""
    changes: dict[str, str] = {}
    for proposals, fits in STAGES:
        best = plan
        for key, value in proposals(plan):
            if fits(best) and key != RATE:
                break
            try:
                best = again([*(changes | {key: value}).items()])
            except ConfigError:  # it does not go with the rest of the config
                continue
            changes[key] = value

        if not fits(best):
            return [], best
        plan = best

    return list(changes.items()), plan
