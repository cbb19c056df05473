"""The GPUs of this machine, where a config says nothing about them.

one        engine and trainer take turns on it (``deployment.colocated``)
several    the trainer gets ``trainer.num_ranks``, or one; replicas of the engine the others

And weights are published in bfloat16 where the engine serves in it (``trainer.publish_dtype``).
They go through the memory of the GPU that engine and trainer share (``weight_broadcast.type``).
"""

from __future__ import annotations

from contextlib import suppress

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.registry.offers import WEIGHT_TRANSPORT, collect, make_transport
from prime_rl_app.gpus import NOTHING, GpuPlan, gpus_of
from prime_rl_app.resolve import Resolved
from prime_rl_plan.architecture import architecture

IPC = "ipc"
KEYS = {"colocated", "inference_gpus", "trainer_gpus"}
"""Keys of ``[deployment]``. A config with one of them divides the GPUs itself."""


def fit(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config with a use for each GPU of this machine, and a notice for each key that was set
    and for GPUs that stay idle."""
    resolved = Resolved(config)
    try:
        launcher = resolved.launcher
        engine = resolved.engine
        config, notices = with_publish_dtype(resolved)
        if launcher.is_remote or not launcher.num_gpus():
            return config, notices
        config, more = with_gpus(config, resolved)
        gpus = gpus_of(config, launcher, resolved.earlier_weights.engines)
        config, transport = with_transport(config, gpus, resolved)
    except ConfigError:  # ``resolve.check`` reports it, with everything else that is wrong
        return config, []

    return config, [*notices, *more, *transport, *idle(gpus, launcher.num_gpus(), engine.num_gpus)]


def with_publish_dtype(resolved: Resolved) -> tuple[RunConfig, list[str]]:
    """The config with ``trainer.publish_dtype`` of the engine, and a notice of that, if it leaves
    the key open. An engine without a dtype of its own serves in that of the model's folder.
    Adapters are not rounded."""
    config = resolved.config
    trainer = config.trainer
    open_here = "publish_dtype" not in trainer.model_fields_set and not config.inference.base_url
    if not open_here or resolved.tuning is not None:
        return config, []
    served = resolved.engine.dtype
    if served is None:
        with suppress(ConfigError):  # a model that this machine does not know yet
            table = architecture(config)
            served = table.get("dtype") or table.get("torch_dtype")

    if served != "bfloat16":
        return config, []
    rounded = trainer.model_copy(update={"publish_dtype": "bfloat16"})
    notice = "trainer.publish_dtype = 'bfloat16': the engine serves in it"
    return config.model_copy(update={"trainer": rounded}), [notice]


def with_gpus(config: RunConfig, resolved: Resolved) -> tuple[RunConfig, list[str]]:
    """The config with ``deployment.colocated`` or ``inference.replicas`` set, if it leaves them
    open, and a notice of that. Engines of earlier weights are counted."""
    inference = config.inference
    decided = config.deployment.model_fields_set & KEYS or inference.base_url is not None
    if decided or config.trainer.device == "cpu":
        return config, []
    engine = resolved.engine
    num_gpus = resolved.launcher.num_gpus()
    earlier = len(resolved.earlier_weights.engines)
    transport = make_transport(config.weight_broadcast, resolved.hooks)
    sends = transport is None or transport.shares_gpus
    # Engines that take turns are those of the policy only.
    can_share = "sleep" not in engine.lacks and not earlier and sends
    if num_gpus == 1 and can_share:
        shared = config.deployment.model_copy(update={"colocated": True})
        why = "engine and trainer take turns on the only GPU"
        notice = f"deployment.colocated = true: {why}"
        return config.model_copy(update={"deployment": shared}), [notice]

    if num_gpus > 1 and "replicas" not in inference.model_fields_set:
        left = num_gpus - (config.trainer.num_ranks or 1)
        replicas = max(left // engine.num_gpus - earlier, 1)
        if replicas > 1:
            more = inference.model_copy(update={"replicas": replicas})
            notice = f"inference.replicas = {replicas}: engines on the GPUs that do not train"
            return config.model_copy(update={"inference": more}), [notice]

    return config, []


def with_transport(
    config: RunConfig, gpus: GpuPlan, resolved: Resolved
) -> tuple[RunConfig, list[str]]:
    """The config with ``weight_broadcast.type = "ipc"``, and a notice of that, if engine and
    trainer share one GPU and the config leaves the key open. Adapters go as files."""
    table = config.weight_broadcast
    one = gpus.trainer is not None and len(gpus.trainer) == 1 and gpus.engines == (gpus.trainer,)
    decided = "type" in table.model_fields_set
    offered = collect(resolved.trainer_hooks, WEIGHT_TRANSPORT)
    can = IPC in resolved.engine.receives and IPC in offered
    adapts = resolved.tuning is not None
    if decided or adapts or not (one and can and config.deployment.colocated):
        return config, []
    shared = table.model_copy(update={"type": IPC})
    notice = f"weight_broadcast.type = {IPC!r}: engine and trainer share one GPU"
    return config.model_copy(update={"weight_broadcast": shared}), [notice]


def idle(gpus: GpuPlan, num_gpus: int, needed: int) -> list[str]:
    """A warning if GPUs of this machine get no work. An engine uses ``needed``."""
    used = {n for share in gpus.engines or () for n in share[:needed]}.union(gpus.trainer or ())
    left = [str(number) for number in range(num_gpus) if number not in used]
    advice = "Raise inference.replicas, the engine's tensor parallelism or trainer.num_ranks"
    return [f"idle: GPU {', '.join(left)}. {advice}."] if left and gpus != NOTHING else []
