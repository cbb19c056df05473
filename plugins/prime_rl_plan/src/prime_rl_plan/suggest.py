"""How to divide the GPUs between engines and trainer: ``prime-rl plan CONFIG --suggest``.

Candidates: engines and trainer take turns on all GPUs of a machine, or each number of GPUs trains
and engines have the others. Step and memory of each are foreseen from the plan of the config as it
is, and the fastest are planned in full, until three fit. What does not fit gets, in this order,
recomputed activations, expert parallelism, moments on the host, and rows over several ranks. Where
the network limits the trainer, there are copies of the model, or tokens travel to experts, within a
machine or a copy, if that is faster. Nothing else of a config changes: neither its batch nor its
lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prime_rl import ConfigError
from prime_rl.config.run import FILES
from prime_rl_plan.advice import Change, trainer_fits
from prime_rl_plan.architecture import num_experts
from prime_rl_plan.devices import GIB, ON_HOST, Machines
from prime_rl_plan.estimate import Plan, PlanFacts, engine_side, num_rows, times

NUM = 3
"""Layouts that are shown."""
CLOSE = 1.02
"""A step that takes less than this times another is as long: the first that was found comes first.
"""

HOPELESS = 1.1
"""Times its limit. A trainer whose foreseen memory is larger is not planned: that takes a minute.
"""
OFFLOADED = "trainer.optim.type", '"adamw_offload"'
EXPERTS = "trainer.expert_parallel"
ROWS = "trainer.context_parallel"
STATE = ("weights", "gradients", "optimizer")
"""Kinds of memory that ranks share."""

SEVERAL_MACHINES: tuple[Change, ...] = (
    ("launcher.type", '"ray"'),
    ("rollout_transport.host", '"0.0.0.0"'),
)
"""For a config whose launcher uses one machine only. The trainer of another machine reaches the
orchestrator's."""

Again = Callable[[Sequence[Change]], Plan]
"""Plans the config with changes. Raises ``ConfigError`` if a run would refuse them."""


@dataclass(frozen=True)
class Layout:
    """A division of the GPUs."""

    ranks: int
    """GPUs that train."""
    replicas: int
    """Engines."""
    nodes: int
    """Machines that train."""
    colocated: bool

    @property
    def division(self) -> tuple[int, int, bool]:
        """How many GPUs do what, wherever they are."""
        return self.ranks, self.replicas, self.colocated

    def changes(self, plan: Plan) -> Iterator[Change]:
        """The keys that make a config this layout."""
        config = plan.config
        if self.colocated or config.deployment.colocated:
            yield "deployment.colocated", str(self.colocated).lower()
        if self.nodes > 1 or config.deployment.trainer_nodes > 1:
            yield "deployment.trainer_nodes", str(self.nodes)
        yield "inference.replicas", str(self.replicas)
        yield "trainer.num_ranks", str(self.ranks)
        transport = config.weight_broadcast.type
        shares = self.ranks == 1 and transport == "ipc"
        if (self.colocated and not shares and not config.weight_broadcast.as_files) or (
            not self.colocated and transport == "ipc"
        ):
            yield "weight_broadcast.type", f'"{FILES}"'

    def describe(self, num_gpus: int) -> str:
        """In words. ``num_gpus``: of an engine."""
        if self.colocated:
            return f"{_gpus(self.ranks)} in turns"
        return f"{_gpus(self.replicas * num_gpus)} sample, {self.ranks} train"


@dataclass(frozen=True)
class Suggestion:
    """A layout with its plan."""

    layout: Layout
    changes: tuple[Change, ...]
    plan: Plan
    reason: str

    @property
    def seconds(self) -> float:
        return self.plan.seconds["step"]


def first_divisions(machines: Machines) -> Iterator[list[Change]]:
    """Where to start from if the config's own division is not possible: each other layout is
    foreseen from one."""
    if machines.nodes > 1:
        yield [*_first(machines.count), ("deployment.trainer_nodes", "1")]
        return
    files = "weight_broadcast.type", f'"{FILES}"'
    for division in (_first(machines.count, is_shared=True), _first(max(machines.count - 1, 1))):
        yield division
        yield [*division, files]


def _first(ranks: int, is_shared: bool = False) -> list[Change]:
    return [
        ("deployment.colocated", str(is_shared).lower()),
        ("inference.replicas", "1"),
        ("trainer.num_ranks", str(ranks)),
    ]


