"""The converted model, once a session."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from prime_rl import PluginConfig
from prime_rl_smollm2 import SmolLM2
from prime_rl_smollm2.convert import INSTALL, PACKAGE


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> Path:
    """The folder as a run finds it in the model cache."""
    from prime_rl.rundir.launch import READY
    from prime_rl_app.models import cached_path, make

    try:
        version(PACKAGE)
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGE} is not installed: `make test-real` does it ({INSTALL})")
    maker = SmolLM2(PluginConfig())
    path = cached_path(maker, version("prime-rl-smollm2"), 0, model_cache)
    if not (path / READY).exists():
        make(lambda folder: maker.make(folder, 0, lambda state, share: None), path)
    return path
