"""The tasks of a run, and the launch facts once every task has a place."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from resolved_parts import resolved_with
from typer.testing import CliRunner

from prime_rl import ConfigError, Launcher, Place, PluginConfig
from prime_rl.plugins.status import read_status
from prime_rl.registry.components import installed_losses
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import DONE
from prime_rl_app import supervisor
from prime_rl_app.children import QUIET_CPU, LocalLauncher
from prime_rl_app.cli.app import app
from prime_rl_app.commands import RunKeys
from prime_rl_app.config import load_config
from prime_rl_app.forks import Forks, _read_early
from prime_rl_app.placement import lay_out, plan

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"
KEYS = ("PRIME_RL_ADMIN_KEY", "PRIME_RL_ENGINE_API_KEY")


class Elsewhere(Launcher):
    """Places on machines of a network; starts nothing and remembers what it should have."""

    name = "elsewhere"

    def __init__(self, gpus=0):
        super().__init__(PluginConfig())
        self.gpus, self.started = gpus, {}

    def num_gpus(self):
        return self.gpus

    def place(self, tasks, run_dir, tell):
        tell("room")
        self.tasks = tasks
        return {
            task.name: Place(f"10.0.0.{place}", tuple(range(7000, 7000 + task.num_ports)))
            for place, task in enumerate(tasks)
        }

    def start(self, task, command):
        self.started[task.name] = command
        return SimpleNamespace(name=task.name)


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in (*KEYS, "PRIME_RL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whatever machine this is
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def config(*overrides):
    return load_config([CONFIG], overrides)


ENGINE = SimpleNamespace(num_gpus=4)


def launch_of(launcher, *overrides, checkpoint=None):
    asked = config(*overrides)
    resolved = resolved_with(asked, launcher=launcher, engine=ENGINE)
    layout = lay_out(resolved, checkpoint)
    places = launcher.place(layout.tasks, Path(), lambda what: None)
    return plan(resolved, layout, places, checkpoint)


# -- on one machine -------------------------------------------------------------------------


def test_on_one_machine_everything_is_on_loopback_at_ports_of_its_own():
    launch = launch_of(LocalLauncher(PluginConfig()), "--inference.replicas", "2")
    assert all(url.startswith("http://127.0.0.1:") for url in launch.engine_urls)
    ports = [url.rpartition(":")[2] for url in launch.engine_urls]
    ports += [*map(str, launch.transport_ports), launch.rendezvous.rpartition(":")[2]]
    assert len(set(ports)) == 4
    assert (launch.transport_host, launch.trainer_addresses) == ("127.0.0.1", ["127.0.0.1"])


def test_addresses_and_ports_of_the_config_are_taken():
    launch = launch_of(
        LocalLauncher(PluginConfig()),
        *("--inference.replicas", "2", "--inference.host", "::1", "--inference.port", "8000"),
        *("--rollout_transport.port", "9000", "--rollout_transport.host", "127.0.0.2"),
        *("--trainer.num_ranks", "3"),
    )
    assert launch.engine_urls == ["http://[::1]:8000", "http://[::1]:8001"]
    assert (launch.transport_host, launch.transport_ports) == ("127.0.0.2", [9000, 9001, 9002])


def test_engines_that_run_already_need_no_place():
    launcher = Elsewhere()
    launch = launch_of(launcher, "--inference.base_url", "http://a:1/v1")
    assert launch.engine_urls == ["http://a:1"]
    assert [task.name for task in launcher.tasks] == ["model", "trainer", "orchestrator"]


def test_a_resumed_run_has_the_first_weights_too_if_a_loss_reads_them(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step_2")
    checkpoint.weights.mkdir(parents=True)
    (checkpoint.weights / "model.safetensors").touch()
    first, again = launch_of(Elsewhere()), launch_of(launcher := Elsewhere(), checkpoint=checkpoint)
    assert first.initial == Path(first.model_path) and first.wait_for_model
    assert again.initial == Path(again.model_path) == checkpoint.weights
    assert "model" not in [task.name for task in launcher.tasks]
    monkeypatch.setattr(installed_losses()["ce"].cls, "reads", ("initial_logprobs",))
    again = launch_of(
        launcher := Elsewhere(),
        *("--orchestrator.algo.type", "sft", "--orchestrator.algo.sampling.source.type", "dataset"),
        checkpoint=checkpoint,
    )
    assert again.initial == Path(first.model_path)
    assert Path(again.model_path) == checkpoint.weights and not again.wait_for_model
    assert "model" in [task.name for task in launcher.tasks]
    prime = ("--orchestrator.algo.type", "prime")  # assigns it without a table [trainer.losses]
    head = ("--trainer.heads.implicit_reward.own_model", "true")
    again = launch_of(Elsewhere(), *prime, *head, checkpoint=checkpoint)
    assert again.initial == Path(first.model_path)
    with_table = ("--trainer.losses.ce.per_env", "true")  # an algorithm adds it beside its own loss
    again = launch_of(Elsewhere(), *with_table, checkpoint=checkpoint)
    assert again.initial == Path(first.model_path)


def test_files_need_no_ports():
    launch = launch_of(Elsewhere(), "--rollout_transport.type", "filesystem")
    assert launch.transport_ports == []


# -- on several -----------------------------------------------------------------------------

SEVERAL = [
    *("--inference.replicas", "2", "--trainer.num_ranks", "4"),
    *("--deployment.trainer_nodes", "2"),
]


def test_on_several_machines_each_process_has_the_address_of_its_place():
    launch = launch_of(Elsewhere(), *SEVERAL)
    assert launch.engine_urls == ["http://10.0.0.1:7000", "http://10.0.0.2:7000"]
    assert launch.trainer_addresses == ["10.0.0.3", "10.0.0.4"]
    assert launch.rendezvous == "10.0.0.3:7000"
    assert launch.transport_host == "10.0.0.5"
    assert launch.transport_ports == [7000, 7001, 7002, 7003]  # one a rank
    assert (launch.num_ranks, launch.trainer_nodes) == (4, 2)


@pytest.mark.parametrize(("cluster", "engine", "node"), [(0, 0, 0), (16, 4, 2)])
def test_gpus_are_requested_if_the_cluster_has_any(cluster, engine, node):
    launcher = Elsewhere(cluster)
    launch_of(launcher, *SEVERAL)
    asked = {task.name: task.num_gpus for task in launcher.tasks}
    assert asked == {
        "model": 0,
        "inference": engine,
        "inference_1": engine,
        "trainer": node,
        "trainer_1": node,
        "orchestrator": 0,
    }
    assert [task.name for task in launcher.tasks if task.apart] == ["trainer", "trainer_1"]


def test_models_are_made_where_other_machines_see_them(tmp_path, monkeypatch):
    here = launch_of(LocalLauncher(PluginConfig())).model_path
    assert Path(here).parent == tmp_path / "cache" / "prime-rl" / "models"
    there = launch_of(Elsewhere(), "--output_dir", "out").model_path
    assert Path(there).parent == tmp_path / "out" / ".models"
    monkeypatch.setenv("PRIME_RL_CACHE", "/shared")
    assert Path(launch_of(Elsewhere()).model_path).parent == Path("/shared")


# -- the commands ---------------------------------------------------------------------------


def started(tmp_path, *overrides):
    """What a launcher elsewhere is asked to start, and the run directory."""
    (tmp_path / "run" / "configs").mkdir(parents=True)
    (tmp_path / "run" / "status").mkdir()
    (tmp_path / "run" / "logs" / "attempt_1").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "latest").symlink_to("attempt_1")
    launcher = Elsewhere()
    printed = []
    # A relative path, as users give it.
    view = SimpleNamespace(run_dir=Path("run"), print=printed.append)
    supervisor.Attempts(resolved_with(config(*overrides), launcher=launcher), view).start(None)
    assert printed == ["waiting for room"]
    return launcher.started, tmp_path / "run"


def test_remote_processes_get_absolute_paths_and_the_files_they_need(tmp_path):
    commands, run_dir = started(tmp_path, *SEVERAL)
    model = Path(Launch.read(run_dir).model_path)
    for name, command in commands.items():
        assert command.log == run_dir / "logs" / "attempt_1" / f"{name}.log"
        seen = [] if name == "model" else [model.parent]  # it is still to be made
        assert command.needs == [run_dir / "configs" / "launch.json", *seen]
    assert commands["orchestrator"].argv[-1] == str(run_dir)
    assert read_status(run_dir / "status" / "launcher.json").state == DONE


def test_secrets_are_passed_by_the_environment_with_one_for_sampling(tmp_path):
    commands, run_dir = started(tmp_path)
    keys = [
        {k: command.env.get(k) for k in KEYS} for n, command in commands.items() if n != "model"
    ]
    assert keys[0] == keys[1] == keys[2] and all(keys[0].values())
    written = (run_dir / "configs" / "launch.json").read_text()
    for secret in keys[0].values():
        assert secret not in written
        assert not any(secret in " ".join(command.argv) for command in commands.values())
    assert not set(KEYS) & set(commands["model"].env)  # it needs none


def test_no_proxy_stands_between_the_processes_of_a_run(tmp_path, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "intranet, 10.0.0.1")
    commands, _ = started(tmp_path, *SEVERAL)
    for name in ("inference", "trainer", "orchestrator"):
        env = commands[name].env
        assert env["NO_PROXY"] == "intranet,10.0.0.1,localhost,127.0.0.1,::1,10.0.0.2"
        assert env["no_proxy"] == env["NO_PROXY"]


def test_the_users_proxy_settings_apply_to_engines_elsewhere(tmp_path, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRIME_RL_ADMIN_KEY", "k")
    commands, _ = started(tmp_path, "--inference.base_url", "http://a:1/v1")
    assert commands["orchestrator"].env["NO_PROXY"] == "localhost,127.0.0.1,::1"


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocators(commands):
    """The settings of torch's allocator, by process."""
    return {
        name: {key: command.env[key] for key in ALLOCATOR if key in command.env}
        for name, command in commands.items()
    }


