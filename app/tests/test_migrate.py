"""``prime-rl migrate``: nothing of a foreign config vanishes in silence."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.config.run import RunConfig
from prime_rl_app.cli import main
from prime_rl_app.config import build_config
from prime_rl_app.foreign import NAMES, PRIME_RL, VERL, our_keys
from prime_rl_app.migrate import DIFFERENCES, VALUES, as_whole, leaf_paths, migrate, written

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


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda each: each.key)
def test_the_page_has_each_difference_and_our_default_is_the_real_one(difference):
    assert f"| `{difference.key}` |" in PAGE
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
                "clip_eps_high": 0.2,
            },
        },
    }
    # The upper clip has a key of its own, which comes second.
    assert "epsilon_high = 0.28: trainer.loss.clip_eps_high is 0.2 already" in migration.left_out
    assert migration.unknown == ["data_seed = 5"]


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


def test_the_configs_of_upstreams_processes_go_together():
    orchestrator = 'batch_size = 8\n[model]\nname = "a/b"\n[[train.source]]\nname = "x"\n'
    orchestrator += '[train.source.env.taskset]\nid = "y"\n'
    table = as_whole(tomllib.loads(orchestrator))
    assert migrate(table).table["orchestrator"]["train"]["env"] == [{"name": "x", "id": "y"}]
    assert as_whole({"optim": {"lr": 1.0}}) == {"trainer": {"optim": {"lr": 1.0}}}


FOREIGN = sorted({**PRIME_RL, **VERL, **NAMES})
NAMES_OF_PARTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
SIMPLE = st.one_of(
    st.booleans(),
    st.integers(-9, 9**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.sampled_from(["None", "vllm", "linear", "grpo", "wandb"]),
    st.just({}),
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
        names = [each.partition(" = ")[0] for each in told]
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

    script = tmp_path / "mine.sbatch"
    lines = script.read_text().splitlines()
    for line in (
        "#SBATCH --job-name=mine",
        "#SBATCH --partition=prod",
        "#SBATCH --nodes=5",
        "#SBATCH --gpus-per-node=4",
        "export MY_PATH='/a b'",
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
