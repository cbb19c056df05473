"""The TOML blocks of ``docs/config.md``: every key of a table, at its default or at an example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prime_rl_devkit.facts import Schema, toml

EXAMPLES: dict[str, Any] = {
    "address": ["10.0.0.5:5000"],
    "alpha": 0.1,
    "api_key_var": "TEACHER_KEY",
    "args": {"split": "train"},
    "at_least": 6,
    "base_url": ["http://10.0.0.5:8000/v1"],
    "batch_size": 128,
    "best": "eval/text-reversal/all/reward/mean",
    "clip_eps_low": 0.2,
    "constant": 1024.0,
    "data": "conversations.jsonl",
    "decay_steps": 100,
    "demo_key": "demonstration",
    "disabled": ["wandb"],
    "dual_clip": 3.0,
    "easy_threshold": 0.9,
    "ema_decay": 0.99,
    "entity": "my-team",
    "env": "text-reversal",
    "env_vars": {"NCCL_DEBUG": "INFO"},
    "env_workers": 2,
    "estimator": "k3",
    "extra_body": {"priority": 1},
    "forward_env": ["HF_TOKEN"],
    "group": "ablations",
    "group_size": 8,
    "hard_threshold": 0.1,
    "harness": {"id": "in-process"},
    "headers": {"X-Team": "mine"},
    "headers_from_env": {"X-Project": "PROJECT_ID"},
    "id": "text-reversal",
    "import_path": "my_package.losses.clipped",
    "inference_gpus": [0, 1],
    "interval": 50,
    "keep_interval": 500,
    "keep_last": 2,
    "key_var": "PRIME_RL_GATEWAY_KEY",
    "kwargs": {"clip": 0.2},
    "load_from": "outputs/mine/checkpoints/step_100/orchestrator",
    "lr": 1e-4,
    "max_completion_tokens": 1024,
    "max_correction": 2.0,
    "max_group_size": 32,
    "max_inflight_rollouts": 256,
    "max_memory": 4.0,
    "max_model_len": 4096,
    "max_prefill_tokens": 4096,
    "max_steps": 120,
    "max_tokens": 8192,
    "max_turns": 8,
    "measure_every": 20,
    "metric": "eval/text-reversal/all/reward/mean",
    "micro_batch_tokens": 8192,
    "min_gain": 0.0,
    "min_p": 0.05,
    "modules_to_save": ["norm"],
    "name": "mine",
    "negatives": 4,
    "ngram_threshold": 0.5,
    "normalize_by": "constant",
    "num_ranks": 2,
    "pass_env": ["HF_TOKEN"],
    "path": "demonstrations.jsonl",
    "penalties": {"entropy_bonus": 0.001},
    "per_env": True,
    "port": 8100,
    "positives": 4,
    "python": ".venv-vllm/bin/python",
    "ratio": 2.0,
    "ratio_clip": 10.0,
    "reach": 0.9,
    "tasks_per_minute": 60,
    "token_batch_size": 262144,
    "url": "https://heartbeat.example/run",
    "url_var": "HEARTBEAT_URL",
    "renderer": "qwen3",
    "seed": 0,
    "split": "train",
    "subset": "main",
    "tags": ["first"],
    "target": 0.5,
    "target_modules": ["q_proj", "v_proj"],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "trainer_gpus": [2, 3],
    "at_most": 0.2,
    "from_step": 50,
    "validate_every": 20,
    "weight": [[1, 3.0], [100, 1.0]],
    "validation": "owner/conversations",
    "validation_split": "test",
}
"""Values of keys without a default, or whose default is the absence of a value."""

OF_TABLES: dict[str, dict[str, Any]] = {
    "model": {"name": "tiny-reverse"},
    "sft": {"data": "owner/conversations"},
    "orchestrator.initial": {"name": "policy"},
    "orchestrator.train.env": {"name": "words"},
    "orchestrator.train.env.opens": {
        "metric": "train/easy/all/reward/mean",
        "at_least": 0.8,
    },
    "orchestrator.eval.env": {"name": "held-out", "args": {"split": "held_out"}},
    "orchestrator.algo.teacher": {"name": "teacher"},
    "orchestrator.algo.filter": {"import_path": "my_package.filters.keep"},
    "orchestrator.algo.sampling.source": {"type": "replay"},
    "orchestrator.pre_batch_filters": {"type": "gibberish"},
    "orchestrator.post_batch_filters": {"type": "zero_advantage"},
    "monitors.wandb": {"name": "my-run"},
    "launcher": {"address": "10.0.0.1:6379"},
}
"""The same where the name of a key alone does not say what it needs."""

LEFT_OUT: dict[str, str] = {
    "orchestrator.train.env.measure_every": "for a source of demonstrations",
    "orchestrator.train.env.ratio": "instead of weight",
    "orchestrator.train.env.opens.at_most": "instead of at_least",
    "orchestrator.train.env.opens.from_step": "instead of metric",
    "orchestrator.algo.sampling.source.demo_key": "instead of path",
    "inference.base_url": "instead of engines of the run's own",
    "inference.headers": "of base_url",
    "inference.headers_from_env": "of base_url",
    "observers.heartbeat.url_var": "instead of url",
    "orchestrator.token_batch_size": "instead of batch_size",
    "orchestrator.train.env.address": "instead of workers of the run's own",
    "orchestrator.eval.env.address": "instead of workers of the run's own",
}
"""Keys that exclude others of their table: shown as a comment."""


BEFORE_A_GATE = (
    *("[[orchestrator.train.env]]", 'id = "text-reversal"', 'name = "easy"', ""),
    *("[[orchestrator.train.env]]", 'id = "reverse-retry"', 'name = "hard"', ""),
)
"""An env that is open, and one that opens."""

IN_A_LIST = "[orchestrator.train.env."
"""Such a table belongs to an entry of a list, which comes first."""


def example(header: str, model: Schema, defaults: Schema, fixed: str = "") -> str:
    """A block with every key of a table but its tables. ``header``: ``[trainer]`` or
    ``[trainer.optim] type = "muon"``; empty for the top level. ``fixed``: its key that selects a
    plugin's class."""
    table, _, selects = header.partition("] ")
    table = f"{table}]" if selects else table
    path = re.sub(r"<name>", "mine", table.strip("[]"))
    lines = [*_lines(path, model, defaults, selects.partition(" = ")[0])]
    if selects:
        lines.insert(0, selects)
    if not lines:
        return ""
    if table:
        lines.insert(0, re.sub(r"<name>", "mine", table))
    if table.startswith(IN_A_LIST):
        lines[:0] = [*BEFORE_A_GATE]
    return "```toml\n" + "\n".join(lines) + "\n```"


