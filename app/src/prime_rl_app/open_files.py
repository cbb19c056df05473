"""A machine that allows few open files: fewer rollouts in flight, and a notice, instead of rollouts
that fail with EMFILE."""

from __future__ import annotations

import resource

from prime_rl.config.run import RunConfig

PER_ROLLOUT = 4
"""Descriptors of a rollout whose harness speaks HTTP: both ends of its connection to verifiers, the
connection to the engine, and one to spare."""
OTHERS = 128
"""Files that a process opens without any rollout: modules, logs, sockets."""


def fit(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config with ``orchestrator.max_inflight_rollouts`` lowered to what ``ulimit -Hn`` allows,
    unless it is set, and a notice. For places on other machines nothing is known here."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    orchestrator = config.orchestrator
    room = max(1, (hard - OTHERS) // PER_ROLLOUT)
    wanted = orchestrator.most_inflight
    if hard == resource.RLIM_INFINITY or wanted <= room or config.launcher.type != "local":
        return config, []
    why = f"ulimit -Hn is {hard}, and {wanted} rollouts in flight may need {PER_ROLLOUT} files each"
    raise_it = "Raise the hard limit (LimitNOFILE=, /etc/security/limits.conf)"
    if orchestrator.max_inflight_rollouts is not None:
        return config, [f"orchestrator.max_inflight_rollouts: {why}. {raise_it}, or lower the key"]
    fewer = orchestrator.model_copy(update={"max_inflight_rollouts": room})
    notice = f"orchestrator.max_inflight_rollouts = {room}: {why}. {raise_it} for more at once"
    return config.model_copy(update={"orchestrator": fewer}), [notice]
