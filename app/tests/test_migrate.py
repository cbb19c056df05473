"""``prime-rl migrate``: nothing of a foreign config vanishes in silence."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError
from prime_rl_app.cli import main
from prime_rl_app.config import build_config, merge
from prime_rl_app.foreign import NAMES, PRIME_RL, VERL, our_keys, path_of
from prime_rl_app.migrate import (
    DIFFERENCES,
    DIFFERENCES_FROM_VERL,
    VALUES,
    as_whole,
    leaf_paths,
    migrate,
    sbatch,
    written,
)
from prime_rl_app.resolve import check
from prime_rl_app.sft import without_data

RENDERS = "orchestrator.renderer."

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()

UPSTREAM = """
max_steps = 40
seq_len = 4096
[model]
name = "org/Model-1B"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[weight_broadcast]
type = "nccl"
quantize_in_weight_transfer = true
port = 29502
[monitors.wandb]
project = "mine"
[ckpt]
interval = 20
[trainer.model]
impl = "custom"
compile = {}
ac = { freq = 2 }
[trainer.model.lora]
rank = 8
target_modules = ["q_proj"]
[trainer.optim]
type = "muon"
lr = 1e-5
betas1 = 0.8
mu = 0.9
[trainer.scheduler]
type = "linear"
[orchestrator]
batch_size = 64
group_size = 16
[orchestrator.concurrency]
initial_inflight = 32
max_inflight = 128
[orchestrator.algo]
type = "grpo"
[orchestrator.algo.length_penalty]
type = "linear"
num_turns_weight = 0.2
[orchestrator.renderer]
name = "qwen3"
[orchestrator.train.sampling]
max_completion_tokens = 512
[[orchestrator.train.source]]
name = "first"
ratio = 0.3
[orchestrator.train.source.env.taskset]
id = "sorting"
min_turns = 3
task = { judges = [ { id = "one", choices = ["A"] } ] }
[orchestrator.train.source.env.agent]
max_turns = 6
timeout = { rollout = 900 }
[orchestrator.train.source.env.agent.harness]
id = "bash"
[orchestrator.train.source.env.agent.runtime]
type = "subprocess"
[[orchestrator.train.source]]
[orchestrator.train.source.env.taskset]
id = "poker"
[orchestrator.train.source.env.player0.harness]
id = "null"
[orchestrator.train.source.curriculum.gates.zero]
type = "advantage_range"
[orchestrator.eval]
interval = 10
num_examples = 32
[[orchestrator.eval.source]]
num_examples = -1
[orchestrator.eval.source.env.taskset]
id = "sorting"
[inference.vllm]
tensor_parallel_size = 2
max_model_len = 8192
gpu_memory_utilization = 0.8
tool_call_parser = "hermes"
"""


def test_a_config_of_upstream_becomes_ours():
    migration = migrate(tomllib.loads(UPSTREAM))
    table = migration.table
    assert table["trainer"] == {
        "num_ranks": 2,
        "publish_dtype": "bfloat16",
        "compile": True,
        "activation_checkpointing": 2,
        "lora": {"rank": 8, "target_modules": ["q_proj"]},
        "optim": {"type": "muon", "lr": 1e-5, "beta1": 0.8, "momentum": 0.9},
        "scheduler": {"type": "linear"},
    }
    assert table["inference"] == {
        "engine": "vllm",
        "replicas": 3,
        "max_model_len": 8192,
        "vllm": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.8},
    }
    orchestrator = table["orchestrator"]
    assert orchestrator["max_inflight_rollouts"] == 128
    assert orchestrator["algo"]["length_penalty"] == {"type": "linear", "turns_weight": 0.2}
    assert orchestrator["train"]["env"] == [
        {
            "id": "sorting",
            "name": "first",
            "ratio": 0.3,
            "args": {"min_turns": 3, "task": {"judges": [{"id": "one", "choices": ["A"]}]}},
            "max_turns": 6,
            "timeout": 900,
            "harness": {"id": "bash"},
        },
        {"id": "poker", "args": {"player0": {"harness": {"id": "null"}}}},
    ]
    assert orchestrator["eval"]["env"] == [
        {"id": "sorting", "interval": 10, "num_examples": 1_000_000}
    ]
    assert migration.unknown == []
    left = "\n".join(migration.left_out)
    assert "orchestrator.train.source.1.curriculum.gates.zero.type" in left
    assert "weight_broadcast.port = 29502: a free port is chosen" in left
    assert isinstance(build_config(table), RunConfig)


def test_defaults_that_differ_are_named_where_the_config_leaves_them():
    said = "\n".join(migrate(tomllib.loads(UPSTREAM)).defaults)
    assert "trainer.optim.beta2: 0.95 there, 0.999 here; of muon" in said
    assert "trainer.scheduler.warmup_steps: 10 there, 0 here" in said
    assert "weight_broadcast.timeout: 1200 there, 120.0 here" in said
    assert "orchestrator.group_size" not in said and "momentum" not in said
    sgd = 'model.name = "a/b"\n[trainer.optim]\ntype = "sgd"\nmu = 0.5\n'
    said = "\n".join(migrate(tomllib.loads(sgd)).defaults)
    assert "nesterov" in said and "orchestrator.group_size: 1 there, 8 here" in said


FROM_UPSTREAM, FROM_VERL = PAGE.split("### Of verl")


@pytest.mark.parametrize(
    ("difference", "page"),
    [
        *((each, FROM_UPSTREAM) for each in DIFFERENCES),
        *((each, FROM_VERL) for each in DIFFERENCES_FROM_VERL),
    ],
    ids=lambda each: getattr(each, "key", ""),
)
def test_the_page_has_each_difference_and_our_default_is_the_real_one(difference, page):
    assert f"| `{difference.key}` |" in page
    info = our_keys().get(difference.key)
    if info is not None and difference.ours.replace(".", "").isdigit():
        assert float(difference.ours) == info.default


def test_a_grpo_config_of_trl_becomes_ours():
    migration = migrate(
        {
            "model_name_or_path": "org/Model",
            "learning_rate": 1e-6,
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "num_generations": 8,
            "max_prompt_length": 512,
            "max_completion_length": 1024,
            "loss_type": "dapo",
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "bf16": True,
            "gradient_checkpointing": True,
            "max_steps": 100,
            "warmup_ratio": 0.1,
            "num_train_epochs": 1,
            "use_vllm": True,
            "report_to": ["wandb"],
            "seed": 3,
            "data_seed": 5,
        }
    )
    assert migration.table == {
        "seed": 3,
        "max_steps": 100,
        "seq_len": 1536,
        "model": {"name": "org/Model"},
        "monitors": {"wandb": {}},
        "inference": {"engine": "vllm"},
        "orchestrator": {
            "batch_size": 32,
            "group_size": 8,
            "train": {"sampling": {"max_completion_tokens": 1024}},
        },
        "trainer": {
            "dtype": "bfloat16",
            "activation_checkpointing": 1,
            "optim": {"lr": 1e-6},
            "scheduler": {"warmup_steps": 10},
            "loss": {
                "type": "ppo_clip",
                "normalize_by": "tokens",
                "clip_eps_low": 0.2,
                "clip_eps_high": 0.28,  # of the key of its own, whichever comes first
            },
        },
    }
    assert "data_seed = 5: seed is 3 already" in migration.left_out
    assert not migration.unknown


def test_a_config_of_verl_becomes_ours():
    rollout = {"n": 4, "name": "vllm", "temperature": 0.7, "top_p": 0.9}
    migration = migrate(
        {
            "actor_rollout_ref": {
                "model": {"path": "org/Model", "enable_gradient_checkpointing": True},
                "actor": {
                    "optim": {"lr": 1e-6},
                    "ppo_mini_batch_size": 16,
                    "use_kl_loss": True,
                    "kl_loss_coef": 0.001,
                },
                "rollout": rollout,
            },
            "algorithm": {"adv_estimator": "grpo"},
            "data": {"train_batch_size": 32, "max_prompt_length": 100, "max_response_length": 200},
            "trainer": {
                "total_training_steps": 50,
                "n_gpus_per_node": 4,
                "nnodes": 2,
                "save_freq": -1,
            },
        }
    )
    assert migration.table["orchestrator"] == {
        "group_size": 4,
        "batch_size": 128,
        "algo": {"type": "grpo_std", "penalties": {"kl_to_initial": 0.001}},
        "train": {"sampling": {"temperature": 0.7, "max_completion_tokens": 200}},
    }
    assert migration.table["trainer"]["minibatches"] == 2
    assert migration.table["trainer"]["num_ranks"] == 8
    assert migration.table["seq_len"] == 300
    assert any(each.startswith("trainer.save_freq = -1: no value") for each in migration.left_out)
    assert any("rollout.top_p" in each for each in migration.left_out)


def of_verl(**actor):
    return {"actor_rollout_ref": {"actor": actor, "rollout": {"n": 8}}}


def test_a_config_of_verl_that_sets_no_clip_says_that_verl_clips():
    said = migrate(of_verl(optim={"lr": 1e-6})).defaults
    assert (
        'trainer.loss.type: "ppo_clip" there, "default" here; clip_ratio 0.2 and clip_ratio_c 3.0 '
        "there; a trust region here, without a clip"
    ) in said
    assert not any(each.startswith("trainer.loss.dual_clip") for each in said)

    said = migrate(of_verl(clip_ratio_high=0.28)).defaults
    assert not any(each.startswith("trainer.loss.type") for each in said)
    assert "trainer.loss.dual_clip: 3.0 there, not set here; clip_ratio_c there" in said


@pytest.mark.parametrize("uses", [None, False, True])
def test_the_penalty_of_verl_counts_only_where_it_uses_one(uses):
    switch = {} if uses is None else {"use_kl_loss": uses}
    given = of_verl(kl_loss_coef=0.001, kl_loss_type="low_var_kl", entropy_coeff=0.01, **switch)
    result = migrate(given | {"algorithm": {"adv_estimator": "grpo"}})
    expected = {"kl_to_initial": 0.001} if uses else {}
    assert result.table["orchestrator"]["algo"]["penalties"] == {"entropy_bonus": 0.01, **expected}
    assert ("losses" in result.table.get("trainer", {})) == bool(uses)
    assert any("only where use_kl_loss = true" in each for each in result.left_out) != bool(uses)


def test_keys_that_decide_together_are_not_left_out_too():
    migration = migrate(
        {
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 16, "optim": {"lr_warmup_steps_ratio": 0.1}},
                "rollout": {"n": 4},
            },
            "data": {"train_batch_size": 32, "max_prompt_length": 100, "max_response_length": 200},
            "trainer": {"total_training_steps": 50, "n_gpus_per_node": 4},
        }
    )
    assert not migration.left_out
    assert migration.carried["data", "train_batch_size"] == ["orchestrator.batch_size"]

    of_trl = {"per_device_train_batch_size": 8, "steps_per_generation": 2}
    migration = migrate({"learning_rate": 1e-6, "warmup_ratio": 0.5, "max_steps": 4, **of_trl})
    assert not migration.left_out
    assert migration.table["orchestrator"]["batch_size"] == 16


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        (None, {"type": "ppo_clip", "clip_eps_high": 0.28, "dual_clip": 10.0}),
        ("vanilla", {"type": "ppo_clip", "clip_eps_high": 0.28, "dual_clip": 10.0}),
        ("gspo", {"type": "gspo", "clip_eps_high": 0.28}),
        ("clip_cov", {"type": "clip_cov", "clip_eps_high": 0.28}),
        ("kl_cov", {"type": "kl_cov"}),
        ("geo_mean", {"type": "gmpo"}),
        ("cispo", {"type": "cispo", "clip_eps_high": 0.28}),
        ("sapo", {"type": "sapo"}),
    ],
)
def test_the_loss_of_verl_is_carried_over_with_the_keys_that_it_has(mode, loss):
    actor = {"clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "ppo_max_token_len_per_gpu": 16384}
    policy_loss = {} if mode is None else {"loss_mode": mode}
    given = {"actor": actor | {"policy_loss": policy_loss}, "rollout": {"n": 8}}
    assert accepted({"actor_rollout_ref": given})["trainer"]["loss"] == loss


@pytest.mark.parametrize(
    ("key", "value", "ours"),
    [
        ("model_init_kwargs", {"dtype": "bfloat16"}, ["trainer.dtype"]),
        ("generation_kwargs", {"seed": 3}, ["orchestrator.train.sampling.extra_body.seed"]),
        ("generation_kwargs", {"min_p": 0.1}, None),
        ("chat_template_kwargs", {"enable_thinking": False}, [RENDERS + "enable_thinking"]),
        ("lr_scheduler_kwargs", {"min_lr": 1e-7}, ["trainer.scheduler.min_lr"]),
        ("lr_scheduler_kwargs", {"num_cycles": 2}, None),
        ("peft_config", {"r": 16}, ["trainer.lora.rank"]),
        ("gradient_checkpointing_kwargs", {"use_reentrant": False}, None),
        ("fsdp_config", {"min_num_params": 1}, None),
        ("accelerator_config", {"split_batches": True}, None),
        ("deepspeed", {"zero_optimization": {"stage": 3}}, None),
        ("model", "org/Model", ["model.name"]),
        ("train_dataset", "org/data", None),
        ("load_in_4bit", True, None),
        ("dtype", "float32", ["trainer.dtype"]),
    ],
)
def test_tables_and_arguments_beside_grpo_config_are_known(key, value, ours):
    migration = migrate(as_whole({"learning_rate": 1e-6, key: value}))
    assert not migration.unknown
    others = [names for path, names in migration.carried.items() if path[0] != "learning_rate"]
    assert others == ([] if ours is None else [ours])
    assert len(migration.left_out) == (ours is None)


def test_yaml_reads_a_number_without_a_dot(tmp_path):
    from prime_rl_app.cli.migrate import read

    pytest.importorskip("yaml")
    rows = ["learning_rate: 1e-6", "seed: 3", "run_name: 1e-6b", "eps: 1.5e6", "hash: 12e4567"]
    (tmp_path / "grpo.yaml").write_text("\n".join(rows))
    numbers = {"learning_rate": 1e-6, "seed": 3, "eps": 1.5e6}
    assert read(tmp_path / "grpo.yaml") == numbers | {"run_name": "1e-6b", "hash": "12e4567"}


def test_the_configs_of_upstreams_processes_go_together():
    orchestrator = 'batch_size = 8\n[model]\nname = "a/b"\n[[train.source]]\nname = "x"\n'
    orchestrator += '[train.source.env.taskset]\nid = "y"\n'
    table = as_whole(tomllib.loads(orchestrator))
    assert migrate(table).table["orchestrator"]["train"]["env"] == [{"name": "x", "id": "y"}]
    assert as_whole({"optim": {"lr": 1.0}}) == {"trainer": {"optim": {"lr": 1.0}}}

    engines = as_whole(
        {
            "use_deep_gemm": True,
            "vllm": {"model": "a/b", "gpu_memory_utilization": 0.8},
            "router": {"type": "llm-d"},
            "slurm": {"job_name": "x"},
        }
    )
    migration = migrate(engines)
    assert not migration.unknown
    assert migration.table["inference"]["vllm"] == {"gpu_memory_utilization": 0.8}
    assert migration.table["model"] == {"name": "a/b"}
    assert migration.slurm == {"job_name": "x"}


def test_the_config_of_upstreams_evaluations_becomes_held_out_envs():
    source = {"name": "x", "env": {"taskset": {"id": "y"}}}
    of_evals = {"client": {"base_url": "https://a/v1"}, "concurrency": {"min_inflight": 3}}
    migration = migrate(as_whole({"model": "a/b", "eval": {**of_evals, "source": [source]}}))
    assert not migration.unknown
    assert migration.table["model"] == {"name": "a/b"}
    assert migration.table["orchestrator"]["eval"]["env"] == [{"name": "x", "id": "y"}]
    assert len([each for each in migration.left_out if "orchestrator.eval.c" in each]) == 2


FOREIGN = sorted({**PRIME_RL, **VERL, **NAMES})
NAMES_OF_PARTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
SIMPLE = st.one_of(
    st.booleans(),
    st.integers(-9, 9**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(["None", "vllm", "linear", "grpo", "wandb"]),
    st.builds(dict),
    st.lists(st.integers(), max_size=2),
)
LIST_PARTS = {"source", "env", "pre_batch_filters", "post_batch_filters", "filters"}


@st.composite
def foreign_tables(draw):
    """Tables of foreign keys, of ours and of random ones."""
    table = {}
    known = [*FOREIGN, *our_keys()]
    for _ in range(draw(st.integers(1, 6))):
        key = draw(st.sampled_from(known) | st.lists(NAMES_OF_PARTS, min_size=1, max_size=3))
        parts = key.split(".") if isinstance(key, str) else key
        path = []
        for part in parts:
            if part == "**":
                path += draw(st.lists(NAMES_OF_PARTS, max_size=2))
            else:
                path.append(draw(st.sampled_from(["train", "eval"])) if part == "*" else part)
        _write(table, path, draw(SIMPLE))
    return table


def _write(table, path, value):
    """A value at a path, with a list of one table for each part that is a list in TOML."""
    for place, part in enumerate(path[:-1]):
        is_list = part in LIST_PARTS and path[place - 1 : place] in (["train"], ["eval"])
        inner = table.get(part)
        if is_list and isinstance(inner, list) and inner:
            table = inner[0]
        elif isinstance(inner, dict):
            table = inner
        else:
            new = {}
            table[part] = [new] if is_list else new
            table = new
    table[path[-1]] = value


@settings(max_examples=300, deadline=None)
@given(foreign_tables())
def test_every_key_is_carried_over_left_out_with_a_note_or_refused_by_name(table):
    migration = migrate(table)
    told = [*migration.left_out, *migration.unknown]
    for path, _ in leaf_paths(as_whole(table)):
        names = [re.split(r" = |: ", each, maxsplit=1)[0] for each in told]
        key = ".".join(map(str, path))
        plain = [name.replace('"', "") for name in names]
        assert path in migration.carried or key in plain or any('"' in name for name in names), path
    assert all(": " in each for each in migration.left_out)
    text = written(migration, ["theirs.toml"])
    assert tomllib.loads(text) == migration.table, text


@pytest.mark.parametrize("key", ["orchestrator", "trainer", "inference", "orchestrator.train"])
@pytest.mark.parametrize("value", [False, 3, "text", [1]])
def test_a_value_where_a_table_belongs_is_refused_by_name(key, value):
    *folders, last = key.split(".")
    table = {last: value}
    for folder in folders:
        table = {folder: table}
    migration = migrate(table)
    assert [each.partition(" = ")[0] for each in migration.unknown] == [key]
    assert last not in migration.table or migration.table[last] != value


@given(st.sampled_from(sorted(VALUES)), SIMPLE)
def test_any_value_is_converted_or_left_out(pattern, value):
    VALUES[pattern](value)


SLURM = """
max_steps = 3
env_vars = { MY_PATH = "/a b", API_KEY = "sk-123" }
[model]
name = "a/b"
[slurm]
job_name = "mine"
partition = "prod"
pre_run_command = "uv sync"
template = "x.j2"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 3
gpus_per_node = 4
"""


def test_the_command_writes_a_config_and_a_batch_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "rl.toml").write_text(SLURM)
    mine = tmp_path / "mine.toml"
    words = ["prime-rl", "migrate", "@", str(tmp_path / "rl.toml"), "-o", str(mine)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    said = capsys.readouterr().err
    assert "left out" in said and f"prime-rl run {mine} --dry-run" in said
    text = mine.read_text()
    table = tomllib.loads(text)
    assert table["launcher"] == {"type": "ray"}
    assert table["trainer"]["num_ranks"] == 8 and table["deployment"] == {"trainer_nodes": 2}
    assert text.startswith("# Migrated from rl.toml by prime-rl migrate.") and "sk-123" not in text
    assert table["env_vars"] == {"MY_PATH": "/a b"}

    script = tmp_path / "mine.sbatch"
    lines = script.read_text().splitlines()
    assert not any("sk-123" in line for line in lines)
    for line in (
        "#SBATCH --job-name=mine",
        "#SBATCH --partition=prod",
        "#SBATCH --nodes=5",
        "#SBATCH --gpus-per-node=4",
        "export MY_PATH='/a b'",
        "# API_KEY is a secret: export it in the shell that calls sbatch.",
        "uv sync",
    ):
        assert line in lines
    assert any("template" in line and line.startswith("# Not used") for line in lines)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0

    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "exists already" in capsys.readouterr().err


def test_the_command_refuses_unknown_keys_by_name(tmp_path, monkeypatch, capsys):
    file = tmp_path / "rl.toml"
    file.write_text('max_steps = 1\nnonsense = 2\n[model]\nname = "a/b"\n[trainer.mine]\na = 1\n')
    monkeypatch.setattr("sys.argv", ["prime-rl", "migrate", str(file)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert "2 keys are neither ours" in said.err and "trainer.mine.a = 1" in said.err
    assert "#   nonsense = 2" in said.out


def test_yaml_is_read_too(tmp_path, monkeypatch, capsys):
    pytest.importorskip("yaml")
    file = tmp_path / "grpo.yaml"
    file.write_text("model_name_or_path: a/b\nnum_generations: 4\nmax_steps: 5\n")
    monkeypatch.setattr("sys.argv", ["prime-rl", "migrate", str(file)])
    with pytest.raises(SystemExit):
        main()
    table = tomllib.loads(capsys.readouterr().out)
    assert table == {
        "max_steps": 5,
        "model": {"name": "a/b"},
        "orchestrator": {"group_size": 4},
    }


def test_variables_logs_and_heartbeats_of_upstream_keep_their_place():
    result = migrate(
        {
            "max_steps": 1,
            "env_vars": {"A": "x", "MY_TOKEN": "t", "CUDA_VISIBLE_DEVICES": "0"},
            "log": {"json_logging": True},
            "trainer": {"env_vars": {"B": 1}, "heartbeat": {"url": "https://beat.example/1"}},
            "inference": {"env_vars": {"VLLM_CACHE_ROOT": "/tmp/v"}},
        }
    )
    table = result.table
    assert table["env_vars"] == {"A": "x"} and table["trainer"]["env_vars"] == {"B": "1"}
    assert table["inference"]["env_vars"] == {"VLLM_CACHE_ROOT": "/tmp/v"}
    assert table["log"] == {"json_logging": True}
    assert table["observers"] == {"heartbeat": {"url": "https://beat.example/1"}}
    assert "env_vars.MY_TOKEN: a secret; export it in the shell" in result.left_out
    assert any(line.startswith("env_vars.CUDA_VISIBLE_DEVICES") for line in result.left_out)
    assert not result.unknown


OF_THE_TRAINER = {
    *("train_dataset", "eval_dataset", "tools", "environment_factory", "prompt", "completions")
}
"""Names of the page that are no keys of a config: arguments of GRPOTrainer, columns of a reward."""


def names_of_trl():
    """The first column of the tables of docs/from-trl.md, which has each key of GRPOConfig."""
    page = (Path(__file__).parents[2] / "docs" / "from-trl.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    names = {name for row in rows for name in re.findall(r"`([a-z][a-z0-9_]+)`", row)}
    return sorted(names - OF_THE_TRAINER)


@pytest.mark.parametrize("name", names_of_trl())
def test_each_key_of_trls_config_is_known(name):
    result = migrate({"learning_rate": 1e-6, name: 1})
    assert not result.unknown


@pytest.mark.parametrize(
    ("table", "loss"),
    [
        (
            {"epsilon": 0.2, "epsilon_high": 0.28},
            {"type": "ppo_clip", "clip_eps_low": 0.2, "clip_eps_high": 0.28},
        ),
        (
            {"epsilon_high": 0.3, "epsilon": 0.1, "loss_type": "dr_grpo"},
            {
                "type": "dr_grpo",
                "clip_eps_low": 0.1,
                "clip_eps_high": 0.3,
                "constant": 128 * 256.0,
            },
        ),
        (
            {"epsilon": 3e-4, "importance_sampling_level": "sequence"},
            {"type": "gspo", "clip_eps_low": 3e-4, "clip_eps_high": 3e-4},
        ),
        (
            {"loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 5.0},
            {"type": "cispo", "clip_eps_high": 4.0},
        ),
        ({"loss_type": "sapo", "epsilon": 0.2}, {"type": "sapo"}),
        (
            {"loss_type": "sapo", "sapo_temperature_neg": 1.1},
            {"type": "sapo", "tau_neg": 1.1},
        ),
    ],
)
def test_the_clip_of_trl_is_that_of_the_loss_in_any_order(table, loss):
    for items in (table.items(), reversed(table.items())):
        assert migrate({"learning_rate": 1e-6, **dict(items)}).table["trainer"]["loss"] == loss


def test_a_secret_among_the_keys_left_out_is_not_written(tmp_path):
    result = migrate({"learning_rate": 1e-6, "hub_token": "hf_s3cret", "my_api_key": "s3cret"})
    assert "s3cret" not in written(result, ["theirs.toml"])


OF_VERL = {
    "data": {"train_batch_size": 16},
    "actor_rollout_ref": {
        "model": {"path": "a/b"},
        "actor": {
            "clip_ratio": 0.2,
            "clip_ratio_high": 0.28,
            "kl_loss_coef": 0.001,
            "optim": {"lr": 1e-6, "betas": [0.9, 0.95]},
        },
        "rollout": {"n": 8, "mode": "async"},
    },
    "critic": {"optim": {"lr": 1e-5}},
    "trainer": {"total_training_steps": 3},
}


def accepted(table):
    """The migrated table, after a run would have accepted it: on the tiny model, with one env."""
    table = migrate(table).table
    table["model"] = {"name": "tiny-reverse"}
    table["inference"] = {"engine": "embedded"}
    orchestrator = table.setdefault("orchestrator", {})
    orchestrator["renderer"] = {"name": "qwen3", "enable_thinking": False}
    orchestrator.setdefault("train", {})["env"] = [{"id": "text-reversal"}]
    check(build_config({"max_steps": 3, **table}))
    return table


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", None])
@pytest.mark.parametrize("scale", [True, False, "none", None])
@pytest.mark.parametrize("more", [{}, {"beta": 0.04}, {"importance_sampling_level": "sequence"}])
def test_a_run_accepts_what_becomes_of_trls_losses(loss_type, scale, more):
    given = {"loss_type": loss_type, "scale_rewards": scale}
    known = {key: value for key, value in given.items() if value is not None}
    table = accepted({"num_generations": 8, "learning_rate": 1e-6, "epsilon": 0.2} | known | more)
    algorithm = table["orchestrator"].get("algo", {}).get("type", "grpo")
    assert algorithm == (
        "grpo_std" if scale is True or (scale is None and "beta" in more) else "grpo"
    )
    loss = table["trainer"]["loss"]
    if loss["type"] == "dr_grpo":
        assert loss["constant"] == 128 * 256.0


@pytest.mark.parametrize("divides", [True, False, None])
@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus", "opo"])
def test_a_run_accepts_what_becomes_of_verls_estimators(estimator, divides):
    algorithm = {"adv_estimator": estimator, "gamma": 1.0}
    if divides is not None:
        algorithm["norm_adv_by_std_in_grpo"] = divides
    table = accepted({**OF_VERL, "algorithm": algorithm})
    chosen = table["orchestrator"]["algo"]["type"]
    assert (chosen == "grpo") == (estimator == "grpo" and divides is False)
    assert ("heads" in table["trainer"]) == (estimator == "gae")
    assert table["trainer"]["loss"]["clip_eps_high"] == 0.28
    assert table["trainer"]["optim"] == {"lr": 1e-6, "beta1": 0.9, "beta2": 0.95}


OF_SFT = """
max_steps = 20
[model]
name = "a/b"
seq_len = 512
attn = "sdpa"
[model.lora]
rank = 8
[data]
name = "a/c"
subsets = ["x"]
splits = ["train[:90%]"]
batch_size = 64
micro_batch_size = 1
seq_len = 1024
shuffle = false
[data.loss_mask]
user = true
[val]
interval = 5
[val.data]
name = "a/d"
[optim]
type = "muon"
lr = 1e-5
[scheduler]
type = "cosine"
[deployment]
num_train_gpus = 2
"""


def test_a_config_of_supervised_fine_tuning_becomes_a_table_sft(tmp_path, monkeypatch, capsys):
    file = tmp_path / "sft.toml"
    file.write_text(OF_SFT)
    made = tmp_path / "mine.toml"
    monkeypatch.setattr("sys.argv", ["prime-rl", "migrate", str(file), "-o", str(made)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 0
    assert f"prime-rl sft {made} --dry-run" in said and "to complete" not in said
    table = tomllib.loads(made.read_text("utf-8"))
    assert table["sft"] == {
        "data": "a/c",
        "subset": "x",
        "split": "train[:90%]",
        "batch_size": 64,
        "shuffle": False,
        "roles": ["user", "assistant"],
        "validate_every": 5,
        "validation": "a/d",
    }
    assert (table["max_steps"], table["seq_len"], table["model"]) == (20, 1024, {"name": "a/b"})
    trainer = table["trainer"]
    assert trainer["optim"] == {"type": "muon", "lr": 1e-5}
    assert trainer["lora"] == {"rank": 8} and trainer["scheduler"] == {"type": "cosine"}
    assert trainer["num_ranks"] == 2 and "orchestrator" not in table
    comments = made.read_text("utf-8")
    assert "trainer.optim.beta2: 0.95 there" in comments  # of muon, as for RL
    assert "orchestrator.group_size" not in comments


def test_data_sets_that_are_mixed_are_left_out_of_sft_and_named():
    data = {"name": "a/c", "subsets": ["x", "y"], "probabilities": [0.5, 0.5]}
    made = migrate({"model": {"name": "a/b"}, "data": data})
    assert made.table["sft"] == {"data": "a/c"} and not made.unknown
    assert any("data.subsets" in each and "one data set" in each for each in made.left_out)
    assert any("sft.epochs" in each for each in made.defaults)


def test_sft_with_evaluations_gets_their_envs_and_an_engine():
    table = {
        "model": {"name": "a/b"},
        "data": {"name": "a/c"},
        "eval": {"interval": 25, "source": [{"env": {"taskset": {"id": "reverse-text"}}}]},
        "inference": {},
    }
    made = migrate(table)
    assert made.table["orchestrator"]["eval"]["env"] == [{"interval": 25, "id": "reverse-text"}]
    assert made.table["inference"] == {"engine": "vllm"}


def test_a_compiled_trainer_gives_way_to_router_replay():
    trainer = {"enable_router_replay": True, "model": {"compile": {}}}
    made = migrate({"model": {"name": "a/b"}, "trainer": trainer, "orchestrator": {}})
    assert made.table["trainer"] == {"router_replay": True}
    assert any("trainer.router_replay needs" in each for each in made.left_out)


def nested(key, value):
    """A table with one value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


