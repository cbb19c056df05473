"""Every held-out rollout on disk: ``<run>/eval_rollouts/step_V/ENV.msgpack``, for version V."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prime_rl import Rollout
from prime_rl.env.traces import build_rollout
from prime_rl.orchestrator.records import encode_rollouts
from prime_rl_evals.figures import EvalEnv, Finished, Job

log = logging.getLogger(__name__)


def save_rollouts(
    run_dir: Path, env: EvalEnv, version: int, finished: Mapping[Job, Finished]
) -> None:
    """Save what one env answered at one version: as training's rollouts, with the example as the
    group and the kind of failure as the reason of a drop. A full disk does not end the run."""
    path = run_dir / "eval_rollouts" / f"step_{version}" / f"{env.name}.msgpack"
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(encode_rollouts(version, _rollouts(version, finished.items())))
        temporary.replace(path)
    except OSError as error:
        log.error("the rollouts of the evaluation at %d are not kept: %s", version, error)
        temporary.unlink(missing_ok=True)


def _rollouts(
    version: int, finished: Iterable[tuple[Job, Finished]]
) -> Iterator[tuple[Rollout, str | None]]:
    """The policy's rollouts; one that failed has reward 0."""
    for job, each in finished:
        temperature = job.env.sampling.temperature
        for result in each.episode:
            if not result.trainable:
                continue
            rollout = build_rollout(
                result,
                env=job.env.name,
                example_id=job.example,
                group_id=job.example,
                policy_version=version,
                temperature=1.0 if temperature is None else temperature,
            )
            rollout.episode_id = job.member
            rollout.task = result.task_fields
            if not result.ok:
                rollout.reward = 0.0
                rollout.info = {**rollout.info, "error": result.error or ""}
            yield rollout, None if result.ok else result.error_type or "failed"
