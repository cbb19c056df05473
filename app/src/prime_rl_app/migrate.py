"""A config of another framework as one of ours.

Every key is carried over, left out with a note, or refused by name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_origin

from pydantic import BaseModel

from prime_rl.config.explain import fits
from prime_rl.errors import ConfigError
from prime_rl_app.foreign import (
    NAMES,
    PRIME_RL,
    VERL,
    Match,
    Part,
    is_ours,
    is_table,
    look_up,
    our_keys,
)

Path = tuple[Part, ...]


@dataclass
class Migration:
    """Our config, and what was not carried over."""

    table: dict[str, Any] = field(default_factory=dict)
    carried: dict[Path, list[str]] = field(default_factory=dict)
    """Our keys for each foreign one."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Comments of our keys."""
    left_out: list[str] = field(default_factory=list)
    """``KEY = VALUE: why``."""
    unknown: list[str] = field(default_factory=list)
    """``KEY = VALUE`` of keys that no table has."""
    defaults: list[str] = field(default_factory=list)
    """Defaults of the other framework that differ from ours, where the config leaves them."""
    slurm: dict[str, Any] | None = None
    """The table of that name."""
    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables, of all processes."""


# Values that are written otherwise here.


class Left(NamedTuple):
    """A value that is not carried over."""

    why: str = ""


Several = dict[str, Any]
"""Values of several keys of ours."""


def _chosen(values: Mapping[Any, Any], why: str = "") -> Callable[[Any], Any]:
    """A value for each of theirs; another one is left out."""

    def convert(value: Any) -> Any:
        is_name = isinstance(value, str | bool)
        return values[value] if is_name and value in values else Left(why)

    return convert


def _each_block(value: Any) -> Any:
    """A table, a switch or a number of blocks, as ``activation_checkpointing``."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number:
        return value
    return 0 if value in (False, "None", None) else 1


def _switch(value: Any) -> Any:
    return value not in (False, "None", None)


def _clipped(value: Any) -> Any:
    return Several(
        {
            "trainer.loss.type": "ppo_clip",
            "trainer.loss.clip_eps_low": value,
            "trainer.loss.clip_eps_high": value,
        }
    )


def _kl(value: Any) -> Any:
    if not value:
        return Left("0: no penalty")
    return Several(
        {
            "orchestrator.algo.penalties.kl_to_initial": value,
            "trainer.losses.kl_to_initial.estimator": "k3",
        }
    )


def _not_zero(value: Any) -> Any:
    return value or Left("0: no penalty")


def _examples(value: Any) -> Any:
    return 1_000_000 if value == -1 else value


def _monitors(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("wandb", "tensorboard")]
    return Several({f"monitors.{name}": {} for name in known}) if known else Left()


def _hint(value: Any) -> Any:
    """For a key whose value says something else."""
    return Left()


_ADAM = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw": "adamw",
    "sgd": "sgd",
}
_ESTIMATORS = {
    "grpo": "grpo_std",
    "gae": "ppo",
    "rloo": "rloo",
    "opo": "opo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_LOSS_TYPES = {
    "grpo": {"trainer.loss.type": "ppo_clip", "trainer.loss.normalize_by": "sequences"},
    "dapo": {"trainer.loss.type": "ppo_clip", "trainer.loss.normalize_by": "tokens"},
    "bnpo": {"trainer.loss.type": "ppo_clip", "trainer.loss.normalize_by": "tokens"},
    "dr_grpo": {"trainer.loss.type": "dr_grpo"},
    "cispo": {"trainer.loss.type": "cispo"},
    "sapo": {"trainer.loss.type": "sapo"},
}
_OFFLINE = _chosen({True: "offline", False: "online"})
_RL_IS_GRPO = _chosen({"rl": "grpo", "opd": "opd", "sft": "sft"})

