"""The GPUs of each process, on machines that a script named nvidia-smi simulates."""

import json
import os
import sys
from pathlib import Path

import pytest
from resolved_parts import resolved_with
from waiting import LIMIT

from prime_rl import ConfigError, PluginConfig, ProcessCommand, Task
from prime_rl.registry.manager import Hooks, load_plugins
from prime_rl.registry.offers import ALGORITHM, collect
from prime_rl.rundir.machine import visible_gpus
from prime_rl_app.children import LocalLauncher
from prime_rl_app.config import load_config
from prime_rl_app.gpus import NOTHING, GpuPlan, check_shares, gpus_of, num_ranks
from prime_rl_app.placement import _engine_tasks, _trainer_tasks
from prime_rl_app.resolve import check_layout, check_routers


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with so many GPUs; CUDA_VISIBLE_DEVICES as given."""

    def make(num_gpus, visible=None):
        folder = tmp_path / f"bin{num_gpus}"
        folder.mkdir()
        script = folder / "nvidia-smi"
        lines = "\n".join(f"echo {number}" for number in range(num_gpus))
        script.write_text(f"#!/bin/sh\n{lines}\n" if num_gpus else "#!/bin/sh\nexit 9\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        return LocalLauncher(PluginConfig())

    return make


def config(**tables):
    overrides = ["--model.name", "m", "--max_steps", "1"]
    for path, value in tables.items():
        overrides += [f"--{path.replace('__', '.')}", str(value)]
    return load_config([], overrides)


def plan(launcher, **tables):
    return resolved_with(config(**tables), launcher=launcher).gpus


def refused(launcher, **tables):
    with pytest.raises(ConfigError) as caught:
        plan(launcher, **tables)
    return str(caught.value)


# -- visible GPUs --------------------------------------------------------------------------


def test_gpus_are_those_that_nvidia_smi_counts(machine):
    assert (machine(4).num_gpus(), visible_gpus()) == (4, ["0", "1", "2", "3"])


def test_silence_of_the_driver_does_not_mean_that_there_is_no_gpu(machine, monkeypatch):
    launcher = machine(2)
    (script,) = (Path(folder) / "nvidia-smi" for folder in [os.environ["PATH"]])
    script.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    monkeypatch.setattr("prime_rl.rundir.machine.ASK_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"nvidia-smi has not answered for 0\.1 s"):
        launcher.num_gpus()


def test_a_machine_without_the_driver_has_none(machine, monkeypatch, tmp_path):
    assert machine(0).num_gpus() == 0  # it is installed and fails
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("visible", "names"),
    [("2,3", ["2", "3"]), ("", []), ("-1", []), ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"])],
)
def test_gpus_hidden_by_the_user_are_not_used(machine, visible, names):
    machine(8, visible)
    assert visible_gpus() == names


# -- the division --------------------------------------------------------------------------


def test_engines_come_first_and_the_trainer_gets_the_last(machine):
    assert plan(machine(4)) == GpuPlan(((0, 1, 2),), (3,))


@pytest.mark.parametrize(
    ("tables", "engines", "trainer"),
    [
        ({"trainer__num_ranks": 2}, ((0, 1),), (2, 3)),
        ({"deployment__inference_gpus": [1]}, ((1,),), (0, 2, 3)),
        ({"deployment__trainer_gpus": [0, 1]}, ((2, 3),), (0, 1)),
        ({"deployment__inference_gpus": [3], "deployment__trainer_gpus": [1]}, ((3,),), (1,)),
        ({"inference__replicas": 2, "trainer__num_ranks": 2}, ((0,), (1,)), (2, 3)),
        ({"inference__replicas": 2}, ((0,), (1,)), (3,)),  # 2 is left over
        ({"inference__replicas": 2, "deployment__inference_gpus": [3, 0]}, ((3,), (0,)), (1, 2)),
        ({"deployment__colocated": "true"}, ((0, 1, 2, 3),), (0, 1, 2, 3)),
        ({"deployment__colocated": "true", "trainer__num_ranks": 2}, ((0, 1),), (0, 1)),
        ({"deployment__colocated": "true", "deployment__trainer_gpus": [2]}, ((2,),), (2,)),
        ({"inference__base_url": "http://h:1"}, (), (0, 1, 2, 3)),
        ({"trainer__device": "cpu"}, ((0, 1, 2, 3),), ()),
    ],
)
def test_four_gpus_are_divided(machine, tables, engines, trainer):
    assert plan(machine(4), **tables) == GpuPlan(engines, trainer)


def test_the_trainer_has_a_rank_per_gpu_unless_configured(machine):
    launcher = machine(4)
    for tables, ranks in [
        ({}, 1),
        ({"deployment__inference_gpus": [0]}, 3),
        ({"deployment__inference_gpus": [0], "trainer__num_ranks": 2}, 2),
    ]:
        assert num_ranks(config(**tables), plan(launcher, **tables)) == ranks


@pytest.mark.parametrize("number", [0, 1])
def test_no_gpu_is_assigned_without_a_choice(machine, number):
    """One GPU is seen by both, as a first run on a laptop wants it."""
    assert plan(machine(number)) == NOTHING


def test_one_gpu_can_be_shared_in_turns(machine):
    assert plan(machine(1), deployment__colocated="true") == GpuPlan(((0,),), (0,))


# -- what cannot be -------------------------------------------------------------------------


def test_a_gpu_of_both_is_refused(machine):
    assert refused(
        machine(4), deployment__inference_gpus=[0, 1], deployment__trainer_gpus=[1, 2]
    ) == (
        "deployment: inference_gpus [0, 1] and trainer_gpus [1, 2] both have [1]. Give each GPU to "
        "one of them, or set deployment.colocated = true."
    )


def test_a_number_too_high_is_refused_with_what_was_found(machine):
    assert refused(machine(8, "4,5"), deployment__trainer_gpus=[2]) == (
        "deployment.trainer_gpus: there is no GPU 2; 2 can be used here, numbered from 0 "
        "(CUDA_VISIBLE_DEVICES is 4,5)"
    )


def test_gpus_on_a_machine_without_any_are_refused(machine):
    assert refused(machine(0), deployment__inference_gpus=[0]) == (
        "deployment.inference_gpus is [0], and no GPU was found: nvidia-smi counts none, "
        "CUDA_VISIBLE_DEVICES is unset. Leave it out to run on CPU."
    )


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"deployment__trainer_gpus": [1, 1]}, "a GPU is listed twice: [1, 1]"),
        ({"deployment__inference_gpus": [0, 1, 2, 3]}, "deployment.trainer_gpus: no GPU is left"),
        ({"trainer__num_ranks": 4}, "deployment.inference_gpus: no GPU is left"),
        (
            {"trainer__num_ranks": 3, "deployment__trainer_gpus": [2, 3]},
            "trainer.num_ranks is 3, and the trainer has 2 GPUs",
        ),
        (
            {"inference__replicas": 2, "deployment__inference_gpus": [0, 1, 2]},
            "inference.replicas: 2 engines cannot share 3 GPUs",
        ),
        ({"inference__replicas": 4}, "inference.replicas: 4 engines cannot share 3 GPUs"),
        (
            {
                "deployment__colocated": "true",
                "deployment__trainer_gpus": [0],
                "deployment__inference_gpus": [1],
            },
            "deployment: colocated, but inference_gpus is [1] and trainer_gpus is [0]",
        ),
        (
            {"inference__base_url": "http://h:1", "deployment__inference_gpus": [1]},
            "deployment.inference_gpus is set, and inference.base_url names engines",
        ),
        (
            {"trainer__device": "cpu", "deployment__trainer_gpus": [1]},
            'deployment.trainer_gpus is set, and trainer.device is "cpu"',
        ),
    ],
)
def test_gpu_counts_that_do_not_fit_are_refused(machine, tables, said):
    assert said in refused(machine(4), **tables)


def test_an_engine_with_fewer_gpus_than_it_spreads_over_is_refused(machine):
    gpus = plan(machine(4), inference__replicas=2, deployment__trainer_gpus=[2, 3])
    check_shares(gpus, 1)
    check_shares(NOTHING, 8)  # nothing is known: on CPU, or on one GPU that all see
    with pytest.raises(ConfigError, match=r"spreads over 2 GPUs .* and replica 0 has 1: \[0\]\."):
        check_shares(gpus, 2)


def test_ranks_that_nodes_cannot_share_equally_are_refused(machine):
    asked = config(trainer__num_ranks=3, deployment__trainer_nodes=2)
    with pytest.raises(ConfigError, match=r"num_ranks is 3 and deployment\.trainer_nodes is 2"):
        num_ranks(asked, NOTHING)


def layout_refused(tmp_path, table, ranks, **tables):
    """Why a run with a model of this ``config.json`` would not start; empty: it would."""
    (tmp_path / "config.json").write_text(json.dumps(table))
    try:
        check_layout(config(model__name=str(tmp_path), **tables), Hooks(), ranks)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("ranks", "said"), [(3, "one of [1, 2, 4]."), (2, ""), (4, "")])
def test_rows_over_more_ranks_than_heads_can_fill_are_refused_before_the_start(
    tmp_path, ranks, said
):
    table = {"text_config": {"num_attention_heads": 4}}
    reason = layout_refused(tmp_path, table, ranks, trainer__context_parallel=ranks)
    assert reason.endswith(said)
    assert bool(reason) == bool(said)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize(
    ("ranks", "replicas", "said"),
    [
        (6, 1, "dp_replicate to one of [3, 6] with these ranks"),
        (12, 2, "dp_replicate to one of [3, 6, 12] with these ranks"),
        (6, 3, ""),
        (8, 1, ""),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused_before_the_start(
    tmp_path, key, ranks, replicas, said
):
    table = {"num_attention_heads": 4, key: 8}
    tables = {"trainer__expert_parallel": "true", "trainer__dp_replicate": replicas}
    reason = layout_refused(tmp_path, table, ranks, **tables)
    assert said in reason
    assert bool(reason) == bool(said)


@pytest.mark.parametrize(
    ("tensor", "key", "said"),
    [
        ("mlp.gate.e_score_correction_bias", "balance_bias", ""),
        ("feed_forward.expert_bias", "balance_bias", ""),
        ("mlp.gate.bias", "balance_bias", ""),  # the name in the files of some families
        ("mlp.gate.weight", "balance_bias", "Set trainer.balance_loss = 0.001 instead"),
        ("mlp.gate.weight", "balance_loss", ""),
        (
            "mlp.gate.e_score_correction_bias",
            "balance_loss",
            "balance_bias = 0.001 instead",
        ),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_routers_that_cannot_be_balanced_so_are_refused_before_the_start(
    tmp_path, tensor, key, said, sharded
):
    name = f"model.layers.1.{tensor}"
    (tmp_path / "config.json").write_text("{}")
    if sharded:
        index = {"weight_map": {name: "model-00001-of-00001.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
        file = len(header).to_bytes(8, "little") + header
        (tmp_path / "model.safetensors").write_bytes(file)

    asked = config(model__name=str(tmp_path), **{f"trainer__{key}": 0.1})
    if not said:
        check_routers(asked, Hooks())
        return
    with pytest.raises(ConfigError) as caught:
        check_routers(asked, Hooks())
    assert said in str(caught.value)


def test_the_routers_of_a_model_that_is_not_there_yet_are_left_to_the_trainer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"half")
    check_routers(config(model__name=str(tmp_path), trainer__balance_bias=0.1), Hooks())


def test_experts_of_a_model_that_has_none_are_refused_before_the_start(tmp_path):
    parallel = {"trainer__expert_parallel": "true"}
    dense = {"num_attention_heads": 4, "model_type": "qwen3"}
    assert "has no experts. Leave it out" in layout_refused(tmp_path, dense, 2, **parallel)
    unknown = dense | {"moe_experts_of_a_new_family": 8}
    assert layout_refused(tmp_path, unknown, 2, **parallel) == ""


class Elsewhere(LocalLauncher):
    name = "elsewhere"
    is_remote = True


@pytest.mark.parametrize(
    "tables", [{"deployment__trainer_gpus": [0]}, {"deployment__colocated": "true"}]
)
def test_settings_of_one_machine_are_refused_on_several(machine, tables):
    machine(4)
    assert "the launcher 'elsewhere'" in refused(Elsewhere(PluginConfig()), **tables)


# -- what the children see ------------------------------------------------------------------


def seen(launcher, task, tmp_path):
    """What a task's process has in CUDA_VISIBLE_DEVICES."""
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', 'unset'), end=' ')\n"
    code += "print(os.environ.get('CUDA_DEVICE_ORDER', ''))"
    log = tmp_path / f"{task.name}.log"
    process = launcher.start(task, ProcessCommand([sys.executable, "-c", code], log))
    assert process.process.wait(LIMIT) == 0
    return log.read_text().strip()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        # Numbers of nvidia-smi go along the bus; those of the user mean what they meant.
        (None, ["0 PCI_BUS_ID", "1 PCI_BUS_ID", "2,3 PCI_BUS_ID", "unset"]),
        ("7,6,5,4", ["7", "6", "5,4", "7,6,5,4"]),
    ],
)
def test_each_process_sees_its_own_gpus(machine, tmp_path, visible, found):
    launcher = machine(4, visible)
    asked = config(inference__replicas=2, trainer__num_ranks=2)
    gpus = gpus_of(asked, launcher, ())
    tasks = [*_engine_tasks(2, gpus, 0), *_trainer_tasks(asked, gpus, 2, False)]
    tasks.append(Task("orchestrator", "orchestrator"))
    names = ["inference", "inference_1", "trainer", "orchestrator"]
    assert [task.name for task in tasks] == names
    assert [seen(launcher, task, tmp_path) for task in tasks] == found


