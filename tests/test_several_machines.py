"""The cluster examples of the docs: the Slurm script is run with an ``srun`` that stays here."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from prime_rl.cli.app import app
from prime_rl.cli.run import split_arguments
from prime_rl.config.load import load_config

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples" / "cluster"
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"

SRUN = """#!/bin/bash
# As many tasks as are asked for, all on this machine.
for option in "$@"; do
    case $option in
        --ntasks=*) count=${option#*=}; shift ;;
        --*) shift ;;
        *) break ;;
    esac
done
for number in $(seq "$count"); do "$@" & done
trap 'kill $(jobs -p)' TERM
wait
"""

SMALL = [
    *("--max_steps", "2", "--model.warmup_exact", "0.0"),
    *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env", "[]"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]


@pytest.fixture
def slurm(tmp_path):
    """Starts ``slurm.sh`` as ``sbatch`` would, on loopback."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "srun").write_text(SRUN)
    main = "from prime_rl.cli import main; main()"
    (commands / "prime-rl").write_text(f"#!{sys.executable}\n{main}\n")
    for command in commands.iterdir():
        command.chmod(0o755)
    env = {"PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    env |= {"ADDRESS": "127.0.0.1", "OUTPUTS": str(tmp_path / "outputs")}
    env |= {"ENGINES": "1", "TRAINERS": "2", "RANKS": "2"}
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [str(EXAMPLES / "slurm.sh"), *arguments],
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell that starts the tests in the background has them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()


@pytest.mark.slow
def test_the_slurm_script_makes_one_run_of_an_engine_and_two_trainer_nodes(slurm, tmp_path):
    process = slurm(str(CONFIG), *SMALL)
    output = process.communicate(timeout=300)[0]
    run_dir = tmp_path / "outputs" / "slurm-7"
    assert process.returncode == 0, output
    lines = (run_dir / "trainer.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    joined = sorted(line for line in output.splitlines() if line.startswith("joined as"))
    assert joined == ["joined as inference", "joined as trainer", "joined as trainer_1"]
    assert output.count("the run is over") + output.count("ended with code 0") >= 2
    launch = json.loads((run_dir / "configs" / "launch.json").read_text())
    assert (launch["trainer_nodes"], launch["num_ranks"]) == (2, 2)
    assert len(launch["transport_ports"]) == 2
    assert Path(launch["model_path"]).parent == tmp_path / "outputs" / ".models"
    assert not (run_dir / "places" / "open.json").exists()


@pytest.mark.slow
def test_a_config_that_is_refused_ends_the_whole_job(slurm):
    """The machines that wait for the run must not wait on."""
    process = slurm(str(CONFIG), "--max_stepz", "1")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2
    assert "did you mean 'max_steps'?" in output


def commands_of(manifest):
    """The command line of every container."""
    for item in yaml.safe_load(manifest.read_text())["items"]:
        if item["kind"] == "Job":
            for container in item["spec"]["template"]["spec"]["containers"]:
                yield [*container["command"], *container.get("args", [])]


def test_the_kubernetes_manifests_hold_commands_that_exist():
    run, *joins = commands_of(EXAMPLES / "kubernetes.yaml")
    launcher, overrides = run[3], split_arguments(run[4:])[1]
    assert (run[:3], launcher) == (["prime-rl", "run", "/config/run.toml"], "--launcher=join")
    config = load_config([CONFIG], ["--launcher.type=join", *overrides])
    assert config.launcher.settings == {"address": "auto"}
    assert (config.inference.replicas, config.deployment.trainer_nodes) == (2, 2)
    assert [join[3] for join in joins] == ["inference", "trainer"]
    for join in joins:
        assert join[2] == f"{config.output_dir}/{config.run.name}"
        assert CliRunner().invoke(app, [*join[1:], "--help"]).exit_code == 0


def test_as_many_machines_are_asked_for_as_the_run_has_places():
    items = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())["items"]
    jobs = {item["metadata"]["name"]: item["spec"] for item in items if item["kind"] == "Job"}
    assert jobs["prime-rl-inference"]["parallelism"] == 2
    assert jobs["prime-rl-trainer"]["parallelism"] == 2
    asked = (EXAMPLES / "slurm.sh").read_text()
    assert "#SBATCH --nodes=4" in asked
    assert "engines=${ENGINES:-2}" in asked and "trainers=${TRAINERS:-2}" in asked


def test_the_slurm_script_is_bash():
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)
    assert shlex.split((EXAMPLES / "slurm.sh").read_text(), comments=True)
