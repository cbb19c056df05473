"""A plan in lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prime_rl_plan.devices import GIB, SENT, SHARED
from prime_rl_plan.estimate import Plan, Side, kinds, traffic
from prime_rl_plan.suggest import Suggestion, toml_lines


def lines(plan: Plan) -> Iterator[str]:
    """For the terminal: what starts, memory, tokens, time, bytes."""
    machines = plan.machines
    measured = plan.measured
    billions = measured["weights"] / 1e9
    trained = measured["trained"] / 1e9
    part = f", {trained:.3g}B of them trained" * (trained < billions)
    yield f"model      {plan.config.model.name}: {billions:.3g}B weights{part}"
    where = f"{machines.count} x {machines.name}" if machines.count else "CPU"
    yield (
        f"machines   {machines.nodes} x ({where})" if machines.nodes > 1 else f"machine    {where}"
    )
    engine = plan.config.inference.engine
    for name, place in plan.places:
        what = f" ({engine})" * name.startswith("inference")
        yield f"process    {name}{what}: {place}"

    yield from _side("trainer", "of each rank", plan.trainer)
    has_engines = plan.config.has_engines
    if plan.engine is not None and has_engines:
        yield from _side("engine", "of each GPU", plan.engine)
        longest = plan.config.inference.max_model_len or plan.config.seq_len
        yield f"           KV of {plan.concurrency:,} samples of {longest:,} tokens per engine"

    yield f"host       of each machine: {_parts(plan.host) or 'one or two GiB per process'}"
    yield (
        f"step       at most {plan.tokens:,} tokens, {plan.rows} row{'s' * (plan.rows > 1)} of "
        f"{plan.config.row_tokens:,} per rank"
    )
    if plan.seconds:
        parts = [f"{name} {_time(each)}" for name, each in plan.seconds.items()]
        yield "time       at least " + ", ".join(parts)
        yield (
            f"           roofline of {machines.bfloat16 / 1e12:,.0f} TFLOP/s bfloat16, "
            f"{machines.bandwidth / 1e9:,.0f} GB/s memory, {machines.link / 1e9:,.0f} GB/s link "
            "(makers' data sheets), every sample as long as seq_len"
        )

    yield from _traffic(plan)
    if has_engines:
        yield f"update     {plan.update / 2**20:,.0f} MiB per version to each engine"


def _traffic(plan: Plan) -> Iterator[str]:
    """What ranks exchange, and with whom."""
    trainer = plan.config.trainer
    group = trainer.expert_ranks(plan.ranks)
    groups_share = 1 < group < plan.ranks // trainer.dp_replicate
    sent = "tokens and experts between ranks" if groups_share else "tokens between ranks"
    names = {SHARED: "weights and gradients", SENT: sent}
    parts = [
        f"{names[each.kind]} {each.bytes / GIB:.2f} GiB in {_time(each.seconds)} "
        f"({'between machines' if each.between_machines else 'on a machine'})"
        for each in traffic(plan.facts)
        if plan.seconds and each.bytes >= 10 * 2**20
    ]
    if parts:
        yield f"network    sent by each rank in a step: {', '.join(parts)}"


def state(plan: Plan) -> str:
    """The config's own step."""
    return _time(plan.seconds["step"]) if plan.fits else verdict(plan)


def suggestion_lines(state: str, suggestions: Sequence[Suggestion]) -> Iterator[str]:
    """For the terminal: ``state`` of the config as it is, then each layout with time, memory,
    reason and the TOML lines that make it."""
    yield f"as it is   {state}"
    for number, each in enumerate(suggestions, start=1):
        layout = each.layout.describe(each.plan.facts.engine.num_gpus)
        parts = [f"{name} {_time(seconds)}" for name, seconds in each.plan.seconds.items()]
        yield f"layout {number}   {layout}: at least {', '.join(parts)}"
        yield f"memory     {_totals(each.plan)}"
        yield f"reason     {each.reason}"
        yield from (f"           {line}" for line in toml_lines(each.changes))

    if not suggestions:
        yield "no division of these GPUs fits: use more or larger ones, or LoRA (trainer.lora.rank)"


def suggestion_table(suggestion: Suggestion) -> dict[str, Any]:
    """For JSON."""
    return {
        "layout": suggestion.layout.describe(suggestion.plan.facts.engine.num_gpus),
        "reason": suggestion.reason,
        "toml": "\n".join(toml_lines(suggestion.changes)),
        "plan": as_table(suggestion.plan),
    }


def _totals(plan: Plan) -> str:
    sides = (("trainer", plan.trainer), ("engine", plan.engine))
    return ", ".join(
        f"{name} {side.total / GIB:.1f} of {side.limit / GIB:.1f} GiB"
        for name, side in sides
        if side is not None
    )


def verdict(plan: Plan) -> str:
    """One line."""
    if plan.fits:
        return "fits"
    sides = (("trainer", plan.trainer), ("engine", plan.engine))
    short = [
        f"{name} needs {side.total / GIB:.1f} GiB, has {side.limit / GIB:.1f}"
        for name, side in sides
        if side is not None and not side.fits
    ]
    return f"does not fit: {'; '.join(short)}"


def as_table(plan: Plan) -> dict[str, Any]:
    """For JSON: bytes and seconds."""

    def side(found: Side | None) -> dict[str, Any] | None:
        if found is None:
            return None
        limit = found.limit if plan.machines.count else None
        return {"parts": found.parts, "total": found.total, "limit": limit, "fits": found.fits}

    return {
        "fits": plan.fits,
        "places": plan.places,
        "trainer": side(plan.trainer),
        "engine": side(plan.engine),
        "host": plan.host,
        "tokens": plan.tokens,
        "seconds": dict(plan.seconds),
        "update": plan.update,
        "traffic": [asdict(each) for each in traffic(plan.facts)],
        "weights": plan.measured["weights"],
        "layers_measured": plan.measured["layers"],
    }


def _side(name: str, whose: str, side: Side) -> Iterator[str]:
    limit = f" of {side.limit / GIB:.1f}" if side.limit < float("inf") else ""
    yield f"{name:<11}{side.total / GIB:.1f}{limit} GiB {whose}: {_parts(side.parts)}"


NAMES = {
    "gathered": "gathered weights",
    "rounded": "weights in bfloat16",
    "optimizer": "optimizer state",
    "reserve": "reserved for CUDA and fragmentation",
}


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{NAMES.get(n, n)} {size / GIB:.2f}" for n, size in kinds(parts))


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds / 60:.1f} min"
