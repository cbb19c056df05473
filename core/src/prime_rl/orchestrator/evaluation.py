"""Evaluations as an observer of the loop: before training, at intervals, after training.

``evals.jsonl`` holds every result, one per line. A run that resumes from a checkpoint reads there
what was measured before its first step, so that its summary compares with the same model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from prime_rl.orchestrator.context import Engines, RunContext
from prime_rl.orchestrator.engines import EngineRouter
from prime_rl.orchestrator.evals import EvalEnv, EvalResult
from prime_rl.orchestrator.evaluator import Evaluator, Schedule
from prime_rl.orchestrator.observers import Observer
from prime_rl.orchestrator.reporter import Reporter

log = logging.getLogger(__name__)

BEFORE, DURING, AFTER = "before", "during", "after"

FILE = "evals.jsonl"


class Evaluation(Observer):
    """Evaluates what is due, and keeps the results."""

    def __init__(
        self,
        run: RunContext,
        engines: Engines,
        envs: Sequence[EvalEnv],
        router: EngineRouter,
        reporter: Reporter,
        slots: Callable[[], int],
    ) -> None:
        """``slots()``: evaluation rollouts that may be in flight now."""
        self.context, self.engines, self.reporter = run, engines, reporter
        self.results = read_results(run.run_dir)
        """By when they were measured; by earlier attempts at this run, too."""
        self._began_with = run.launch.began_with(run.run_dir)
        self._phase = ""
        config = run.config
        hold = config.orchestrator.eval.max_hold_seconds
        self.evaluator = Evaluator(
            envs,
            router,
            Schedule(engines.policy.version, config.max_steps, config.seed, hold),
            slots=slots,
            on_result=self._add,
            on_progress=self._report,
        )

    async def run(self) -> None:
        """Evaluate what falls due between steps, until cancelled."""
        await self.evaluator.run()

    async def before_training(self) -> None:
        """Evaluate the first weights, where no earlier attempt has."""
        if unmeasured := self._unmeasured():
            await self._evaluate(BEFORE, unmeasured)
        self.evaluator.make_up(self._last_measured())
        self._report()

    async def after_training(self) -> None:
        """Evaluate the last weights."""
        await self._evaluate(AFTER, self.evaluator.envs)

    async def version_pending(self, version: int) -> None:
        """Let an evaluation of the present version end before the engines load the next."""
        await self.evaluator.hold()

    def version_served(self, version: int) -> None:
        """Start the evaluations that are due at ``version``."""
        self.evaluator.on_version(version)
        self._report()

    def _unmeasured(self) -> list[EvalEnv]:
        """What is evaluated before training. A run that resumes its own checkpoint has measured its
        first weights; a run that starts from another run's checkpoint measures those."""
        version = self.context.launch.first_step - 1
        if self.context.config.orchestrator.eval.skip_first_step or version != self._began_with:
            return []
        measured = {result.env for result in self.results[BEFORE]}
        return [env for env in self.evaluator.envs if env.name not in measured]

    def _last_measured(self) -> dict[str, int]:
        """The version that each env was last evaluated at; else the one that the run began with."""
        last = {env.name: self._began_with for env in self.evaluator.envs}
        for result in (*self.results[BEFORE], *self.results[DURING]):
            last[result.env] = max(result.policy_version, last.get(result.env, 0))
        return last

    async def _evaluate(self, when: str, envs: Sequence[EvalEnv]) -> None:
        """Evaluate while nothing is trained."""
        self._phase = when
        try:
            await self.evaluator.evaluate(envs, self.engines.policy.version)
        finally:
            self._phase = ""
            self._report()

    def _add(self, result: EvalResult) -> None:
        when = self._phase or DURING
        at = f"{when} training" if self._phase else f"at version {result.policy_version}"
        log.info("eval %s %s: reward %.4f", result.env, at, result.reward)
        self.reporter.log(result.policy_version, result.as_metrics())
        self.results[when].append(result)
        append_result(self.context.run_dir, when, result)
        self._report()

    def _report(self) -> None:
        """Say how much is done: in the status while nothing is trained, else for the sampling."""
        evaluator = self.evaluator
        running = evaluator.is_running or bool(self._phase)
        self.engines.policy.evaluated = evaluator.share if running else None
        if self._phase:
            text = f"evaluating {self._phase} training"
            self.context.status.report(text, progress=evaluator.share)


def append_result(run_dir: Path, when: str, result: EvalResult) -> None:
    """Add a line to ``evals.jsonl``. A disk that refuses costs the line, not the run."""
    line = {"step": result.policy_version, "when": when, **result.as_dict()}
    try:
        with (run_dir / FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        log.error("cannot write to %s: %s", run_dir / FILE, error)


def read_results(run_dir: Path) -> dict[str, list[EvalResult]]:
    """What earlier attempts measured. What one measured after its training lies within the training
    of a run that goes on."""
    found: dict[str, list[EvalResult]] = {BEFORE: [], DURING: [], AFTER: []}
    path, names = run_dir / FILE, [each.name for each in fields(EvalResult)]
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        result = EvalResult(**{name: row[name] for name in names})
        found[BEFORE if row["when"] == BEFORE else DURING].append(result)
    return found
