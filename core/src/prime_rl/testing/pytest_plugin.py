"""``pytest --prime-rl NAME``: every conformance check of an installed algorithm as a test.

    pytest --prime-rl my-algo
    pytest --prime-rl opd --prime-rl-set 'teacher.name="t"' --prime-rl-set 'teacher.base_url="..."'

NAME is an algorithm, or a plugin or distribution that offers some. Adds to what is collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GROUP = "prime-rl"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    group = parser.getgroup(GROUP)
    group.addoption(
        "--prime-rl",
        action="append",
        default=[],
        metavar="NAME",
        help="hold an installed algorithm to the contract (may be repeated)",
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
    """Add a test for each check of each algorithm that is named."""
    for name in config.getoption("--prime-rl"):
        items.extend(_items(session, name, config.getoption("--prime-rl-set")))


def _items(session: pytest.Session, name: str, pairs: list[str]) -> Iterator[pytest.Item]:
    from prime_rl.cli.plugins import read_settings
    from prime_rl.plugins.errors import PrimeRLError
    from prime_rl.testing.conformance import CHECKS

    try:
        subjects = subjects_named(name, read_settings(pairs))
    except PrimeRLError as error:
        raise pytest.UsageError(f"--prime-rl {name}: {error}") from error
    for subject in subjects:
        for check in CHECKS:
            label = f"{GROUP}::{subject.cls.name}::{check}"
            item: ConformanceItem = ConformanceItem.from_parent(session, name=label)
            item.subject, item.check = subject, check
            yield item


def subjects_named(name: str, settings: dict[str, Any]) -> list[Any]:
    """The algorithms that a name stands for, with their settings. Raises ``ConfigError``."""
    from prime_rl.plugins.errors import ConfigError
    from prime_rl.plugins.manager import load_plugins
    from prime_rl.plugins.offers import ALGORITHM, collect, settings_of
    from prime_rl.testing.host import conformance_host
    from prime_rl.testing.rollouts import conformance_group
    from prime_rl.testing.scoring import Subject

    offers = collect(load_plugins(), ALGORITHM)
    names = {name, name.replace("-", "_")}
    exact = [offered for offered in offers.values() if offered.cls.name in names]
    found = exact or [
        offered
        for offered in offers.values()
        if names & {offered.source.plugin, offered.source.distribution}
    ]
    if not found:
        raise ConfigError(f"no installed plugin offers that algorithm (installed: {[*offers]})")
    return [
        Subject(
            offered.cls,
            settings_of(offered.cls, ALGORITHM, settings, "--prime-rl-set"),
            conformance_group,
            conformance_host,
        )
        for offered in found
    ]


class ConformanceItem(pytest.Item):
    """One check of one algorithm."""

    subject: Any
    check: str

    def runtest(self) -> None:
        """Fail or skip with what the check says."""
        from prime_rl.testing.conformance import run_check

        outcome = run_check(self.subject, self.check)
        if outcome.status == "skipped":
            pytest.skip(outcome.message)
        if outcome.status == "failed":
            raise AssertionError(f"{outcome.promise} {outcome.message}") from outcome.error

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The message; the traceback of what the algorithm raised, where it did."""
        error = excinfo.value
        if isinstance(error, AssertionError):
            cause = error.__cause__
            if cause is None or isinstance(cause, AssertionError):
                return str(error)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """What a report line is headed with."""
        return self.path, None, self.name
