"""``pytest --prime-rl NAME``: every conformance check of an algorithm or engine as a test.

    pytest --prime-rl my-algo
    pytest --prime-rl opd --prime-rl-set 'teacher.name="t"' --prime-rl-set 'teacher.base_url="..."'

NAME is an installed algorithm or engine, or a plugin or distribution that offers some. An engine is
started by its own command, on a tiny model, when its first test runs. Adds to what is collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GROUP = "prime-rl"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup(GROUP)
    group.addoption(
        "--prime-rl",
        action="append",
        default=[],
        metavar="NAME",
        help="run the conformance checks of an installed algorithm or engine (may be repeated)",
    )
    group.addoption(
        "--prime-rl-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of it; VALUE as in TOML (may be repeated)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each check of each named algorithm and engine."""
    for name in config.getoption("--prime-rl"):
        items.extend(_items(session, name, config.getoption("--prime-rl-set")))


def _items(session: pytest.Session, name: str, pairs: list[str]) -> Iterator[pytest.Item]:
    from prime_rl.errors import PrimeRLError
    from prime_rl_devkit.algorithms.suite import CHECKS
    from prime_rl_devkit.commands import read_settings

    try:
        settings = read_settings(pairs)
        subjects = subjects_named(name, settings)
        benches = engines_named(name, settings)
        if not subjects and not benches:
            raise _no_offer()
    except PrimeRLError as error:
        raise pytest.UsageError(f"--prime-rl {name}: {error}") from error

    yield from _engine_items(session, benches)
    for subject in subjects:
        for check in CHECKS:
            label = f"{GROUP}::{subject.cls.name}::{check}"
            item: ConformanceItem = ConformanceItem.from_parent(session, name=label)
            item.subject = subject
            item.check = check
            yield item


def subjects_named(name: str, settings: dict[str, Any]) -> list[Any]:
    """The algorithms of a name, with their settings. Raises ``ConfigError``."""
    from prime_rl.registry.offers import ALGORITHM, settings_of
    from prime_rl.testing.host import conformance_host
    from prime_rl.testing.scoring import conformance_group
    from prime_rl_devkit.algorithms.subject import Subject

    return [
        Subject(
            offered.cls,
            settings_of(offered.cls, ALGORITHM, settings=settings, where="--prime-rl-set"),
            make_group=conformance_group,
            make_host=conformance_host,
        )
        for offered in _offered(ALGORITHM, name)
    ]


def engines_named(name: str, settings: dict[str, Any]) -> list[Any]:
    """Engines by name that are not started yet. Raises ``ConfigError``."""
    from prime_rl.registry.offers import ENGINE
    from prime_rl_devkit.engines.bench import Bench

    return [Bench(offered.cls, settings, "--prime-rl-set") for offered in _offered(ENGINE, name)]


def _offered(kind: Any, name: str) -> list[Any]:
    """Classes of one kind with that name, else those that a plugin or distribution of that name
    offers."""
    from prime_rl.registry.manager import load_plugins
    from prime_rl.registry.offers import collect

    offers = collect(load_plugins(), kind)
    names = {name, name.replace("-", "_")}
    exact = [offered for offered in offers.values() if offered.cls.name in names]
    return exact or [
        offered
        for offered in offers.values()
        if names & {offered.source.plugin, offered.source.distribution}
    ]


def _no_offer() -> Exception:
    from prime_rl.errors import ConfigError
    from prime_rl.registry.manager import load_plugins
    from prime_rl.registry.offers import ALGORITHM, ENGINE, collect

    hooks = load_plugins()
    names = [*collect(hooks, ALGORITHM), *collect(hooks, ENGINE)]
    return ConfigError(f"no installed plugin offers that algorithm or engine (installed: {names})")


def _engine_items(session: pytest.Session, benches: list[Any]) -> Iterator[pytest.Item]:
    from prime_rl_devkit.engines.suite import CHECKS

    for bench in benches:
        session.config.add_cleanup(bench.close)
        for check in CHECKS:
            label = f"{GROUP}::{bench.engine.name}::{check}"
            item: EngineItem = EngineItem.from_parent(session, name=label)
            item.subject = bench
            item.check = check
            yield item


class ConformanceItem(pytest.Item):
    """One check of one algorithm."""

    subject: Any
    check: str

    def runtest(self) -> None:
        """Run the check. Fails or skips with its message."""
        outcome = self.outcome()
        if outcome.status == "skipped":
            pytest.skip(outcome.message)
        if outcome.status == "failed":
            raise AssertionError(f"{outcome.promise} {outcome.message}") from outcome.error

    def outcome(self) -> Any:
        """Run the check."""
        from prime_rl_devkit.algorithms.suite import run_check

        return run_check(self.subject, self.check)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message; for an error of the algorithm, its traceback."""
        error = excinfo.value
        if isinstance(error, AssertionError):
            cause = error.__cause__
            if cause is None or isinstance(cause, AssertionError):
                return str(error)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """The heading of a report."""
        return self.path, None, self.name


class EngineItem(ConformanceItem):
    """One check of one engine; its subject is a ``Bench``."""

    def outcome(self) -> Any:
        """Run the check on the server, which the first check starts."""
        from prime_rl_devkit.engines.suite import run_check

        return run_check(self.subject.subject, self.check)