NULLABLE = {
    "upstream": [
        *("output_dir", "max_steps", "run.name", "monitors.wandb.project", "ckpt.interval"),
        *("trainer.optim.max_norm", "inference.vllm.max_model_len", "env_vars.MY_PATH"),
        "deployment.num_train_gpus",
    ],
    "trl": [
        *("output_dir", "run_name", "max_grad_norm", "epsilon", "epsilon_high", "beta"),
        *("max_completion_length", "generation_kwargs.stop", "eval_on_start", "loss_type"),
        *("report_to", "use_vllm", "lora_r", "lora_target_modules"),
    ],
    "verl": [
        *("trainer.project_name", "trainer.logger", "trainer.total_training_steps"),
        *("trainer.val_before_train", "algorithm.adv_estimator", "data.max_response_length"),
        *("actor_rollout_ref.rollout.max_model_len", "actor_rollout_ref.actor.grad_clip"),
        *("actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio"),
        *("actor_rollout_ref.actor.optim.betas", "actor_rollout_ref.actor.entropy_coeff"),
    ],
}
OTHERWISE = {
    "upstream": {"model": {"name": "a/b"}, "orchestrator": {"seed": 1}},
    "trl": {"learning_rate": 1e-6},
    "verl": {"actor_rollout_ref": {"model": {"path": "a/b"}}},
}


