"""The table of model families quotes vLLM's registry: docs/model-families.md."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
QUOTED = ROOT / "tests" / "vllm_registry.json"
PROBE = """
import json, sys, vllm
from vllm.model_executor.models.registry import ModelRegistry
classes = {name: getattr(kind, "class_name", "") for name, kind in ModelRegistry.models.items()}
json.dump({"vllm": vllm.__version__, "classes": classes}, open(sys.argv[1], "w"))
"""


@pytest.mark.vllm
def test_the_table_of_families_quotes_vllms_registry(tmp_path: Path) -> None:
    found = tmp_path / "registry.json"
    subprocess.run([PYTHON, "-c", PROBE, found], check=True, timeout=600)
    registry, quoted = json.loads(found.read_text()), json.loads(QUOTED.read_text())
    table = (ROOT / "docs" / "model-families.md").read_text()
    listed = {name: kind for name, kind in registry["classes"].items() if f"`{name}`" in table}
    assert {"vllm": registry["vllm"].partition("+")[0], "classes": listed} == quoted
