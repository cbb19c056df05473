"""One real server for every test of the engine suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import warm
from engine_proxy import Fault, Proxy
from waiting import LIMIT

from prime_rl_devkit.engines import EngineSubject, started, starting


@pytest.fixture(scope="session", autouse=True)
def engines_start_warm() -> Iterator[None]:
    """``subprocess`` in a test starts a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "subprocess", warm.SUBPROCESS)
        yield


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSubject]:
    """The embedded engine, sound."""
    torch = pytest.importorskip("torch")
    embedded = pytest.importorskip("prime_rl_embedded")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("engine")
    with started(embedded.Embedded(embedded.EmbeddedConfig()), folder) as subject:
        yield subject


@pytest.fixture(scope="session")
def proxy(engine: EngineSubject) -> Iterator[Proxy]:
    with Proxy(engine.url) as running:
        yield running


@pytest.fixture
def faulty(engine: EngineSubject, proxy: Proxy) -> Iterator[EngineSubject]:
    """The engine behind the proxy, whose ``fault`` a test sets."""
    engine.meet()
    subject = EngineSubject(
        proxy.url,
        engine.model_folder,
        engine.work_folder,
        engine.admin_key,
        engine.api_key,
        timeout=LIMIT,
    )
    subject._references = engine._references
    subject._number = 1000 * (1 + len(list(engine.work_folder.iterdir())))
    subject.version, subject.model = engine.version, engine.model
    subject.max_model_len = engine.max_model_len
    with subject.http:
        yield subject
    proxy.fault = Fault()
    if subject.moved:
        engine.meet()
        engine.moved = True
        engine.restore()