def suggest(plan: Plan, again: Again, shared: Sequence[Change] = ()) -> list[Suggestion]:
    """The fastest layouts that fit, at most ``NUM``; none if nothing fits. ``plan``: of the config
    as it is, or of another division of it. ``shared``: what ``again`` changes before. Raises
    ``ConfigError`` if there is nothing to divide."""
    check(plan)
    suggestions: list[Suggestion] = []
    divided = set()
    for layout in sorted(layouts(plan), key=lambda each: foreseen(plan, each)):
        worst = sorted(each.seconds for each in suggestions)[NUM - 1 : NUM]
        if worst and foreseen(plan, layout) > worst[0]:
            break
        if layout.division in divided:  # the same on other machines, which is slower
            continue
        suggestion = fitted(plan, layout, again)
        if suggestion is not None:
            changes = dict(shared) | dict(suggestion.changes)
            suggestions.append(replace(suggestion, changes=tuple(changes.items())))
            divided.add(layout.division)

    return sorted(suggestions, key=lambda each: each.seconds)[:NUM]


def check(plan: Plan) -> None:
    """Raises ``ConfigError`` where engines and trainer share no GPUs of this run."""
    config = plan.config
    problem = ""
    if not plan.machines.count:
        problem = "there is no GPU. Name machines: --gpus 8xH100-80"
    elif config.inference.base_url is not None or not config.inference.replicas:
        problem = "this run starts no engine. Leave inference.base_url out, or raise replicas"
    elif config.deployment.inference_gpus or config.deployment.trainer_gpus:
        problem = "deployment.inference_gpus or trainer_gpus divides them already. Leave both out"
    elif config.trainer.device == "cpu":
        problem = 'trainer.device is "cpu". Leave it out'
    if problem:
        raise ConfigError(f"--suggest divides GPUs between engines and trainer, and {problem}.")