def test_engines_and_trainers_inherit_no_key_that_the_config_does_not_name(tmp_path):
    commands, _ = started(tmp_path, *SEVERAL, "--deployment.pass_env", '["S3_KEY"]')
    for name, command in commands.items():
        asks_others = name in ("model", "orchestrator")
        assert command.inherits == (None if asks_others else ("S3_KEY",)), name


def test_trainers_have_expandable_segments_and_no_other_process(tmp_path, monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    commands, _ = started(tmp_path, *SEVERAL)
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    found = allocators(commands)
    assert {"trainer", "trainer_1", "inference", "orchestrator"} <= found.keys()
    for name, settings in found.items():
        assert settings == (expandable if name.startswith("trainer") else {}), name


@pytest.mark.parametrize("name", [None, *ALLOCATOR])
def test_without_a_gpu_one_fork_server_serves_engine_and_trainer(tmp_path, monkeypatch, name):
    """A variable that only one of them has would start the other by itself: three CPU seconds."""
    for each in ALLOCATOR:
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:64")
    commands, _ = started(tmp_path)
    forked = [commands[each] for each in ("inference", "trainer")]
    forks = Forks()
    assert all(forks._can_fork(each.argv, each.env) for each in forked)
    engine, trainer = ({**QUIET_CPU, **each.env} for each in forked)
    assert _read_early(engine) == _read_early(trainer)
    assert engine != trainer


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_users_settings_of_the_allocator_stay(tmp_path, monkeypatch, name):
    for each in ALLOCATOR:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    commands, _ = started(tmp_path)
    assert allocators(commands)["trainer"] == {name: "max_split_size_mb:64"}


def test_a_trainer_node_gets_its_own_address(tmp_path):
    commands, _ = started(tmp_path, *SEVERAL)
    own = [commands[name].env["PRIME_RL_NODE_ADDRESS"] for name in ("trainer", "trainer_1")]
    assert own == ["10.0.0.3", "10.0.0.4"]
    assert list(commands["trainer"].argv) == list(commands["trainer_1"].argv)


def test_sampling_needs_a_key_of_its_own_beyond_this_machine(monkeypatch):
    asked = config()
    monkeypatch.setenv("PRIME_RL_ADMIN_KEY", "secret")
    keys = RunKeys.of_run(asked, is_remote=True)
    assert keys.admin == "secret" and keys.engine not in ("", "secret")
    assert RunKeys.of_run(asked, is_remote=True).engine != keys.engine
    assert RunKeys.of_run(asked, is_remote=False) == RunKeys("secret", "")  # loopback needs none
    monkeypatch.setenv("PRIME_RL_ENGINE_API_KEY", "mine")
    assert RunKeys.of_run(asked, is_remote=True) == RunKeys("secret", "mine")


def test_a_run_of_its_own_gets_a_new_key_each_time():
    assert len({RunKeys.of_run(config(), is_remote=False).admin for _ in range(3)}) == 3


# -- choosing one ---------------------------------------------------------------------------


def test_the_option_is_short_for_the_key(tmp_path):
    words = [
        "run",
        str(CONFIG),
        "--dry-run",
        "--quick",
        "--run.name",
        "dry",
        "--output_dir",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, [*words, "--launcher", "ray", "--launcher.address", "host:1"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "dry" / "configs" / "run.json").read_text())
    assert written["launcher"] == {"type": "ray", "address": "host:1"}


def test_an_unknown_launcher_and_a_key_it_does_not_know_are_refused():
    words = ["run", str(CONFIG), "--dry-run"]
    for more, said in [
        (["--launcher", "lokal"], "no installed plugin offers the launcher 'lokal'"),
        (["--launcher.gpu", "1"], "launcher (launcher 'local').gpu: unknown key"),
    ]:
        error = CliRunner().invoke(app, [*words, *more]).exception
        assert isinstance(error, ConfigError) and said in str(error)
