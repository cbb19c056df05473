"""The torch and the NCCL of two interpreters, and what a dry run says of them."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prime_rl_app import libraries as module
from prime_rl_app.cli.app import app
from prime_rl_app.libraries import libraries

CONFIG = Path(__file__).parents[2] / "configs" / "reverse_text" / "grpo_vllm.toml"


def interpreter(folder: Path, **found: str) -> Path:
    """A stand-in that answers every question about installed packages."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{json.dumps(found)}'\n")
    path.chmod(0o755)
    return path


def install(site: Path, name: str, number: str, *requirements: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{number}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {number}", *(f"Requires-Dist: {r}" for r in requirements)]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_this_interpreter_has_the_torch_that_it_runs() -> None:
    assert libraries(None)["torch"] == version("torch")
    assert libraries(Path(sys.executable)) == libraries(None)


@pytest.mark.slow
def test_the_nccl_is_the_one_that_torch_requires_with_its_patch_level(tmp_path: Path) -> None:
    """An environment may hold one for another version of CUDA as well."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    python = tmp_path / "env" / "bin" / "python"
    assert libraries(python) == {}
    install(site, "torch", "2.14.0", 'nvidia-nccl-cu13==2.30.3; platform_system == "Linux"')
    assert libraries(python) == {"torch": "2.14.0"}
    install(site, "nvidia-nccl-cu12", "2.27.5")
    install(site, "nvidia-nccl-cu13", "2.30.3")
    assert libraries(python) == {"torch": "2.14.0", "NCCL": "2.30.3"}


@pytest.mark.parametrize("text", ["echo no JSON", "exit 3"])
def test_an_interpreter_that_does_not_answer_has_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    assert libraries(path) == {}
    assert libraries(tmp_path / "absent") == {}


def dry_run(folder: Path, python: Path, *more: str) -> str:
    """What a dry run says on stderr."""
    words = ["run", str(CONFIG), "--dry-run", "--quick", f"--inference.python={python}", *more]
    result = CliRunner().invoke(app, [*words, f"--output-dir={folder / 'out'}"])
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.mark.slow
def test_a_dry_run_says_that_weights_will_go_through_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"torch": "2.13.0", "NCCL": "2.29.7"}
    monkeypatch.setattr(
        module, "libraries", lambda python: ours if python is None else libraries(python)
    )
    vllm = {"vllm": "0.33.0", "prime-rl-vllm": version("prime-rl-vllm")}
    other = interpreter(tmp_path, **vllm, torch="2.14.0", NCCL="2.30.3")
    text = dry_run(tmp_path, other, "--weight-broadcast.type=nccl")
    assert "NCCL cannot connect: it is 2.29.7 in the trainer (torch 2.13.0) and 2.30.3" in text
    assert "Every version will go through files" in text

    same = interpreter(tmp_path, **vllm, **ours)
    text = dry_run(tmp_path, same, "--weight-broadcast.type=nccl")
    assert "NCCL 2.29.7 on both sides (torch 2.13.0 and 2.13.0)" in text
    assert "weight_broadcast" not in dry_run(tmp_path, same)


def test_the_probe_imports_nothing_of_torch(tmp_path: Path) -> None:
    """A CUDA context in the supervisor would hold memory of the GPU."""
    code = f"{module._PROBE}\nimport sys\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
