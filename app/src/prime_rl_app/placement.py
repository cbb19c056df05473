"""The tasks of a run, and the launch facts once the launcher has placed them.

config -> tasks -> (a launcher places them) -> Launch, which every process reads
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.config.run import FILES, RunConfig
from prime_rl.plugins.launchers import Part, Place, Task
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import process_name
from prime_rl_app.gpus import GpuPlan, num_ranks
from prime_rl_app.models import model_path
from prime_rl_app.resolve import Resolved

LOOPBACK = "127.0.0.1"
MODELS = ".models"
"""Folder of made or fetched models, in ``output_dir``, which other machines see too."""


@dataclass(frozen=True, kw_only=True)
class RunTasks:
    """The tasks of a run before they are placed."""

    tasks: tuple[Task, ...]
    num_ranks: int
    model_path: str
    initial_path: str
    to_make: bool
    """The folder ``initial_path`` does not exist yet."""
    engines: tuple[Task, ...] = ()
    """Tasks of the policy's engines; others serve earlier weights."""

    def of(self, part: Part) -> list[Task]:
        """The tasks of one part, in order."""
        return [task for task in self.tasks if task.part == part]


def lay_out(
    resolved: Resolved,
    checkpoint: Checkpoint | None = None,
    engines: Sequence[Task] | None = None,
) -> RunTasks:
    """The processes of a run and their resources. ``engines``: the policy's, where others than the
    config's have joined. Raises ``ConfigError``.

    A resumed run loads model and tokenizer from the checkpoint. If the checkpoint is an adapter,
    it loads the original base model. The original model is there too where something reads it.
    """
    config = resolved.config
    launcher = resolved.launcher
    earlier = resolved.earlier_weights
    cache = Path(config.output_dir).absolute() / MODELS if launcher.is_remote else None
    initial, to_make = model_path(config, resolved.hooks, cache)
    path = initial
    if checkpoint is not None and not checkpoint.is_adapter:
        path = str(checkpoint.weights)
        if not (earlier.are_read or earlier.engines):
            initial = path
            to_make = False

    gpus = resolved.gpus
    ranks = num_ranks(config, gpus)
    on_gpu = launcher.is_remote and launcher.num_gpus() > 0
    wire_ports = 0 if config.rollout_transport.type == FILES else ranks
    needed = resolved.engine.num_gpus if on_gpu else 0
    of_config = tuple(_engine_tasks(resolved.num_engines, gpus, needed))
    number = 0 if config.inference.base_url else config.inference.replicas
    policy = of_config[:number] if engines is None else tuple(engines)
    tasks = [
        *([Task("model", "model")] if to_make else []),
        *policy,
        *of_config[number:],
        *_trainer_tasks(
            config, gpus, ranks=ranks, on_gpu=on_gpu and config.trainer.device != "cpu"
        ),
        Task("orchestrator", "orchestrator", num_ports=wire_ports),
    ]
    return RunTasks(
        tasks=tuple(tasks),
        num_ranks=ranks,
        model_path=path,
        initial_path=initial,
        to_make=to_make,
        engines=policy,
    )


def _engine_tasks(num_engines: int, gpus: GpuPlan, num_gpus: int) -> Iterator[Task]:
    for number in range(num_engines):
        gpu_numbers = None if gpus.engines is None else gpus.engines[number]
        name = process_name("inference", number)
        yield Task(name, "inference", number, num_gpus=num_gpus, gpus=gpu_numbers, num_ports=1)


def _trainer_tasks(config: RunConfig, gpus: GpuPlan, ranks: int, on_gpu: bool) -> Iterator[Task]:
    """One task per node with an equal share of the ranks. The port of the first node is the
    process group's store."""
    nodes = config.deployment.trainer_nodes
    share = ranks // nodes
    for number in range(nodes):
        yield Task(
            process_name("trainer", number),
            "trainer",
            number,
            num_cpus=share,
            num_gpus=share if on_gpu else 0,
            gpus=gpus.trainer and gpus.trainer[number * share : (number + 1) * share],
            num_ports=1,
            apart=nodes > 1,
        )


def plan(
    resolved: Resolved,
    layout: RunTasks,
    places: Mapping[str, Place],
    checkpoint: Checkpoint | None = None,
    engines_kept: bool = False,
) -> Launch:
    """The launch facts of a layout whose tasks have places."""
    config = resolved.config
    inference = config.inference
    transport = config.rollout_transport
    earlier = resolved.earlier_weights.engines
    urls = {
        task.name: engine_url(config, task, places[task.name]) for task in layout.of("inference")
    }
    engine_urls = [urls.pop(task.name) for task in layout.engines]
    trainers = [places[task.name] for task in layout.of("trainer")]
    wire = places["orchestrator"]
    first = transport.port
    ports = wire.ports if first is None else range(first, first + len(wire.ports))
    return Launch(
        model_path=layout.model_path,
        wait_for_model=layout.to_make and layout.model_path == layout.initial_path,
        initial_path=layout.initial_path,
        reference_urls=dict(zip(earlier, urls.values(), strict=True)),
        served_model_name=config.model.name,
        engine_urls=list(inference.base_url or engine_urls),
        engine_names=[task.name for task in layout.engines],
        transport_type=transport.type,
        transport_host=wire.address or transport.host,
        transport_ports=[*ports],
        first_step=checkpoint.step + 1 if checkpoint else 1,
        num_ranks=layout.num_ranks,
        trainer_nodes=config.deployment.trainer_nodes,
        rendezvous=f"{_host(trainers[0].address or LOOPBACK)}:{trainers[0].ports[0]}",
        trainer_addresses=[each.address or LOOPBACK for each in trainers],
        engines_kept=engines_kept,
        resume_from=str(checkpoint.directory) if checkpoint else None,
    )


def engine_url(config: RunConfig, task: Task, place: Place) -> str:
    """Where an engine of the run listens, without ``/v1``."""
    host = _host(place.address or config.inference.host)
    first = config.inference.port
    return f"http://{host}:{place.ports[0] if first is None else first + task.number}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
