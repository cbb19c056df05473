"""The list of checks, and functions that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import httpx

from prime_rl.testing.conformance import Outcome, Report
from prime_rl_devkit.engines import broadcast, life, logprobs, routes, sampling, traffic, weights
from prime_rl_devkit.engines.subject import EngineSubject
from prime_rl_devkit.verdicts import Broken, run, run_all

Check: TypeAlias = Callable[[EngineSubject], str | None]
"""Raises ``Broken`` or ``NotApplicable``; may return a measurement as text."""

FIRST = ("alive", "reply_shape")
"""If one of these fails, no other check is run."""
LAST = "ends_on_sigterm"

CHECKS: Mapping[str, Check] = {
    "alive": routes.alive,
    "reply_shape": routes.reply_shape,
    "bad_requests": routes.bad_requests,
    "overlong_prompt": routes.overlong_prompt,
    "admin_key": routes.admin_key,
    "sampling_key": routes.sampling_key,
    "command_line": routes.command_line,
    "max_tokens": sampling.max_tokens,
    "stop_tokens": sampling.stop_tokens,
    "end_of_sequence": sampling.end_of_sequence,
    "min_tokens": sampling.min_tokens,
    "greedy": sampling.greedy,
    "seeds": sampling.seeds,
    "choices": sampling.choices,
    "nothing_ignored": sampling.nothing_ignored,
    "sampled_distribution": logprobs.sampled_distribution,
    "generated_logprobs": logprobs.generated_logprobs,
    "alternatives": logprobs.alternatives,
    "prompt_logprobs": logprobs.prompt_logprobs,
    "concurrency": traffic.concurrency,
    "abort": traffic.abort,
    "metrics": traffic.metrics,
    "chat": traffic.chat,
    "weight_update": weights.weight_update,
    "damaged_weights": weights.damaged_weights,
    "pause": weights.pause,
    "in_flight": weights.in_flight,
    "cache_salt": weights.cache_salt,
    "adapter": weights.adapter,
    "broadcast": broadcast.broadcast,
    "refused_broadcast": broadcast.refused_broadcast,
    "sleep": life.sleep,
    "sleeping_update": life.sleeping_update,
    LAST: life.ends_on_sigterm,
}
"""Every check by name, in the order they run."""


def conformance(engine: EngineSubject, name: str = "engine") -> Report:
    """Run every check. A fault of the engine raises nothing."""
    return Report("engine", name, run_all(CHECKS, partial(run_check, engine), first=FIRST))


def check_engine(engine: EngineSubject, name: str = "engine") -> Report:
    """The report. Raises ``AssertionError`` with every failed check."""
    report = conformance(engine, name)
    if not report.ok:
        raise AssertionError(str(report)) from report.failed[0].error
    return report


def run_check(engine: EngineSubject, name: str) -> Outcome:
    """Run one check, then load the first weights again."""
    outcome = _run(engine, name)
    try:
        if name != LAST:
            engine.restore()
    except (Broken, httpx.HTTPError) as error:
        if outcome.status != "failed":
            said = f"afterwards the engine cannot load its first weights again: {error}"
            return Outcome(name, outcome.promise, status="failed", message=said, error=error)

    return outcome


def _run(engine: EngineSubject, name: str) -> Outcome:
    def check() -> str | None:
        if not engine.model:
            engine.meet()
        return CHECKS[name](engine)

    def unexpected(error: Exception) -> str:
        if isinstance(error, httpx.HTTPError):
            ended = f" The server has {_fate(engine)}." if engine.process else ""
            return f"no answer: {type(error).__name__} {error}.{ended}"
        return f"the reply cannot be read: {type(error).__name__}: {error}"

    check.__doc__ = CHECKS[name].__doc__
    return run(check, name=name, unexpected=unexpected)


def _fate(engine: EngineSubject) -> str:
    code = engine.process.poll() if engine.process else None
    return "not ended" if code is None else f"ended with code {code}"


def hold(engine: EngineSubject, name: str) -> None:
    """One check as a pytest test: raises ``AssertionError``, skips with the reason, or passes."""
    import pytest

    outcome = run_check(engine, name)
    if outcome.status == "skipped":
        pytest.skip(outcome.message)
    if outcome.status == "failed":
        raise AssertionError(f"{outcome.promise} {outcome.message}") from outcome.error