@pytest.mark.parametrize(("null", "shown"), [(None, "null"), ("None", '"None"')])
@pytest.mark.parametrize(
    ("source", "key"), [(source, key) for source, keys in NULLABLE.items() for key in keys]
)
def test_a_null_is_left_out_as_no_value(source, key, null, shown):
    made = migrate(merge(OTHERWISE[source], nested(key, null)))
    assert made.table == migrate(OTHERWISE[source]).table
    assert f"{key} = {shown}: no value, as by default" in made.left_out
    assert not made.unknown


def test_a_list_with_a_null_is_left_out():
    betas = nested("actor_rollout_ref.actor.optim.betas", [None, 0.9])
    made = migrate(merge(OTHERWISE["verl"], betas))
    assert "optim" not in made.table.get("trainer", {})
    key = "actor_rollout_ref.actor.optim.betas"
    assert f"{key} = [null, 0.9]: TOML has no null, and so no list with one" in made.left_out


def test_a_null_in_the_arguments_of_an_env_is_left_out():
    args = {"first": None, "choices": ["a", None], "judge": {"name": None, "tries": 2}}
    made = migrate({"orchestrator": {"train": {"env": [{"id": "x", "args": args}, None]}}})
    assert made.table["orchestrator"]["train"]["env"] == [
        {"id": "x", "args": {"judge": {"tries": 2}}}
    ]
    assert len(made.left_out) == 4 and not made.unknown