def layouts(plan: Plan) -> Iterator[Layout]:
    """All, without GPUs that an engine could have and does not."""
    machines = plan.machines
    size = plan.facts.engine.num_gpus
    most = plan.config.orchestrator.expected_rollouts
    """Ranks beyond that have no sample."""
    if machines.nodes == 1 and "sleep" not in plan.facts.engine.lacks:
        ranks = min(machines.count, most)
        if machines.count >= size:
            yield Layout(ranks, machines.count // size, nodes=1, colocated=True)

    for nodes in range(1, machines.nodes + 1):
        for share in range(1, machines.count + 1):
            left = [machines.count - share] * nodes + [machines.count] * (machines.nodes - nodes)
            engines = sum(each // size for each in left)
            fewer = sum((each - 1) // size for each in left[:nodes]) + sum(
                each // size for each in left[nodes:]
            )
            is_full = engines > fewer or share == machines.count
            if engines and is_full and share * nodes <= most:
                yield Layout(share * nodes, engines, nodes=nodes, colocated=False)


def foreseen(plan: Plan, layout: Layout) -> float:
    """Seconds of a step, from what the operations of ``plan`` cost: nearly those of the layout's
    own plan, since a row costs the same on any number of ranks."""
    config = plan.config
    inference = config.inference.model_copy(update={"replicas": layout.replicas})
    deployment = config.deployment.model_copy(
        update={"colocated": layout.colocated, "trainer_nodes": layout.nodes}
    )
    changed = config.model_copy(update={"inference": inference, "deployment": deployment})
    facts: PlanFacts = replace(
        plan.facts,
        config=changed,
        ranks=layout.ranks,
        rows=num_rows(changed, layout.ranks),
    )
    _, concurrency = engine_side(facts)
    # Without room for one sample the plan in full says that it does not fit.
    return times(facts, max(concurrency, 1))["step"]


def fitted(plan: Plan, layout: Layout, again: Again) -> Suggestion | None:
    """The layout with the first remedies after which its trainer fits, and copies of the model
    where these are faster; None if it does not fit or a run would refuse it."""
    changes = dict(layout.changes(plan))
    planned = None
    for remedy in (None, *remedies(plan, layout)):
        if remedy is not None:
            changes |= [remedy]
        if is_hopeless(plan, layout, changes):
            continue
        try:
            planned = again([*changes.items()])
        except ConfigError:  # it does not go with the rest of the config
            return None
        if trainer_fits(planned):
            break

    if planned is None or not planned.fits:
        return None
    planned, changes = without_offload(planned, changes, again)
    planned, changes = faster_network(planned, changes, again)
    return Suggestion(layout, tuple(changes.items()), planned, reason(planned, layout))


def without_offload(
    planned: Plan, changes: dict[str, str], again: Again
) -> tuple[Plan, dict[str, str]]:
    """With moments on the GPU, if these fit after a later remedy."""
    moments = planned.measured["peaks"]["update"].get(ON_HOST, 0)
    if OFFLOADED[0] not in changes or planned.trainer.total + moments > planned.trainer.limit:
        return planned, changes
    fewer = {key: value for key, value in changes.items() if key != OFFLOADED[0]}
    simpler = again([*fewer.items()])
    return (simpler, fewer) if simpler.fits else (planned, changes)


def faster_network(
    planned: Plan, changes: dict[str, str], again: Again
) -> tuple[Plan, dict[str, str]]:
    """With copies of the model or groups of ranks for experts, where the network limits the trainer
    and these are faster."""
    trials = [("trainer.dp_replicate", str(copies)) for copies in divisors(planned.ranks)]
    trials += expert_groups(planned, planned.ranks, planned.config.deployment.trainer_nodes)

    tried_copies = True
    for trial in trials:
        if planned.seconds.get("network", 0.0) <= planned.facts.computing_seconds:
            break
        if trial[0] != EXPERTS and not tried_copies:
            continue
        more = changes | dict([trial])
        try:
            changed = again([*more.items()])
        except ConfigError:
            continue
        if changed.fits and changed.seconds["step"] * CLOSE <= planned.seconds["step"]:
            planned = changed
            changes = more
        else:
            tried_copies = False  # with more copies it needs more memory, or gains less

    return planned, changes


def is_hopeless(plan: Plan, layout: Layout, changes: Mapping[str, str]) -> bool:
    """Whether a rank would have far too little memory, if all but its share of the state stays as
    in ``plan``."""
    parts = plan.trainer.parts
    kept = [kind for kind in STATE if kind != "optimizer" or OFFLOADED[0] not in changes]
    grows = plan.ranks / layout.ranks
    state = sum(parts.get(kind, 0.0) for kind in STATE)
    needed = plan.trainer.total - state + grows * sum(parts.get(kind, 0.0) for kind in kept)
    if "trainer.activation_checkpointing" in changes:
        needed -= parts.get("activations", 0.0)
    elif ROWS in changes:
        of_row = parts.get("activations", 0.0) + parts.get("logits", 0.0)
        needed -= of_row * (1 - 1 / int(changes[ROWS]))
    if EXPERTS in changes:
        needed -= parts.get("gathered", 0.0) + parts.get("rounded", 0.0)
    return needed > HOPELESS * plan.trainer.limit


def remedies(plan: Plan, layout: Layout) -> Iterator[Change]:
    """What makes the trainer of a layout smaller, cheapest first; they add up."""
    trainer = plan.config.trainer
    ranks = layout.ranks
    if not trainer.activation_checkpointing:
        yield "trainer.activation_checkpointing", "1"
    yield from expert_groups(plan, ranks, layout.nodes)[:1]
    if trainer.optim.type == "adamw":
        yield OFFLOADED
    heads = int(plan.facts.table["num_attention_heads"])
    for parts in (2, 4, 8):
        if parts > trainer.context_parallel and ranks % parts == 0 and heads % parts == 0:
            yield ROWS, str(parts)


def expert_groups(plan: Plan, ranks: int, nodes: int) -> list[Change]:
    """Groups of ranks within which tokens could travel to experts, if they do not yet: those of a
    machine, if a copy of the model is on several; and those of a copy."""
    trainer = plan.config.trainer
    experts = num_experts(plan.facts.table)
    holders = ranks // trainer.dp_replicate
    if trainer.sends_tokens or trainer.compile is True:
        return []
    if not experts or holders == 1 or experts % holders:
        return []

    of_copy = [(EXPERTS, "true")]
    on_machine = ranks // nodes
    if on_machine == 1 or holders <= on_machine or holders % on_machine:
        return of_copy
    return [(EXPERTS, str(on_machine)), *of_copy]


def divisors(number: int) -> Iterator[int]:
    """From 2 up to the number itself."""
    return (each for each in range(2, number + 1) if number % each == 0)


def reason(plan: Plan, layout: Layout) -> str:
    """What the layout's step is bound by."""
    train = plan.seconds["train"]
    sample = plan.seconds["sample"]
    if layout.colocated:
        parts = [
            f"{name} {plan.seconds[key] / plan.seconds['step']:.0%}"
            for name, key in (("sampling", "sample"), ("training", "train"), ("moving", "move"))
        ]
        text = f"no GPU waits for another: {', '.join(parts)} of the step"
    elif plan.config.orchestrator.max_off_policy_steps == 0:
        text = "max_off_policy_steps is 0: each side waits while the other works"
    elif sample > train:
        text = f"bound by sampling; the trainer works {train / sample:.0%} of the time"
    else:
        text = f"bound by training; the engines work {sample / train:.0%} of the time"

    moments = plan.measured["peaks"]["update"].get(ON_HOST, 0)
    if moments:
        text += f"; {moments / GIB:.1f} GiB of moments of each rank lie on the host"
    copies = plan.config.trainer.dp_replicate
    if copies > 1:
        text += f"; {copies} copies of the model: less to gather"
    if plan.config.trainer.sends_tokens:
        text += "; tokens travel to experts: balanced experts are assumed"
    in_a_row = plan.config.trainer.context_parallel
    if in_a_row > 1:
        text += f"; {in_a_row} ranks compute a row"
    return text


def toml_lines(changes: Sequence[Change]) -> Iterator[str]:
    """The changes as tables of TOML."""
    tables: dict[str, list[str]] = {}
    for key, value in changes:
        table, _, name = key.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {value}")
    for table, lines in sorted(tables.items()):
        yield f"[{table}]"
        yield from lines


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number > 1)}"
