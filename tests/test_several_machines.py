"""The examples for clusters: the Slurm script on two nodes made of namespaces, with a real Ray
cluster, and the Kubernetes manifest against a schema."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from prime_rl_app.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "examples" / "cluster" / "slurm.sh"
MANIFEST = ROOT / "docs" / "examples" / "cluster" / "kubernetes.yaml"
IMAGE = MANIFEST.with_name("Dockerfile")
SCHEMA = ROOT / "tests" / "rayjob_schema.yaml"
STAND_INS = ROOT / "tests" / "slurm"
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"

SMALL = [
    *("--max_steps", "2", "--model.warmup_exact", "0.0"),
    *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env", "[]"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
    *("--deployment.trainer_nodes", "2", "--trainer.num-ranks", "2"),
]


@pytest.fixture
def job(tmp_path):
    """Runs the script as ``sbatch`` runs it, in a job of two nodes with three cores each."""
    commands = tmp_path / "bin"
    shutil.copytree(STAND_INS, commands)
    path = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]

    def run(*arguments, srun=None, **changed):
        if srun is not None:
            (commands / "srun").write_text(srun)
        slurm = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "node[1-2]"}
        env = {f"SLURM_{name}": value for name, value in slurm.items()}
        return subprocess.run(
            [SCRIPT, *arguments],
            env=os.environ | {"PATH": ":".join(path)} | env | changed,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


# -- Slurm -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_slurm_script_trains_on_a_ray_cluster_of_two_nodes(job, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    made = subprocess.run([STAND_INS / "srun", "--", "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no Linux namespaces for the nodes: {made.stderr.strip()}")
    ray = {"gcs_rpc_server_reconnect_timeout_s": "600", "USAGE_STATS_ENABLED": "0"}
    # A worker for each core would import everything, and wait for work of a kind that never comes.
    ray |= {"enable_worker_prestart": "0", "prestart_worker_first_driver": "0"}
    settings = {f"RAY_{name}": value for name, value in ray.items()}
    for _ in range(5):  # Ray gives a node 30 seconds to start, and the machine may be busy
        done = job(str(CONFIG), *SMALL, SLURM_CPUS_PER_TASK="3", **settings)
        if "error: the run did not start" not in done.stdout:
            break
    assert done.returncode == 0, done.stdout
    run_dir = tmp_path / "outputs" / "slurm-7"
    lines = (run_dir / "trainer.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (run_dir / "summary.json").exists()
    launch = json.loads((run_dir / "configs" / "launch.json").read_text())
    assert sorted(launch["trainer_addresses"]) == ["10.9.0.1", "10.9.0.2"]
    assert (launch["trainer_nodes"], launch["num_ranks"]) == (2, 2)
    assert Path(launch["model_path"]).parent == tmp_path / "outputs" / ".models"


PRINT = r"""#!/bin/bash
printf '%s\n' "$@"
while [[ $1 != -- ]]; do shift; done
bash -c "$4" "$5" bash -c 'exit 4' # the command after --, with an exit code instead of the run
exit 1
"""


def test_the_slurm_script_starts_ray_on_every_node_and_a_valid_run_on_it(job, tmp_path):
    done = job(str(CONFIG), "--max_steps", "200", srun=PRINT)
    words = done.stdout.splitlines()
    started, entrypoint = words[: words.index("--")], words[words.index("prime-rl") :]
    assert {"--nodes=2", "--ntasks=2"} <= set(started)
    ray = started[started.index("ray") :]
    assert ray == ["ray", "symmetric-run", "--address", "node1:6379", "--min-nodes", "2"]
    written = dry_run(entrypoint, tmp_path)
    assert written["launcher"] == {"type": "ray"}
    assert (written["run"]["name"], written["max_steps"]) == ("slurm-7", 200)


def test_the_slurm_script_takes_cores_an_address_and_a_run_name(job, tmp_path):
    changed = {"SLURM_CPUS_PER_TASK": "12", "ADDRESS": "10.0.0.1:7000"}
    done = job(str(CONFIG), "--run.name", "first", srun=PRINT, **changed)
    words = done.stdout.splitlines()
    assert words[words.index("--num-cpus") + 1] == "12"
    assert words[words.index("--address") + 1] == "10.0.0.1:7000"
    assert dry_run(words[words.index("prime-rl") :], tmp_path)["run"]["name"] == "first"


def test_the_slurm_script_has_the_exit_code_of_the_run_whatever_srun_says(job, tmp_path):
    assert job(str(CONFIG), srun=PRINT).returncode == 4
    assert job(str(CONFIG), srun=PRINT.replace("exit 4", "exit 0")).returncode == 0
    assert not list(tmp_path.glob("slurm-7*"))


@pytest.mark.parametrize("code", [0, 3])
def test_the_slurm_script_fails_if_the_run_does_not_start(job, code):
    done = job(str(CONFIG), srun=f"#!/bin/bash\nexit {code}\n")
    assert done.returncode == 1
    assert "error: the run did not start on node1" in done.stdout


def test_the_slurm_script_without_a_config_says_how_to_use_it(job):
    done = job()
    assert done.returncode != 0
    assert "usage: sbatch slurm.sh CONFIG.toml" in done.stdout


@pytest.mark.parametrize("script", [SCRIPT, *sorted(STAND_INS.iterdir())], ids=lambda p: p.name)
def test_the_scripts_are_bash_and_pass_shellcheck(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, script], check=True)


def dry_run(entrypoint, tmp_path):
    """The resolved config of a ``prime-rl run`` command that passes all checks of ``--dry-run``."""
    assert entrypoint[:2] == ["prime-rl", "run"]
    folder = ["--output-dir", str(tmp_path / "dry"), "--dry-run", "--quick"]
    done = CliRunner().invoke(app, [*entrypoint[1:], *folder])
    assert done.exit_code == 0, done.exception or done.output
    (written,) = (tmp_path / "dry").glob("*/configs/run.json")
    return json.loads(written.read_text())


# -- Kubernetes ------------------------------------------------------------------------------


def read_manifest():
    """The RayJob of the manifest, as JSON has it: without the aliases of YAML."""
    objects = json.loads(json.dumps(list(yaml.safe_load_all(MANIFEST.read_text()))))
    assert [each["kind"] for each in objects] == ["PersistentVolumeClaim", "RayJob"]
    return objects[1]


def refused(manifest):
    """What the schema says against a manifest."""
    validator = jsonschema.Draft202012Validator(yaml.safe_load(SCHEMA.read_text()))
    validator.check_schema(validator.schema)
    return [error.message for error in validator.iter_errors(manifest)]


def test_the_kubernetes_manifest_is_a_ray_job():
    assert refused(read_manifest()) == []


HEAD = ("headGroupSpec", "template", "spec")
LIMITS = (*HEAD, "containers", 0, "resources", "limits")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("headGroupSpec", "rayStartParams", "num-gpus"), 0, "0 is not of type 'string'"),
        (("headGroupSpec", "template"), {}, "'spec' is a required property"),
        (("workerGroups",), [], "'workerGroups' was unexpected"),
        ((*LIMITS, "memory"), "32GB", "'32GB' does not match"),
        ((*HEAD, "containers", 0, "shm"), "16Gi", "'shm' was unexpected"),
        ((*HEAD, "volumes", 2, "emptyDir", "medium"), "Disk", "'Disk' is not one of"),
    ],
)
def test_the_schema_refuses_what_kuberay_refuses(place, value, said):
    manifest = read_manifest()
    *tables, key = place
    table = manifest["spec"]["rayClusterSpec"]
    for each in tables:
        table = table[each]
    table[key] = value
    (error,) = refused(manifest)
    assert said in error


def test_the_pods_mount_volumes_that_exist_and_have_shared_memory():
    for spec in pod_specs():
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        (container,) = spec["containers"]
        paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert paths.keys() == volumes.keys()
        (shm,) = [name for name, volume in volumes.items() if "emptyDir" in volume]
        assert paths[shm] == "/dev/shm"
        assert volumes[shm]["emptyDir"]["medium"] == "Memory"
        # What lies in it counts as memory of the pod.
        room = gibibytes(volumes[shm]["emptyDir"]["sizeLimit"])
        assert room < gibibytes(container["resources"]["limits"]["memory"])


def gibibytes(quantity):
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


def pod_specs():
    """Of the head and of the workers."""
    cluster = read_manifest()["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_the_entrypoint_is_a_valid_run_that_fits_the_workers(tmp_path):
    manifest = read_manifest()
    entrypoint = shlex.split(manifest["spec"]["entrypoint"])
    assert entrypoint[2] == "/config/run.toml"
    written = dry_run([*entrypoint[:2], str(CONFIG), *entrypoint[3:]], tmp_path)
    assert written["launcher"] == {"type": "ray"}
    (group,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    trainer_nodes = written["deployment"]["trainer_nodes"]
    assert written["trainer"]["num_ranks"] == trainer_nodes * gpus
    assert written["inference"]["replicas"] == (group["replicas"] - trainer_nodes) * gpus


def test_the_manifest_and_the_image_name_the_ray_that_the_tests_use():
    assert read_manifest()["spec"]["rayClusterSpec"]["rayVersion"] == version("ray")
    assert f'"ray[default]=={version("ray")}"' in IMAGE.read_text()


def test_the_image_installs_folders_that_exist_and_the_vllm_of_make_setup_vllm():
    text, setup = IMAGE.read_text(), ROOT / "plugins" / "prime_rl_vllm" / "setup_environment.sh"
    folders = re.findall(r"(?<=\s)\./(\w[\w/]*\w)(?=\s)", text)
    assert folders and all((ROOT / each / "pyproject.toml").exists() for each in folders)
    assert re.findall(r"'vllm>=.*?'", text) == re.findall(r"'vllm>=.*?'", setup.read_text())