def test_a_null_switches_off_what_upstream_has_on():
    off = {"trainer": {"model": {"compile": "None", "ac": None}}}
    made = migrate(off).table["trainer"]
    assert made == {"compile": False, "activation_checkpointing": 0}


OF_A_TRAINER = """
max_steps = 500
[model]
name = "a/b"
attn = "flash_attention_2"
cp = 2
seq_len = 4096
[model.lora]
rank = 8
[model.ac]
[model.compile]
[model.moe.dispatch]
type = "torch"
"""


@pytest.mark.parametrize("more", ["", "[optim]\nlr = 1e-5\n", "dist_timeout_seconds = 5\n"])
def test_a_config_of_the_trainer_alone_has_the_trainers_model(more):
    made = migrate({**tomllib.loads(OF_A_TRAINER), **tomllib.loads(more)})
    trainer = made.table["trainer"]
    assert made.table["model"] == {"name": "a/b"} and not made.unknown
    optim = trainer.pop("optim", None)
    assert optim == ({"lr": 1e-5} if "optim" in more else None)
    assert trainer == {
        "context_parallel": 2,
        "micro_batch_tokens": 4096,
        "lora": {"rank": 8},
        "activation_checkpointing": 1,
        "compile": True,
    }
    left = "\n".join(made.left_out)
    assert "trainer.model.attn = " in left and "trainer.model.moe.dispatch.type = " in left


