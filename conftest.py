"""What every test file of the repository may use."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest
import warm
from hypothesis import HealthCheck, settings

pytest_plugins = ("pytester",)
"""For tests of this file."""

BEGAN = "PRIME_RL_TESTS_BEGAN"
"""The variable with the time at which the run began, for its workers."""

# Property tests are the same in every run, and a busy machine fails none of them.
settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-seconds",
        type=float,
        help="seconds that each stage of tests/test_slow_world.py takes longer",
    )
    parser.addoption(
        "--minutes",
        type=float,
        help="begin no test later than this after the start; each day other files come first",
    )


def pytest_configure(config: pytest.Config) -> None:
    """One nursery for the processes of all workers, and one start of the run."""
    os.environ.setdefault(BEGAN, str(time.time()))
    is_here = sys.platform == "linux" and warm.forkserver is not None
    if is_here and "PYTEST_XDIST_WORKER" not in os.environ:
        nursery = warm.nursery()
        nursery.__enter__()
        config.add_cleanup(lambda: nursery.__exit__(None, None, None))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first: a worker that begins one last would be waited for."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_take_turns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where the time is limited: each day other files of those that `-m` has left come first."""
    if config.getoption("--minutes") is None:
        return
    day = int(float(os.environ[BEGAN]) / 86400)
    paths = list(dict.fromkeys(item.path for item in items))
    turn = {path: (number - 37 * day) % len(paths) for number, path in enumerate(paths)}
    items.sort(key=lambda item: turn[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.time() > float(os.environ[BEGAN]) + 60 * minutes:
        pytest.skip(f"not run: it would have begun more than {minutes:g} minutes after the start")


def pytest_sessionstart() -> None:
    """Of the modules and tests that come now nothing is garbage: no collection walks them, now or
    later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For ``PRIME_RL_CACHE``: models that are made once a session, whichever worker needs them
    first."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "models"


@pytest.fixture(autouse=True)
def no_lock_of_an_earlier_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """renderers keeps one for the process, of the first event loop that waited for it."""
    client = sys.modules.get("renderers.client")
    if client is not None:
        monkeypatch.setattr(client, "_max_prompt_len_lock", asyncio.Lock())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a distribution of one module, for the processes that a test starts."""
    folder = tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(name: str, entry_points: str, code: str = "") -> None:
        info = folder / f"{name}-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(entry_points)
        (folder / f"{name}.py").write_text(code)

    return install


@pytest.fixture(scope="session")
def tiny_reverse(model_cache: Path) -> Path:
    """The default model of seed 0, as whole runs find it in the cache."""
    from prime_rl.rundir.launch import READY
    from prime_rl_app.models import cached_path, make
    from prime_rl_environments.tiny import TinyReverse, TinyReverseConfig

    maker = TinyReverse(TinyReverseConfig())
    path = cached_path(maker, version("prime-rl-environments"), 0, model_cache)
    if not (path / READY).exists():
        make(lambda folder: maker.make(folder, 0, lambda state, share: None), path)
    return path


@pytest.fixture(autouse=True)
def plugins_are_loaded_anew() -> None:
    """After a test that registered or installed plugins of its own. Checking what all plugins offer
    takes 50 ms, so other tests find them loaded."""
    manager = sys.modules.get("prime_rl.registry.manager")
    loaded = {} if manager is None else manager._loaded
    for key, hooks in [*loaded.items()]:
        _, entries = key
        if len(hooks.list_name_plugin()) != len(entries) or not all(map(is_imported, entries)):
            del loaded[key]


def is_imported(entry: EntryPoint) -> bool:
    """Not so after a test that took away the module that it wrote."""
    return entry.module in sys.modules


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A model in bfloat16 on one rank makes one, which ends with the trainer's process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