def test_nodes_of_a_trainer_on_one_machine_share_its_gpus(machine):
    launcher = machine(4)
    asked = config(
        deployment__inference_gpus=[0, 1], deployment__trainer_nodes=2, trainer__num_ranks=2
    )
    tasks = [*_trainer_tasks(asked, gpus_of(asked, launcher, ()), 2, False)]
    assert [(task.name, task.number, task.gpus) for task in tasks] == [
        ("trainer", 0, (2,)),
        ("trainer_1", 1, (3,)),
    ]


def test_processes_on_a_machine_without_gpus_get_no_cuda_visible_devices(machine, tmp_path):
    task = Task("trainer", "trainer", gpus=plan(machine(0)).trainer)
    assert seen(LocalLauncher(PluginConfig()), task, tmp_path) == "unset"


def test_the_engine_of_the_first_weights_has_gpus_of_its_own(machine, monkeypatch):
    monkeypatch.setattr(collect(load_plugins(), ALGORITHM)["grpo"].cls, "needs_initial", True)
    env = {
        "orchestrator__train__env": '[{id = "a"}]',
        "orchestrator__algo__type": "grpo",
    }
    four = machine(4)
    assert plan(four, **env) == GpuPlan(((0,), (1,)), (3,))
    assert [task.name for task in _engine_tasks(2, plan(four, **env), 1)] == [
        *("inference", "inference_1")
    ]
    served = env | {"orchestrator__initial": '{name = "m", base_url = "http://a:1/v1"}'}
    assert plan(four, **served) == GpuPlan(((0, 1, 2),), (3,))
    assert refused(machine(2), **env) == (
        "inference.replicas: 2 engines (one for host.initial) cannot share 1 GPU ([0]) "
        "equally. Change it, or deployment.inference_gpus."
    )
    monkeypatch.setattr(collect(load_plugins(), ALGORITHM)["grpo"].cls, "needs_ema", True)
    assert "3 engines (one for host.initial) (one for host.ema) cannot share 2" in refused(
        machine(3), **env
    )