def test_keys_of_the_trainers_model_are_known_in_the_model_of_a_run():
    table = tomllib.loads(OF_A_TRAINER + "[trainer.optim]\nlr = 1e-5\n")
    del table["model"]["moe"]
    made = migrate(table)
    assert made.table["model"] == {"name": "a/b"} and not made.unknown
    assert made.table["trainer"]["lora"] == {"rank": 8}
    assert made.table["trainer"]["context_parallel"] == 2


def test_a_config_of_engines_alone_has_their_model():
    table = {
        "gpu_memory_utilization": 0.8,
        "model": {"name": "a/b", "enforce_eager": True, "max_model_len": 4096},
        "server": {"port": 8001},
        "parallel": {"tp": 2},
        "deployment": {"type": "single_node"},
    }
    made = migrate(table)
    assert made.table["model"] == {"name": "a/b"} and not made.unknown
    vllm = {"gpu_memory_utilization": 0.8, "enforce_eager": True, "tensor_parallel_size": 2}
    engine = {"engine": "vllm", "port": 8001, "max_model_len": 4096}
    assert made.table["inference"] == {**engine, "vllm": vllm}


def run_migrate(monkeypatch, capsys, *words):
    """Exit code, standard output and error output of the command."""
    monkeypatch.setattr("sys.argv", ["prime-rl", "migrate", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr()
    return end.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none/mine.toml", "no such folder"),
        ("rl.toml/mine.toml", "cannot be written: Not a directory"),
        ("rl.toml", "exists already. Give another name, or delete it."),
        (".", "exists already. Give another name, or delete it."),
        ("mine.sbatch", "the name of the batch file. Give another name."),
        ("mine.toml", "exists already. Give another name, or delete it."),  # its batch file does
    ],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys, name, why):
    monkeypatch.chdir(tmp_path)
    Path("rl.toml").write_text(SLURM)
    if name == "mine.toml":
        Path("mine.sbatch").write_text("kept")
    before = sorted(tmp_path.iterdir())
    code, _, said = run_migrate(monkeypatch, capsys, "rl.toml", "-o", name)
    assert code == 2
    file = "mine.sbatch" if name == "mine.toml" else name
    assert said == f"error: -o {file}: {why}\n"
    assert sorted(tmp_path.iterdir()) == before
    assert Path("rl.toml").read_text() == SLURM


@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
@pytest.mark.parametrize(
    "data", [None, "folder", b"\xff\xfe", b"[[[", b"- 1", b"{", b"", b"a: &a [*a]"], ids=repr
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch, capsys, suffix, data):
    pytest.importorskip("yaml")
    file = tmp_path / f"theirs{suffix}"
    if data == "folder":
        file.mkdir()
    elif data is not None:
        file.write_bytes(data)
    code, _, said = run_migrate(monkeypatch, capsys, file)
    if (suffix, data) == (".toml", b""):
        assert code == 0
    else:
        assert code == 2 and said.startswith(f"error: {file}") and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {1: x}", "a: the key 1 is no text. Write it in quotes."),
        ("on: x", "the key True is no text. Write it in quotes."),
        ("a: [!!binary aGk=]", "a.0: TOML has no value of type bytes"),
        (r'a: "\ud800"', "a: 'utf-8' codec can't encode"),
        ("a: !!set {x}", "a: TOML has no value of type set"),
    ],
)
def test_yaml_that_is_no_toml_is_refused_by_name(tmp_path, text, said):
    from prime_rl_app.cli.migrate import read

    pytest.importorskip("yaml")
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: not a YAML file: {said}")):
        read(file)


