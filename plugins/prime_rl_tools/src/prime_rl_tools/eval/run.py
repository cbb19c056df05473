"""``prime-rl eval``: environments against any OpenAI-compatible endpoint, without a run.

    request -> environments -> every rollout of every example, max_concurrency at once
            -> one line on disk per rollout -> figures per env

The figures are those of a run's own evaluations (``prime_rl_evals``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from prime_rl.config.orchestrator import EvalEnvConfig
from prime_rl.env.environment import Environment, ExampleFailed
from prime_rl.env.episode import EnvSettings
from prime_rl.env.traces import failed
from prime_rl_evals.figures import EvalEnv, Finished, Job, jobs_of, of_the_policy, summarize
from prime_rl_tools.eval.files import EvalFiles, Place
from prime_rl_tools.eval.request import EvalRequest


class EvalProgress(Protocol):
    """Receives the progress of an evaluation."""

    def start(self, env: str, total: int, finished: Sequence[Finished]) -> None:
        """An env begins; ``finished`` comes from an earlier attempt."""

    def done(self, env: str, finished: Finished) -> None:
        """A rollout has ended."""


@dataclass
class EnvFigures:
    """The result of one env."""

    env: str
    num_rollouts: int
    num_failed: int
    figures: dict[str, float]
    """By name: ``avg@4``, ``all/reward/mean``, ``all/num_output_tokens/p90`` ..."""
    errors: dict[str, int] = field(default_factory=dict)
    """Failures by kind, the most frequent first."""
    examples: dict[str, str] = field(default_factory=dict)
    """One message of each kind."""

    @property
    def all_failed(self) -> bool:
        return self.num_failed == self.num_rollouts


def evaluate(request: EvalRequest, progress: EvalProgress) -> list[EnvFigures]:
    """Sample every rollout and save it. Returns the figures of each env.

    Raises ``ConfigError`` if an environment cannot be made, or if the folder holds another
    evaluation.
    """
    files = EvalFiles(request)
    envs = [_env(request, env) for env in request.evaluation.env]
    finished = asyncio.run(_sample(request, envs, files=files, progress=progress))
    results = [_figures(env, finished[env.name]) for env in envs]
    files.write_summary(
        {
            "model": request.endpoint.name,
            "base_url": request.endpoint.base_url,
            "envs": {each.env: as_record(each) for each in results},
        }
    )
    return results


def as_record(result: EnvFigures) -> dict[str, Any]:
    """For ``--json`` and ``summary.json``."""
    return {
        "num_rollouts": result.num_rollouts,
        "num_failed": result.num_failed,
        "errors": result.errors,
        **result.figures,
    }


def _env(request: EvalRequest, env: EvalEnvConfig) -> EvalEnv:
    renderer = request.renderer
    settings = EnvSettings.of(
        env,
        default_harness=request.evaluation.harness,
        renderer=renderer.config if renderer else None,
        tokenizer_path=renderer.tokenizer_path if renderer else None,
    )
    return EvalEnv.of(env, request.evaluation, Environment(settings))


async def _sample(
    request: EvalRequest, envs: Sequence[EvalEnv], files: EvalFiles, progress: EvalProgress
) -> dict[str, dict[Place, Finished]]:
    """Sample what is missing, alternating between envs. Returns all rollouts by env and place."""
    finished = {env.name: files.read(env.name) if request.settings.resume else {} for env in envs}
    jobs = [job for job in jobs_of(envs) if (job.example, job.member) not in finished[job.env.name]]
    for env in envs:
        known = {p: f for p, f in finished[env.name].items() if _is_of(env, p)}
        finished[env.name] = known
        progress.start(env.name, env.num_rollouts, list(known.values()))

    todo = iter(jobs)

    async def work() -> None:
        for job in todo:
            place, result = await _one(request, job, files)
            finished[job.env.name][place] = result
            progress.done(job.env.name, result)

    async with AsyncExitStack() as stack:
        for env in envs:
            await stack.enter_async_context(env.environment)
        await _all(work() for _ in range(min(request.settings.max_concurrency, len(jobs))))

    return finished


async def _all(workers: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first error cancels the others."""
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_of(env: EvalEnv, place: Place) -> bool:
    return place[0] * env.group_size + place[1] < env.num_rollouts and place[1] < env.group_size


async def _one(request: EvalRequest, job: Job, files: EvalFiles) -> tuple[Place, Finished]:
    seed = request.settings.seed
    number = job.example * job.env.group_size + job.member
    environment = job.env.environment
    try:
        results = await environment.run(
            environment.examples[job.example],
            model=request.endpoint,
            sampling=job.env.sampling,
            group_id=job.example,
            seed=None if seed is None else seed + number,
        )
    except ExampleFailed as error:
        results = [failed(type(error).__name__, str(error))]

    of_policy = of_the_policy(results)
    place = (job.example, job.member)
    files.append(job.env.name, place, of_policy, results)
    return place, Finished(job.example, of_policy)


def _figures(env: EvalEnv, finished: dict[Place, Finished]) -> EnvFigures:
    ordered = [finished[place] for place in sorted(finished)]
    result = summarize(env, 0, ordered)
    failures = [each.result for each in ordered if not each.result.ok]
    kinds = Counter(_kind(each.error_type, each.status_code) for each in failures)
    return EnvFigures(
        env=env.name,
        num_rollouts=result.num_rollouts,
        num_failed=result.num_failed,
        figures=dict(_own_names(result.as_metrics(), f"eval/{env.name}/")),
        errors=dict(kinds.most_common()),
        examples={_kind(r.error_type, r.status_code): r.error or "" for r in reversed(failures)},
    )


def _kind(error_type: str | None, status: int | None) -> str:
    return f"{error_type} {status}" if status else str(error_type)


def _own_names(metrics: dict[str, float], prefix: str) -> Iterator[tuple[str, float]]:
    """Leave out what only a run's policy has, and what is a field of ``EnvFigures``."""
    for name, value in metrics.items():
        short = name.removeprefix(prefix)
        if short not in ("policy_version", "num_policy_versions", "cancelled", "num_failed"):
            yield short, value
