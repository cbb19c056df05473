"""One GPU and nothing configured; several; and what stays idle."""

import os
from pathlib import Path

import pytest

from prime_rl_app.config import load_config
from prime_rl_embedded import Embedded
from prime_rl_plan.devices import parse
from prime_rl_plan.fit import fit
from prime_rl_plan.places import read


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with so many GPUs."""

    def make(num_gpus):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))

    return make


def fitted(**tables):
    overrides = ["--model.name", "o/m", "--max_steps", "1"]
    for path, value in tables.items():
        overrides += [f"--{path.replace('__', '.')}", str(value)]
    config, notices = fit(load_config([], overrides))
    return config.deployment.colocated, config.inference.replicas, notices


def test_one_gpu_is_shared_in_turns(machine):
    machine(1)
    shared = "deployment.colocated = true: engine and trainer take turns on the only GPU"
    memory = "weight_broadcast.type = 'ipc': engine and trainer share one GPU"
    assert fitted() == (True, 1, [shared, memory])
    assert fitted(weight_broadcast__type="ipc") == (True, 1, [shared])
    assert fitted(weight_broadcast__type="filesystem") == (True, 1, [shared])
    assert fitted(deployment__colocated="true") == (True, 1, [memory])
    assert fitted(deployment__colocated="true", trainer__lora__rank=4) == (True, 1, [])


def test_a_shared_gpu_is_not_chosen_for_an_engine_that_cannot_receive_so(machine, monkeypatch):
    machine(1)
    monkeypatch.setattr(Embedded, "receives", ("gloo",))
    assert [each.partition(" ")[0] for each in fitted()[2]] == ["deployment.colocated"]


def test_several_shared_gpus_get_files(machine):
    machine(2)
    assert fitted(deployment__colocated="true", trainer__num_ranks=2)[2] == []


@pytest.mark.parametrize(
    "tables",
    [
        {"deployment__colocated": "false"},
        {"trainer__device": "cpu"},
        {"inference__base_url": "http://h:1"},
        {"weight_broadcast__type": "gloo"},  # not between engines that take turns
    ],
)
def test_one_gpu_is_left_to_a_config_that_decides(machine, tables):
    machine(1)
    assert fitted(**tables) == (False, 1, [])


def test_without_a_gpu_nothing_changes(machine):
    machine(0)
    assert fitted() == (False, 1, [])


def test_replicas_fill_the_gpus_that_do_not_train(machine):
    machine(8)
    notice = "engines on the GPUs that do not train"
    assert fitted() == (False, 7, [f"inference.replicas = 7: {notice}"])
    four = fitted(trainer__num_ranks=4)
    assert four == (False, 4, [f"inference.replicas = 4: {notice}"])
    two = {"inference__engine": "vllm", "inference__vllm": "{ tensor_parallel_size = 2 }"}
    idle = (
        "idle: GPU 6. Raise inference.replicas, the engine's tensor parallelism or "
        "trainer.num_ranks."
    )
    assert fitted(**two) == (False, 3, [f"inference.replicas = 3: {notice}", idle])


def test_what_a_config_leaves_idle_is_named(machine):
    machine(8)
    colocated, replicas, notices = fitted(inference__replicas=2)
    assert (colocated, replicas) == (False, 2)
    # Two engines of three GPUs each, of which each uses the first; the trainer has the last.
    assert [each.partition(".")[0] for each in notices] == ["idle: GPU 1, 2, 4, 5, 6"]
    assert fitted(deployment__colocated="true", trainer__num_ranks=8, inference__replicas=8) == (
        True,
        8,
        [],
    )


@pytest.mark.parametrize(
    ("settings", "published"),
    [
        (["--inference.engine=vllm"], "bfloat16"),  # of the model's config.json
        (["--inference.engine=vllm", "--inference.vllm.dtype=float32"], "float32"),
        (["--inference.engine=vllm", "--trainer.publish_dtype=float32"], "float32"),
        (["--inference.engine=vllm", "--trainer.lora.rank=4"], "float32"),  # adapters are exact
        (["--inference.engine=vllm", "--model.name=o/unknown"], "float32"),
        (["--inference.base_url=http://h:1"], "float32"),
        (["--inference.engine=embedded"], "float32"),
        (["--inference.engine=embedded", "--inference.embedded.dtype=bfloat16"], "bfloat16"),
    ],
)
def test_weights_are_published_in_what_the_engine_serves_in(
    machine, tmp_path, monkeypatch, settings, published
):
    machine(0)
    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path))
    given = ["--model.name=Qwen/Qwen3-0.6B", "--max_steps=1", *settings]
    config, notices = fit(load_config([], given))
    assert config.trainer.publish_dtype == published
    notice = "trainer.publish_dtype = 'bfloat16': the engine serves in it"
    assert notices == [notice] * (published == "bfloat16")


def test_vllm_is_the_engine_of_a_machine_with_gpus_that_has_it(machine, monkeypatch):
    from prime_rl_vllm import defaults

    monkeypatch.setattr(defaults, "_is_installed", lambda: True)
    machine(1)
    config = load_config([], ["--model.name", "m", "--max_steps", "1"])
    assert config.inference.engine == "vllm"
    chosen = ["--model.name", "m", "--max_steps", "1", "--inference.engine", "embedded"]
    assert load_config([], chosen).inference.engine == "embedded"
    machine(0)
    assert load_config([], chosen[:4]).inference.engine == "embedded"


def test_engines_and_ranks_share_machines_that_only_a_launcher_has(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    overrides = ["--launcher.type=ray", "--trainer.num_ranks=8", "--inference.replicas=4"]
    overrides += ["--inference.engine=vllm", "--inference.vllm={ tensor_parallel_size = 2 }"]
    recipe = str(Path(__file__).parents[3] / "configs/recipes/tool_agent.toml")
    placed = read([recipe], overrides, parse("2x8xH100-80"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # as it was
    assert placed.places[0] == ("trainer, 8 ranks", "machine 0, GPU 0, 1, 2, 3, 4, 5, 6, 7")
    assert placed.places[1:5] == [
        ("inference", "machine 1, GPU 0, 1"),
        ("inference_1", "machine 1, GPU 2, 3"),
        ("inference_2", "machine 1, GPU 4, 5"),
        ("inference_3", "machine 1, GPU 6, 7"),
    ]