EVALUATION = """
model = "a/b"
num_examples = 20
group_size = 3
[client]
base_url = "http://a/v1"
[sampling]
max_completion_tokens = 512
"""
EVALUATED = {
    "source": """
[[source]]
name = "search"
env.taskset.id = "wiki"
env.agent.harness.id = "null"
""",
    "env": '[[env]]\nid = "wiki"\nname = "search"\nharness.id = "null"\n',
}


@pytest.mark.parametrize("form", EVALUATED)
def test_evaluations_at_the_top_level_are_those_of_the_table_eval(form):
    table = tomllib.loads(EVALUATION + EVALUATED[form])
    made = migrate(table)
    model = table.pop("model")
    assert made == migrate({"model": model, "eval": table})
    assert made.table["model"] == {"name": "a/b"} and not made.unknown
    assert made.table["orchestrator"]["eval"] == {
        "sampling": {"max_completion_tokens": 512},
        "env": [
            {
                "id": "wiki",
                "name": "search",
                "harness": {"id": "null"},
                "num_examples": 20,
                "group_size": 3,
            }
        ],
    }
    assert any("prime-rl eval --base-url" in each for each in made.left_out)


@pytest.mark.parametrize(
    "env", ['[environment]\nid = "y"\n', '[env]\nid = "y"\n', '[[env]]\nid = "y"\n']
)
def test_a_config_of_the_orchestrator_alone_keeps_its_sampling(env):
    top = "batch_size = 8\nrollouts_per_example = 4\n"
    table = tomllib.loads(f"{top}[sampling]\ntemperature = 0.6\nmax_tokens = 64\n{env}")
    for model in ({}, {"model": {"name": "a/b"}}):
        made = migrate({**table, **model})
        assert made.table["orchestrator"] == {
            "batch_size": 8,
            "group_size": 4,
            "train": {
                "sampling": {"temperature": 0.6, "max_completion_tokens": 64},
                "env": [{"id": "y"}],
            },
        }
        assert not made.unknown and not made.left_out


def test_an_env_written_as_one_table_is_not_lost():
    env = {"id": "x", "args": {"depth": 2}}
    made = migrate({"orchestrator": {"train": {"env": env}, "eval": {"env": env, "interval": 5}}})
    assert made.table["orchestrator"]["train"]["env"] == [env]
    assert made.table["orchestrator"]["eval"]["env"] == [{**env, "interval": 5}]


def of_verls_model(**model):
    return {"actor_rollout_ref": {"model": {"path": "a/b", **model}, "rollout": {"n": 8}}}


@pytest.mark.parametrize(
    ("table", "lora"),
    [
        (of_verls_model(lora_rank=0, lora_alpha=16, target_modules="all-linear"), None),
        (of_verls_model(lora_alpha=16, target_modules=["q_proj"]), None),
        (of_verls_model(lora_rank=None, lora_alpha=16), None),
        (of_verls_model(lora_rank=-1), None),
        (
            of_verls_model(lora_rank=8, lora_alpha=16, target_modules="all-linear"),
            {"rank": 8, "alpha": 16},
        ),
        (
            of_verls_model(lora_rank=8, target_modules=["q_proj"]),
            {"rank": 8, "target_modules": ["q_proj"]},
        ),
        ({"learning_rate": 1.0, "lora_r": 0}, None),
        ({"learning_rate": 1.0, "lora_r": 16, "lora_alpha": 32}, None),
        ({"learning_rate": 1.0, "lora_r": 16, "use_peft": False}, None),
        ({"learning_rate": 1.0, "lora_r": 0, "use_peft": True}, None),
        ({"learning_rate": 1.0, "lora_r": 8, "use_peft": True}, {"rank": 8}),
        ({"learning_rate": 1.0, "use_peft": True}, {}),
        (
            {"learning_rate": 1.0, "use_peft": True, "use_rslora": True},
            {"use_rslora": True},
        ),
        (
            {"learning_rate": 1.0, "use_peft": True, "lora_target_modules": ["all-linear"]},
            {},
        ),
        ({"actor_learning_rate": 1.0, "lora_rank": 8}, {"rank": 8}),  # of OpenRLHF
        ({"actor_learning_rate": 1.0, "lora_rank": 0, "lora_alpha": 16}, None),
        ({"learning_rate": 1.0, "peft_config": {"r": 8, "lora_alpha": 4}}, {"rank": 8, "alpha": 4}),
        ({"model": {"name": "a/b"}, "trainer": {"model": {"lora": {"rank": 0}}}}, None),
    ],
)
def test_an_adapter_is_there_where_the_other_framework_trains_one(table, lora):
    made = migrate(table)
    assert made.table.get("trainer", {}).get("lora") == lora
    assert not made.unknown
    if lora is None:
        assert not any("trainer.lora" in each for names in made.carried.values() for each in names)
    accepted(table)


@pytest.mark.parametrize(
    ("logger", "monitors"),
    [
        (None, {"wandb": {"project": "p"}}),  # console and wandb by default
        (["console", "wandb"], {"wandb": {"project": "p"}}),
        ("wandb", {"wandb": {"project": "p"}}),
        (["console"], None),
        ([], None),
        ("console", None),
        (["console", "tensorboard"], {"tensorboard": {}}),
        (["wandb", "swanlab"], {"wandb": {"project": "p"}}),
    ],
)
def test_verls_project_counts_where_its_numbers_go_to_wandb(logger, monitors):
    trainer = {"project_name": "p"} | ({} if logger is None else {"logger": logger})
    made = migrate({**of_verls_model(), "trainer": trainer})
    assert made.table.get("monitors") == monitors and not made.unknown
    named = [each for each in made.left_out if each.startswith("trainer.project_name")]
    assert len(named) == ("wandb" not in (monitors or {}))
    assert any("swanlab" in each for each in made.left_out) == ("swanlab" in (logger or []))


@pytest.mark.parametrize(
    ("report_to", "monitors"),
    [
        ("none", None),
        ("all", {"wandb": {"project": "p"}}),
        (["wandb"], {"wandb": {"project": "p"}}),
        (["tensorboard", "mlflow"], {"tensorboard": {}}),
    ],
)
def test_a_project_of_trl_counts_where_it_reports_to_wandb(report_to, monitors):
    made = migrate({"learning_rate": 1.0, "wandb_project": "p", "report_to": report_to})
    assert made.table.get("monitors") == monitors
    assert any("mlflow" in each for each in made.left_out) == ("mlflow" in report_to)


@pytest.mark.parametrize("place", ["train.env", "env", "eval.env"])
@pytest.mark.parametrize("runtime", ["subprocess", "docker"])
def test_an_env_with_a_taskset_is_one_with_an_id_and_arguments(place, runtime):
    env = """
name = "search"
taskset = { id = "wiki", k = 3, filter.max = 0.5 }
harness = { id = "null", tries = 2, runtime = { type = "RUNTIME", labels = ["x"] } }
num_workers = 4
"""
    text = f"[[orchestrator.{place}]]{env.replace('RUNTIME', runtime)}"
    made = migrate(tomllib.loads(text))
    orchestrator = made.table["orchestrator"]
    kind = "docker" if runtime == "docker" else None
    of_agent = {"labels": ["x"]} if kind is None else {"type": kind, "labels": ["x"]}
    assert orchestrator["eval" if place == "eval.env" else "train"]["env"] == [
        {
            "name": "search",
            "id": "wiki",
            "args": {"k": 3, "filter": {"max": 0.5}, "agent": {"runtime": of_agent}},
            "harness": {"id": "null", "tries": 2},
            "env_workers": 4,
        }
    ]
    assert not made.unknown
    assert made.left_out == (
        [f'orchestrator.{place}.0.harness.runtime.type = "subprocess": as by default']
        if kind is None
        else []
    )