def _lines(path: str, model: Schema, defaults: Schema, selected: str) -> Iterator[str]:
    for key, prop in model.get("properties", {}).items():
        if key == selected or is_table(prop):
            continue
        value = _value(path, key, {**prop, "default": defaults[key]} if key in defaults else prop)
        line = f"{key} = {toml(value)}"
        why = LEFT_OUT.get(f"{path}.{key}")
        yield f"# {line}    # {why}" if why else line


def is_table(prop: Schema) -> bool:
    """Whether a key has a table, or tables, with a section of their own."""
    choices = (prop, *prop.get("anyOf", ()), *prop.get("oneOf", ()))
    values = prop.get("additionalProperties")
    items = prop.get("items", {})
    tables = values if isinstance(values, dict) else {}
    inner = [*choices, items, tables]
    of_tables = tables.get("type") == "object"
    either = [choice for each in inner for choice in each.get("oneOf", ())]
    return of_tables or any("$ref" in each for each in [*inner, *either])


def _value(path: str, key: str, prop: Schema) -> Any:
    if "const" in prop:
        return prop["const"]
    default = prop.get("default")
    if default not in (None, [], {}, ()):
        return default
    if key in OF_TABLES.get(path, {}):
        return OF_TABLES[path][key]
    return EXAMPLES[key]