VALUES: dict[str, Callable[[Any], Any]] = {
    "wandb.offline": _OFFLINE,
    "monitors.wandb.offline": _OFFLINE,
    "model.compile": _switch,
    "trainer.model.compile": _switch,
    "trainer.model.compile.fullgraph": _hint,
    "trainer.model.ac": _each_block,
    "trainer.model.ac.mode": _each_block,
    "weight_broadcast.quantize_in_weight_transfer": _chosen({True: "bfloat16"}),
    "deployment.num_infer_gpus": _hint,
    "deployment.nodes_per_fsdp_group": _hint,
    "max_async_level": _hint,
    "async_level": _hint,
    "orchestrator.max_async_level": _hint,
    "trainer.max_async_level": _hint,
    "orchestrator.training_mode": _RL_IS_GRPO,
    "orchestrator.advantage.type": _chosen({"default": "grpo"}, "docs/migrating.md"),
    "orchestrator.eval.num_examples": _examples,
    "orchestrator.eval.source.num_examples": _examples,
    "orchestrator.eval.eval_base_model": lambda value: not value,
    "orchestrator.*.source.env.agent.runtime.type": (
        lambda value: Left("as by default") if value == "subprocess" else value
    ),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _each_block,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": _hint,
    "actor_rollout_ref.actor.ppo_mini_batch_size": _hint,
    "actor_rollout_ref.actor.clip_ratio": _clipped,
    "actor_rollout_ref.actor.entropy_coeff": _not_zero,
    "actor_rollout_ref.actor.kl_loss_coef": _kl,
    "actor_rollout_ref.actor.kl_loss_type": _chosen(
        {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    ),
    "actor_rollout_ref.actor.loss_agg_mode": _chosen(
        {"token-mean": "tokens", "seq-mean-token-mean": "sequences"}
    ),
    "actor_rollout_ref.rollout.name": _chosen({"vllm": "vllm"}),
    "actor_rollout_ref.rollout.prompt_length": _hint,
    "algorithm.adv_estimator": _chosen(_ESTIMATORS),
    "algorithm.norm_adv_by_std_in_grpo": _hint,
    "data.train_batch_size": _hint,
    "data.max_prompt_length": _hint,
    "trainer.n_gpus_per_node": _hint,
    "trainer.val_before_train": lambda value: not value,
    "optim": _chosen(_ADAM),
    "warmup_ratio": _hint,
    "per_device_train_batch_size": _hint,
    "gradient_accumulation_steps": _hint,
    "micro_train_batch_size": _hint,
    "ppo_micro_batch_size_per_gpu": _hint,
    "ppo_mini_batch_size": _hint,
    "steps_per_generation": _hint,
    "max_prompt_length": _hint,
    "num_train_epochs": _hint,
    "num_epochs": _hint,
    "total_epochs": _hint,
    "bf16": _chosen({True: "bfloat16"}),
    "fp16": _hint,
    "torch_dtype": _chosen({"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"}),
    "attn_implementation": _hint,
    "gradient_checkpointing": _each_block,
    "enable_gradient_checkpointing": _each_block,
    "report_to": _monitors,
    "use_vllm": _chosen({True: "vllm"}),
    "vllm_mode": _chosen({"colocate": True}),
    "vllm_importance_sampling_correction": _hint,
    "importance_sampling_level": _chosen({"sequence": "gspo"}),
    "loss_type": _chosen({name: Several(keys) for name, keys in _LOSS_TYPES.items()}),
    "scale_rewards": _chosen(
        {"group": "grpo_std", True: "grpo_std", "none": "dr_grpo", False: "dr_grpo"}
    ),
    "advantage_estimator": _chosen(_ESTIMATORS),
    "adv_estimator": _chosen(_ESTIMATORS),
    "sync_ref_model": _hint,
    "ref_model_mixup_alpha": _hint,
    "use_peft": _chosen({True: {}}),
    "use_kl_loss": _hint,
    "beta": _kl,
    "kl_coef": _kl,
    "kl_loss_coef": _kl,
    "init_kl_coef": _kl,
    "entropy_coeff": _not_zero,
    "entropy_coef": _not_zero,
    "ent_coef": _not_zero,
    **dict.fromkeys(
        ("clip_range", "clip_ratio", "cliprange", "eps_clip", "epsilon", "clip_eps"), _clipped
    ),
}
"""How the value of a foreign key becomes ours, where it is not the same."""


# Defaults.


class Difference(NamedTuple):
    """A default of upstream prime-rl that differs from ours without an error."""

    key: str
    theirs: Any
    ours: str
    note: str = ""
    applies: Callable[[dict[str, Any]], bool] = lambda table: True


def _is(key: str, value: Any) -> Callable[[dict[str, Any]], bool]:
    return lambda table: get(table, key) == value


def _has(key: str) -> Callable[[dict[str, Any]], bool]:
    return lambda table: bool(get(table, key))


DIFFERENCES = (
    Difference("max_steps", None, "required", "upstream trains until it is stopped"),
    Difference("orchestrator.group_size", 1, "8", "algorithms that compare siblings refuse 1"),
    Difference(
        "trainer.scheduler.warmup_steps", 10, "0", "", _is("trainer.scheduler.type", "linear")
    ),
    Difference(
        "trainer.scheduler.warmup_steps", 10, "0", "", _is("trainer.scheduler.type", "cosine")
    ),
    Difference(
        "trainer.scheduler.decay_steps",
        10,
        "all after warm-up",
        "",
        _is("trainer.scheduler.type", "linear"),
    ),
    Difference("trainer.optim.beta2", 0.95, "0.999", "of muon", _is("trainer.optim.type", "muon")),
    Difference("trainer.optim.momentum", 0.9, "0.0", "of sgd", _is("trainer.optim.type", "sgd")),
    Difference("trainer.optim.nesterov", True, "false", "of sgd", _is("trainer.optim.type", "sgd")),
    Difference(
        "orchestrator.algo.min_gain",
        None,
        "0.2",
        "the gate of opsd: an example trains while its demonstration helps",
        _is("orchestrator.algo.type", "opsd"),
    ),
    Difference(
        "orchestrator.algo.skip_truncated", False, "true", "", _is("orchestrator.algo.type", "opsd")
    ),
    Difference(
        "orchestrator.post_batch_filters",
        None,
        "zero_advantage enforces",
        "a rollout that is filtered is replaced here; upstream's batch shrinks",
    ),
    Difference(
        "orchestrator.eval.env.interval", 100, "only at the ends", "", _has("orchestrator.eval.env")
    ),
    Difference(
        "orchestrator.eval.env.num_examples",
        -1,
        "64",
        "all examples",
        _has("orchestrator.eval.env"),
    ),
    Difference("orchestrator.train.env.timeout", None, "600.0", "seconds of a rollout"),
    Difference(
        "weight_broadcast.timeout", 1200, "120.0", "seconds", _is("weight_broadcast.type", "nccl")
    ),
    Difference(
        "recovery.hang_timeout", 600, "1800.0", "seconds; trainer.dist_timeout_seconds there"
    ),
    Difference(
        "orchestrator.max_inflight_rollouts",
        None,
        "what the engines can run",
        "upstream adapts it from the engines' load",
    ),
    Difference("ckpt.interval", None, "every 600 seconds", "only at the end, if [ckpt] is set"),
    Difference("ckpt.enabled", False, "true", "", lambda table: "ckpt" not in table),
    Difference("trainer.activation_checkpointing", 1, "0", "less memory, a third more arithmetic"),
    Difference("trainer.compile", True, "false"),
    Difference(
        "trainer.optim.type", "adamw_offload", "adamw", "upstream offloads the optimizer's state"
    ),
    Difference(
        "trainer.lora.target_modules",
        None,
        "every linear module",
        "ten names",
        _has("trainer.lora"),
    ),
    Difference("rollout_transport.hwm", 10, "4"),
)
"""In the order of the page docs/migrating.md, which has each of them."""


def migrate(table: Mapping[str, Any]) -> Migration:
    """A config of upstream prime-rl, TRL or verl as one of ours."""
    result = Migration()
    whole = as_whole(table)
    tables = [VERL] if "actor_rollout_ref" in whole else [PRIME_RL]
    is_upstream = tables == [PRIME_RL] and not _is_flat(whole)
    carried: list[tuple[Match, Path, Any]] = []
    for path, value in leaf_paths(whole):
        match = next(filter(None, (look_up(path, each) for each in tables)), None)
        if match is None and len(path) == 1 and not is_ours(path):
            match = look_up(path, NAMES)
        if match is not None:
            carried.append((match, path, value))
        elif not is_ours(path):
            result.unknown.append(_assigned(path, value))
        elif value == "None":
            result.left_out.append(f"{_assigned(path, value)}: no value, as by default")
        elif is_table(path) and not isinstance(value, dict):
            result.unknown.append(_assigned(path, value))
        else:
            _put(result.table, path, value)
            result.carried[path] = [".".join(map(str, path))]

    # Keys that mean the same here come first: another key for the same is compared with them.
    for match, path, value in carried:
        _carry(result, match, path, value)

    _combine(result, whole)
    result.table = _with_lists(result.table)
    _spread(result)
    _note_secrets(result, whole)
    if is_upstream:
        _complete(result)
    return result


def _is_flat(table: Mapping[str, Any]) -> bool:
    """Whether it is a config of TRL or of Hugging Face's trainer: keys without tables."""
    tables = [value for value in table.values() if isinstance(value, dict)]
    return not tables and any(name in NAMES for name in table)


SHARED = {"model", "max_steps", "seq_len", "ckpt", "monitors", "wandb", "log", "output_dir", "run"}
PARTS = {
    "orchestrator": {"train", "eval", "renderer", "algo", "batch_size", "group_size", "env"},
    "trainer": {"optim", "loss", "scheduler"},
}


def as_whole(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config of one process of upstream's, which begins with its own keys, as one of a run."""
    if any(name in table for name in (*PARTS, "actor_rollout_ref")) or _is_flat(table):
        return dict(table)
    for process, own in PARTS.items():
        if any(isinstance(table.get(name), dict | list) for name in own):
            inner = {key: value for key, value in table.items() if key not in SHARED}
            outer = {key: value for key, value in table.items() if key in SHARED}
            return {**outer, process: inner}

    return dict(table)


def leaf_paths(table: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and value of each value that is no table with keys and no list of tables."""
    if isinstance(table, dict) and table:
        for key, value in table.items():
            yield from leaf_paths(value, (*path, key))
    elif isinstance(table, list) and any(isinstance(each, dict) for each in table):
        for number, value in enumerate(table):
            yield from leaf_paths(value, (*path, number))
    elif path:
        yield path, table


def _carry(result: Migration, match: Match, path: Path, value: Any) -> None:
    """Write one foreign value where it belongs here, or say why not."""
    if path[0] == "slurm":
        result.slurm = {**(result.slurm or {}), str(path[-1]): value}
    if "env_vars" in path and match.path is None:
        result.env_vars[str(path[-1])] = str(value)
    if match.path is None:
        result.left_out.append(f"{_assigned(path, value)}: {match.note}")
        return

    converted = VALUES.get(match.pattern, lambda same: same)(value)
    if converted == "None":
        converted = Left("no value, as by default")
    if isinstance(converted, Left):
        why = converted.why or f"here {match.ours}" + (f", {match.note}" if match.note else "")
        result.left_out.append(f"{_assigned(path, value)}: {why}")
        return

    is_several = match.pattern in VALUES and _has_dotted_keys(converted)
    pairs = converted.items() if is_several else [(match.ours or "", converted)]
    for key, each in pairs:
        target = tuple(key.split(".")) if is_several else match.path
        _set(result, target, match, path, each)


def _has_dotted_keys(value: Any) -> bool:
    return isinstance(value, dict) and any("." in key for key in value)


def _set(result: Migration, target: Path, match: Match, path: Path, value: Any) -> None:
    names = ".".join(str(part) for part in target if isinstance(part, str))
    info = our_keys().get(names)
    if info is not None and not isinstance(value, dict | list) and not fits(info, value):
        note = f" ({match.note})" if match.note else ""
        result.left_out.append(f"{_assigned(path, value)}: no value of {names}{note}")
        return

    numbered = _numbered(target, list(match.numbers))
    present = _get_path(result.table, numbered)
    if present is not None and present != value and not isinstance(value, dict):
        result.left_out.append(f"{_assigned(path, value)}: {names} is {_toml(present)} already")
        return
    _put(result.table, numbered, value)
    result.carried.setdefault(path, []).append(names)
    if match.note:
        result.notes.setdefault(names, []).append(match.note)


EVERY = "*"
"""In place of a number: each entry of a list."""


def _numbered(target: Path, numbers: list[int]) -> Path:
    """A path of ours with the numbers of the list entries that it goes through."""
    result: list[Part] = []
    for place, part in enumerate(target):
        result.append(part)
        key = ".".join(str(each) for each in result if isinstance(each, str) and each != EVERY)
        info = our_keys().get(key)
        is_last = place == len(target) - 1
        if info is None or is_last or not _is_list_of_tables(info.annotation):
            continue
        if isinstance(target[place + 1], int) or target[place + 1] in ("0",):
            continue
        result.append(numbers.pop(0) if numbers else EVERY)

    return tuple(EVERY if part == "0" else part for part in result)


def _is_list_of_tables(annotation: Any) -> bool:
    arguments = getattr(annotation, "__args__", ())
    inner = arguments[0] if arguments and get_origin(annotation) is tuple else None
    return isinstance(inner, type) and issubclass(inner, BaseModel)


def _put(table: dict[Any, Any], path: Path, value: Any) -> None:
    """Write a value; an empty table does not replace one with keys."""
    inner: Any = table
    for part in path[:-1]:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    if isinstance(value, dict) and isinstance(inner.get(path[-1]), dict):
        return
    inner[path[-1]] = value


def _get_path(table: Any, path: Path) -> Any:
    for part in path:
        if not isinstance(table, dict) or part not in table:
            return None
        table = table[part]
    return table


def get(table: Any, key: str) -> Any:
    """The value at a dotted key; None: there is none. Of a list, that of its first entry."""
    for part in key.split("."):
        if isinstance(table, list):
            table = table[0] if table else None
        if not isinstance(table, dict) or part not in table:
            return None
        table = table[part]
    return table


def _with_lists(table: Any) -> Any:
    """Tables whose keys are numbers, as lists."""
    if not isinstance(table, dict):
        return table
    made = {key: _with_lists(value) for key, value in table.items()}
    numbers = sorted(key for key in made if isinstance(key, int))
    if not numbers:
        return made
    entries = [made[number] for number in numbers]
    return {EVERY: made[EVERY], "": entries} if EVERY in made else entries


def _spread(result: Migration) -> None:
    """Copy what is written for each entry of a list to those that do not set it."""
    orchestrator = result.table.get("orchestrator", {})
    for part in ("train", "eval"):
        group = orchestrator.get(part, {})
        envs = group.get("env")
        if not isinstance(envs, dict):
            continue
        shared = envs.get(EVERY, {})
        entries = envs.get("", [])
        if entries:
            group["env"] = [{**shared, **entry} for entry in entries]
            continue
        del group["env"]
        for path, value in leaf_paths(shared):
            key = _assigned(("orchestrator", part, "env", *path), value)
            result.left_out.append(f"{key}: there is no [[orchestrator.{part}.env]]")


# What several keys decide together.


def _combine(result: Migration, whole: Mapping[str, Any]) -> None:
    """Values that depend on several foreign keys."""
    table = result.table

    def number(key: str) -> int | None:
        value = get(whole, key)
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if is_number else None

    def put(key: str, value: Any, note: str = "") -> None:
        path = tuple(key.split("."))
        if _get_path(table, path) is None:
            _put(table, path, value)
            if note:
                result.notes.setdefault(key, []).append(note)

    if get(whole, "deployment.type") == "multi_node":
        per_node = number("deployment.gpus_per_node") or 8
        nodes = number("deployment.num_train_nodes") or 1
        table.get("trainer", {}).pop("num_ranks", None)
        put("trainer.num_ranks", nodes * per_node, f"{nodes} nodes of {per_node} GPUs")
        put("launcher.type", "ray", "upstream: Slurm")
        put("rollout_transport.host", "0.0.0.0", "the trainer is on other machines")
    elif gpus := number("deployment.num_infer_gpus"):
        size = number("inference.vllm.tensor_parallel_size") or 1
        replicas = max(1, gpus // size)
        if replicas > 1:
            put("inference.replicas", replicas, f"{gpus} GPUs, {size} for each engine")

    # verl counts prompts, and TRL rows of one device.
    prompts = number("data.train_batch_size")
    per_prompt = number("actor_rollout_ref.rollout.n") or 1
    if prompts:
        note = f"{prompts} prompts of {per_prompt} rollouts"
        put("orchestrator.batch_size", prompts * per_prompt, note)
        if mini := number("actor_rollout_ref.actor.ppo_mini_batch_size"):
            put("trainer.minibatches", max(1, prompts // mini), f"{prompts} / {mini} prompts")
    if gpus := number("trainer.n_gpus_per_node"):
        put("trainer.num_ranks", gpus * (number("trainer.nnodes") or 1))
    if rows := number("per_device_train_batch_size"):
        steps = number("steps_per_generation") or number("gradient_accumulation_steps") or 1
        put("orchestrator.batch_size", rows * steps, "times the number of GPUs")

    for prompt, completion in (
        ("data.max_prompt_length", "data.max_response_length"),
        ("max_prompt_length", "max_completion_length"),
    ):
        lengths = number(prompt), number(completion)
        if lengths[0] and lengths[1]:
            put("seq_len", lengths[0] + lengths[1], "prompt and completion together")
    steps_of_run = get(table, "max_steps")
    for key in ("warmup_ratio", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"):
        ratio = get(whole, key)
        if isinstance(ratio, float) and isinstance(steps_of_run, int) and ratio > 0:
            put("trainer.scheduler.warmup_steps", round(ratio * steps_of_run), f"{ratio} of a run")


ENDLESS = 1000
"""Steps of a run whose config has no end."""


def _complete(result: Migration) -> None:
    """What upstream has without a key, and the differences of defaults."""
    table = result.table
    inference = table.setdefault("inference", {})
    if "base_url" not in inference and "engine" not in inference:
        inference["engine"] = "vllm"
        result.notes.setdefault("inference.engine", []).append("upstream's only engine")
    if "max_steps" not in table:
        table["max_steps"] = ENDLESS
        note = "required here: upstream trains until it is stopped"
        result.notes.setdefault("max_steps", []).append(note)
    for each in DIFFERENCES:
        if get(table, each.key) is None and each.applies(table):
            theirs = "not set" if each.theirs is None else _toml(each.theirs)
            note = f"; {each.note}" if each.note else ""
            result.defaults.append(f"{each.key}: {theirs} there, {each.ours} here{note}")


_SECRET = re.compile(r"(key|token|secret|password)", re.IGNORECASE)


def _note_secrets(result: Migration, whole: Mapping[str, Any]) -> None:
    """Keep the values of variables that look like a key out of comments."""
    secrets = [value for name, value in result.env_vars.items() if _SECRET.search(name)]
    for text in secrets:
        if text:
            result.left_out = [each.replace(text, "...") for each in result.left_out]


# Writing.


def _assigned(path: Sequence[Part], value: Any) -> str:
    """``KEY = VALUE``, on one line."""
    return f"{'.'.join(map(_key, path))} = {_toml(value)}"


def _key(part: Part) -> str:
    text = str(part)
    return text if re.fullmatch(r"[A-Za-z0-9_-]+", text) else _quoted(text)


def _quoted(text: str) -> str:
    """A text of TOML: JSON's, in which only the character DEL is left to escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if value is None:
        return '"None"'
    return str(value)


def written(migration: Migration, sources: Sequence[str]) -> str:
    """The TOML of a migrated config, with what was not carried over as comments."""
    lines = [f"# Migrated from {', '.join(sources)} by prime-rl migrate."]
    for title, notes in (
        ("Not known, and left out", migration.unknown),
        ("Left out", migration.left_out),
        ("Other defaults, where this file sets nothing", migration.defaults),
    ):
        if notes:
            lines += ["#", f"# {title}:", *(f"#   {_one_line(note)}" for note in notes)]
    lines += ["", *_tables(migration.table, (), migration.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _one_line(text: str) -> str:
    """A comment: TOML allows no control characters in it."""
    return re.sub(r"[\x00-\x08\x0a-\x1f\x7f]", " ", text)


def _tables(
    table: Mapping[str, Any], path: Path, notes: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    inner = []
    for key, value in table.items():
        is_tables = isinstance(value, list) and value and all(isinstance(e, dict) for e in value)
        # The settings of a taskset are one table, whatever is in them.
        if (is_tables or isinstance(value, dict)) and "args" not in path:
            inner.append((key, value))
            continue
        name = ".".join(str(part) for part in (*path, key))
        comment = "; ".join(dict.fromkeys(notes.get(name, ())))
        yield f"{_key(key)} = {_toml(value)}" + (f"  # {_one_line(comment)}" if comment else "")

    for key, value in inner:
        here = (*path, key)
        heading = ".".join(map(_key, here))
        if isinstance(value, list):
            for entry in value:
                yield from ("", f"[[{heading}]]")
                yield from _tables(entry, here, notes)
        else:
            body = list(_tables(value, here, notes))
            if not body or body[0] != "":
                yield from ("", f"[{heading}]")
            yield from body


SBATCH = """\
#!/bin/bash
{directives}
# Written by prime-rl migrate from the table [slurm]. Submit it from a directory that all nodes
# share, with an environment active that has prime-rl and prime-rl-ray: sbatch {script}
set -euo pipefail
{exports}
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=${{ADDRESS:-$head:6379}}
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${{RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-600}}
export RAY_gcs_rpc_server_reconnect_timeout_s=${{RAY_gcs_rpc_server_reconnect_timeout_s:-120}}

# The exit code of the run comes by this file: Ray has its own.
code_file=$PWD/slurm-$SLURM_JOB_ID.exit
trap 'rm -f "$code_file"' EXIT
{before}
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\
    --cpu-bind=none --kill-on-bad-exit=1 \\
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \\
    bash -c '"$@"; code=$?; echo $code >"$0"; exit $code' "$code_file" \\
    prime-rl run {config} --launcher ray --run.name "slurm-$SLURM_JOB_ID" "$@" || true
if [[ ! -e $code_file ]]; then
    echo "error: the run did not start on $head, or was killed: see Ray's messages above" >&2
    exit 1
fi
exit "$(<"$code_file")"
"""

_DIRECTIVES = {
    "job_name": "job-name",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "time_limit": "time",
    "nodelist": "nodelist",
    "exclude": "exclude",
}
"""Keys of ``[slurm]``, and the option of sbatch for each."""
_BEFORE = ("pre_run_command",)


def sbatch(migration: Migration, whole: Mapping[str, Any], config: str, script: str) -> str:
    """The batch file that the table ``[slurm]`` becomes. Its other keys are comments."""
    slurm = migration.slurm or {}
    engines = get(whole, "deployment.num_infer_nodes") or get(migration.table, "inference.replicas")
    nodes = (get(whole, "deployment.num_train_nodes") or 1) + (engines or 1)
    options = {"job-name": "prime-rl", "nodes": str(nodes), "ntasks-per-node": "1"}
    options["gpus-per-node"] = str(get(whole, "deployment.gpus_per_node") or 8)
    options |= {_DIRECTIVES[key]: str(slurm[key]) for key in slurm if key in _DIRECTIVES}
    lines = []
    for option, value in options.items():
        if not re.fullmatch(r"[\w.,:/@%+=\[\]-]+", value):
            raise ConfigError(f"slurm: {value!r} is no value of sbatch's option --{option}")
        lines.append(f"#SBATCH --{option}={value}")
    lines += ["#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --output=%x-%j.log"]
    rest = {key: slurm[key] for key in slurm if key not in (*_DIRECTIVES, *_BEFORE)}
    lines += [f"# Not used: {_one_line(_assigned((key,), value))}" for key, value in rest.items()]
    names = sorted(migration.env_vars)
    exports = [f"export {name}={shlex.quote(migration.env_vars[name])}" for name in names]
    command = slurm.get("pre_run_command")
    before = ["", "# pre_run_command", str(command)] if command else []
    return SBATCH.format(
        directives="\n".join(lines),
        exports="\n".join(exports),
        before="\n".join(before),
        config=shlex.quote(config),
        script=script,
    )