def test_a_key_that_a_translated_table_does_not_have_is_refused_by_name():
    made = migrate(
        tomllib.loads("""
[orchestrator.sampling]
temperature = 0.5
nonsense = 1
[[orchestrator.train.source]]
env.taskset.id = "x"
nonsense = 2
""")
    )
    assert made.unknown == [
        "orchestrator.sampling.nonsense = 1",
        "orchestrator.train.source.0.nonsense = 2",
    ]
    train = {"sampling": {"temperature": 0.5}, "env": [{"id": "x"}]}
    assert made.table["orchestrator"]["train"] == train


def test_sources_of_data_become_the_data_of_sft():
    text = '[model]\nname = "a/b"\n[data]\nbatch_size = 4\n[[data.source]]\ndataset = "a/c"\n'
    text += 'ratio = 0.3\n[eval.select]\nlimit = -1\n[[eval.source]]\nenv.taskset.id = "x"\n'
    made = migrate(tomllib.loads(text))
    assert made.table["sft"] == {"batch_size": 4, "data": "a/c"}
    assert made.table["orchestrator"]["eval"]["env"] == [{"id": "x", "num_examples": 1_000_000}]
    assert not made.unknown and len(made.left_out) == 1

    made = migrate(tomllib.loads(text + '[[data.source]]\ndataset = "a/d"\nsplit = "x"\n'))
    assert 'data.source.1.dataset = "a/d": sft.data is "a/c" already' in made.left_out


@pytest.mark.parametrize("place", ["algo", "train.source", "train.env"])
def test_an_algorithm_that_reads_a_data_set_is_left_out_for_sft(place):
    algo = {"type": "dataset_sft", "dataset": {"name": "a/c"}}
    orchestrator = {"algo": algo, "max_inflight_episodes": 128}
    if place == "train.source":
        orchestrator["train"] = {"source": [{"name": "x", "algo": orchestrator.pop("algo")}]}
    elif place == "train.env":
        orchestrator["train"] = {"env": [{"name": "x", "algo": orchestrator.pop("algo")}]}
    made = migrate({"orchestrator": orchestrator, "trainer": {"loss": {"type": "sft"}}})
    train = {"train": {"env": [{"name": "x"}]}} if place != "algo" else {}
    assert made.table["orchestrator"] == {"max_inflight_rollouts": 128, **train}
    assert "trainer" not in made.table and not made.unknown
    assert sum("[sft]" in each for each in made.left_out) == 2
    assert any('orchestrator.algo.type = "sft"' in each for each in made.left_out)


def test_a_teacher_that_samples_is_the_algorithm_sft():
    text = """
[orchestrator]
use_token_client = false
[orchestrator.teacher_rollout_model.client]
base_url = ["https://a.example/v1"]
skip_model_check = true
headers = { X-Team = "one" }
[orchestrator.teacher_rollout_model.model]
name = "teacher"
[trainer.loss]
type = "sft"
"""
    table = accepted(tomllib.loads(text))
    assert table["orchestrator"]["algo"] == {
        "type": "sft",
        "sampling": {
            "source": {
                "name": "teacher",
                "base_url": ["https://a.example/v1"],
                "headers": {"X-Team": "one"},
            }
        },
    }
    assert "loss" not in table.get("trainer", {})


def changed(table, path, value):
    """A copy with another value at a path."""
    if not path:
        return value
    copy = table.copy()
    copy[path[0]] = changed(table[path[0]], path[1:], value)
    return copy


