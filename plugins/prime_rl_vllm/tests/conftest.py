"""One real vLLM server for every test that needs one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl_devkit.engines import EngineSubject, started
from prime_rl_vllm import Vllm, VllmConfig

PYTHON = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
SETTINGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 64 * 2**20,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="no .venv-vllm here: `make setup-vllm` prepares it")
    for item in items:
        if item.get_closest_marker("vllm") and not PYTHON.exists():
            item.add_marker(missing)


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSubject]:
    """The server, with vLLM's development routes open to the admin key."""
    engine = Vllm(VllmConfig.model_validate(SETTINGS))
    folder, env = tmp_path_factory.mktemp("vllm"), {"VLLM_SERVER_DEV_MODE": "1"}
    with started(engine, folder, python=PYTHON, env=env) as subject:
        subject.meet()
        yield subject
