"""Real plugins on a real path: a module and a dist-info folder with entry points; no mocks."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest


class Installer:
    """Writes small distributions into a folder of their own and puts it on ``sys.path``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.modules: list[str] = []

    def __call__(
        self,
        source: str = "",
        *,
        plugin: str = "demo",
        distribution: str = "demo-plugin",
        version: str = "1.2",
        group: str = "prime_rl",
        value: str | None = None,
        requires: str = "",
    ) -> str:
        """Install a distribution whose module holds ``source``; returns the module's name."""
        module = distribution.replace("-", "_")
        site = self.folder / distribution
        info = site / f"{module}-{version}.dist-info"
        info.mkdir(parents=True)
        head = "from prime_rl import Algorithm, Filter, Loss, PluginConfig, hookimpl\n"
        (site / f"{module}.py").write_text(head + dedent(source))
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            + (f"Requires-Dist: {requires}\n" if requires else "")
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{plugin} = {value or module}\n")
        self.modules.append(module)
        self.monkeypatch.syspath_prepend(str(site))
        return module


@pytest.fixture
def install(tmp_path, monkeypatch):
    installer = Installer(tmp_path / "sites", monkeypatch)
    yield installer
    for module in installer.modules:
        sys.modules.pop(module, None)