def places(table, path=()):
    """The path of every value: of tables, of lists, of their entries."""
    if path:
        yield path
    items = (
        table.items()
        if isinstance(table, dict)
        else enumerate(table)
        if isinstance(table, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


VERL_WHOLE = {
    "data": {
        "train_files": "a.parquet",
        "max_prompt_length": 512,
        "max_response_length": 1024,
        "train_batch_size": 256,
    },
    "actor_rollout_ref": {
        "hybrid_engine": True,
        "model": {"path": "a/b", "lora_rank": 8, "lora_alpha": 16, "target_modules": ["q_proj"]},
        "actor": {
            "ppo_mini_batch_size": 64,
            "ppo_max_token_len_per_gpu": 16384,
            "grad_clip": 1.0,
            "clip_ratio": 0.2,
            "clip_ratio_high": 0.28,
            "clip_ratio_c": 3.0,
            "loss_agg_mode": "token-mean",
            "entropy_coeff": 0.01,
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "policy_loss": {"loss_mode": "gspo"},
            "optim": {
                "lr": 1e-06,
                "lr_warmup_steps_ratio": 0.1,
                "betas": [0.9, 0.99],
                "lr_scheduler_type": "constant",
            },
        },
        "rollout": {
            "name": "vllm",
            "n": 8,
            "max_model_len": 4096,
            "tensor_model_parallel_size": 2,
            "val_kwargs": {"n": 1},
        },
    },
    "algorithm": {"adv_estimator": "grpo", "gamma": 1.0, "norm_adv_by_std_in_grpo": True},
    "critic": {"optim": {"lr": 1e-05}},
    "trainer": {
        "total_training_steps": 30,
        "project_name": "p",
        "experiment_name": "e",
        "logger": ["console", "wandb"],
        "nnodes": 1,
        "n_gpus_per_node": 8,
        "save_freq": 20,
        "test_freq": 5,
        "val_before_train": True,
    },
}
TRL_WHOLE = {
    "model_name_or_path": "a/b",
    "learning_rate": 1e-06,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_prompt_length": 512,
    "max_completion_length": 1024,
    "loss_type": "dapo",
    "importance_sampling_level": "sequence",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.04,
    "bf16": True,
    "gradient_checkpointing": True,
    "max_steps": 100,
    "warmup_ratio": 0.1,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "report_to": ["wandb"],
    "wandb_project": "p",
    "use_peft": True,
    "lora_r": 8,
    "lora_target_modules": ["q_proj"],
    "eval_steps": 5,
    "scale_rewards": "group",
    "optim": "adamw_torch",
    "model_init_kwargs": {"dtype": "bfloat16"},
    "generation_kwargs": {"seed": 3},
    "run_name": "r",
    "output_dir": "o",
}
DISTILLED = """
[slurm]
job_name = "x"
partition = "p"
pre_run_command = "true"
[deployment]
type = "multi_node"
num_train_nodes = 2
num_infer_nodes = 3
gpus_per_node = 4
[env_vars]
A = "x"
[orchestrator]
batch_size = 8
use_token_client = false
[orchestrator.teacher_rollout_model.client]
base_url = ["https://a.example/v1"]
[orchestrator.teacher_rollout_model.model]
name = "teacher"
[[orchestrator.train.env]]
taskset = { id = "x", k = 3 }
[[orchestrator.pre_batch_filters]]
type = "gibberish"
"""


OTHER_TYPES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(allow_nan=False),
    st.sampled_from(["", "x", "2", "gae", "dr_grpo", "multi_node", "a b", "1e9", "$(x)"]),
    st.sampled_from([[], [1], ["x"], [None], [{}], [{"id": "b"}, 5], [[1], {"a": 1}], [[]]]),
    st.sampled_from([{}, {"a": None}, {"id": "x"}, {"a": {"b": [1]}}, {"name": 3}]),
)


def written_at(table, parts):
    """Whether a migrated table has a key, in any entry of a list."""
    if not parts:
        return True
    if isinstance(table, list):
        rest = parts[1:] if isinstance(parts[0], int) else parts
        return any(written_at(each, rest) for each in table)
    part = parts[0] if isinstance(parts[0], str) else None
    return isinstance(table, dict) and part in table and written_at(table[part], parts[1:])


def values_of(table):
    inner = table.values() if isinstance(table, dict) else table if isinstance(table, list) else ()
    for value in inner:
        yield value
        yield from values_of(value)


WHOLE = {
    "upstream": tomllib.loads(UPSTREAM),
    "slurm": tomllib.loads(DISTILLED),
    "sft": tomllib.loads(OF_SFT),
    "trainer": tomllib.loads(OF_A_TRAINER),
    "evaluation": tomllib.loads(EVALUATION + EVALUATED["source"]),
    "verl": VERL_WHOLE,
    "trl": TRL_WHOLE,
}


@st.composite
def changed_tables(draw):
    """A config in which one value, table or list is something else."""
    whole = draw(st.sampled_from([*WHOLE.values()]))
    return changed(whole, draw(st.sampled_from([*places(whole)])), draw(OTHER_TYPES))


@settings(max_examples=200, deadline=None)
@given(changed_tables())
def test_a_value_of_another_type_is_translated_or_named(table):
    before = json.dumps(table)
    try:
        result = migrate(table)
        text = written(result, ["theirs.toml"])
        sbatch(result, table, config="mine.toml", script="mine.sbatch")
    except ConfigError as error:
        assert re.match(r"(deployment\.\w+|slurm(\.\w+)?): ", str(error))
        return

    assert json.dumps(table) == before
    assert json.dumps(tomllib.loads(text), sort_keys=True) == json.dumps(
        result.table, sort_keys=True
    )
    assert not any(value is None or value == "None" for value in values_of(result.table))
    told = [
        re.split(r" = |: ", each)[0].replace('"', "")
        for each in (*result.left_out, *result.unknown)
    ]
    for leaf, _ in leaf_paths(as_whole(table)):
        assert leaf in result.carried or ".".join(map(str, leaf)) in told, leaf
    for names in result.carried.values():
        for each in names:
            assert written_at(result.table, path_of(each)), each


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(table=changed_tables())
def test_the_command_ends_with_a_message_for_any_value(table, tmp_path, monkeypatch, capsys):
    yaml = pytest.importorskip("yaml")
    for file in tmp_path.iterdir():
        file.unlink()
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(yaml.safe_dump(table))
    made = tmp_path / "made.toml"
    code, _, said = run_migrate(monkeypatch, capsys, theirs, "-o", made)
    assert code in (0, 2)
    if not made.exists():
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1
        return
    try:
        build_config(without_data(tomllib.loads(made.read_text())))
    except ConfigError as error:
        assert said.count("to complete: ") >= len(str(error).splitlines())


@pytest.mark.parametrize("key", ["num_train_nodes", "num_infer_nodes", "gpus_per_node"])
def test_numbers_of_machines_are_numbers(key, tmp_path, monkeypatch, capsys):
    table = tomllib.loads(SLURM)
    plain = migrate(table)
    script = sbatch(plain, table, config="mine.toml", script="mine.sbatch")
    table["deployment"][key] = str(table["deployment"][key])  # in quotes
    made = migrate(table)
    assert made.table["trainer"] == plain.table["trainer"] == {"num_ranks": 8}
    assert sbatch(made, table, config="mine.toml", script="mine.sbatch") == script

    text = re.sub(rf"{key} = \d", f'{key} = "two"', SLURM)
    (tmp_path / "rl.toml").write_text(text)
    words = [tmp_path / "rl.toml", "-o", tmp_path / "mine.toml"]
    code, _, said = run_migrate(monkeypatch, capsys, *words)
    assert code == 2
    assert said.startswith(f"error: {tmp_path / 'rl.toml'}:")
    assert said.endswith(f'deployment.{key}: expected a number above 0, got "two"\n')
    assert [each.name for each in tmp_path.iterdir()] == ["rl.toml"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("job_name = [1]", "slurm: [1] is no value of sbatch's option --job-name"),
        ("pre_run_command = 5", "slurm.pre_run_command: expected a text, got 5"),
    ],
)
def test_values_that_sbatch_does_not_take_are_refused(line, said):
    table = {"slurm": tomllib.loads(line)}
    with pytest.raises(ConfigError, match=re.escape(said)):
        sbatch(migrate(table), table, config="mine.toml", script="mine.sbatch")


@pytest.mark.parametrize("part", ["train", "eval"])
@pytest.mark.parametrize("name", ["env", "source"])
def test_an_entry_that_is_no_table_is_refused_by_name(part, name):
    envs = [{"id" if name == "env" else "name": "b"}, 5]
    made = migrate({"orchestrator": {part: {name: envs}}})
    assert made.unknown == [f"orchestrator.{part}.{name}.1 = 5"]
    assert made.table["orchestrator"][part]["env"] == envs[:1]
    made = migrate({"orchestrator": [{"batch_size": 3}], "max_steps": [{"a": 1}]})
    assert made.unknown == ["orchestrator.0.batch_size = 3", "max_steps.0.a = 1"]


def test_variables_without_the_name_of_one_are_refused():
    made = migrate({"env_vars": {"a b": "x", "A": {"B": "y"}, "C": "z"}})
    assert made.table["env_vars"] == {"C": "z"} and made.env_vars == {"C": "z"}
    assert made.unknown == ['env_vars."a b" = "x"', 'env_vars.A.B = "y"']


def test_max_steps_of_trl_without_a_limit_is_left_out():
    made = migrate({"learning_rate": 1.0, "max_steps": -1})
    assert "max_steps" not in made.table
    assert made.left_out == ["max_steps = -1: no value of max_steps"]


def test_the_mean_of_the_loss_is_left_out_where_the_loss_has_its_own():
    actor = {"loss_agg_mode": "token-mean", "policy_loss": {"loss_mode": "gspo"}}
    made = migrate(of_verl(**actor))
    assert made.table["trainer"]["loss"] == {"type": "gspo"}
    assert any(each.startswith("actor_rollout_ref.actor.loss_agg_mode") for each in made.left_out)


@pytest.mark.parametrize("experts", [True, 8, False, 1])
def test_a_compiled_trainer_gives_way_to_ranks_that_exchange_tokens(experts):
    model = {"compile": {}, "ep": experts}
    table = {"model": {"name": "a/b"}, "trainer": {"model": model}, "orchestrator": {}}
    made = migrate(table)
    compiles = experts in (False, 1) and experts is not True
    assert made.table["trainer"].get("compile") == (True if compiles else None)
    assert any("exchange tokens" in each for each in made.left_out) != compiles
    build_config(made.table)


OF_PLUGINS = """
max_steps = 3
[model]
name = "a/b"
foo = 1
[trainer.loss]
type = "nonsense"
[trainer.optim]
betas9 = 3
[trainer.lora]
rank = "a"
[orchestrator.sampler]
type = "other_sampler"
[orchestrator.algo]
type = "other"
[[orchestrator.train.env]]
id = "x"
"""


def test_what_a_run_refuses_in_the_tables_of_plugins_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "rl.toml").write_text(OF_PLUGINS)
    made = tmp_path / "mine.toml"
    code, _, said = run_migrate(monkeypatch, capsys, tmp_path / "rl.toml", "-o", made)
    assert code == 0 and "check it" not in said
    problems = [line for line in said.splitlines() if line.startswith(f"to complete: {made}:")]
    for words in ("'nonsense'", "betas9", "'lora'", "'other'", "'other_sampler'", "model.foo"):
        assert sum(words in line for line in problems) == 1, words
    assert len(problems) == 6

    (tmp_path / "rl.toml").write_text(UPSTREAM)
    code, _, said = run_migrate(
        monkeypatch, capsys, tmp_path / "rl.toml", "-o", tmp_path / "good.toml"
    )
    assert code == 0 and "check it: prime-rl run" in said and "to complete" not in said
