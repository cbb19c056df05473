"""Translate a config of another framework into one of this project.

Every key is carried over, left out with a note, or refused by name.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_origin

from pydantic import BaseModel

from prime_rl.config.explain import fits
from prime_rl.errors import ConfigError
from prime_rl.variables import SECRET
from prime_rl_app import sft
from prime_rl_app.commands import OWN
from prime_rl_app.foreign import (
    FROM_DATA,
    NAMES,
    ONE_DATA_SET,
    PRIME_RL,
    TRL,
    VERL,
    Foreign,
    Match,
    PathPart,
    is_ours,
    is_table,
    look_up,
    may_be_list,
    our_keys,
)

Path = tuple[PathPart, ...]


@dataclass(kw_only=True)
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
    env_vars: dict[str, str | None] = field(default_factory=dict)
    """Environment variables, of all processes. None: its value is a secret."""


# Values that are written otherwise here.


class Left(NamedTuple):
    """A value that is not carried over."""

    why: str = ""


NO_VALUE = Left("no value, as by default")


def is_null(value: Any) -> bool:
    """Whether it is YAML's ``null``, or the text that upstream writes for it in TOML."""
    return value is None or value == "None"


def _has_null(value: Any) -> bool:
    """Whether a list, or a table in it, has a null."""
    if isinstance(value, dict):
        return any(map(_has_null, value.values()))
    return any(map(_has_null, value)) if isinstance(value, list) else is_null(value)


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
    return 0 if value is False or is_null(value) else 1


def _switch(value: Any) -> Any:
    return not (value is False or is_null(value))


def _clipped(value: Any) -> Any:
    return Several(
        {
            "trainer.loss.type": "ppo_clip",
            "trainer.loss.clip_eps_low": value,
            "trainer.loss.clip_eps_high": value,
        }
    )


def _betas(value: Any) -> Any:
    if not isinstance(value, list) or len(value) != 2:
        return Left("expected two numbers")
    return Several({"trainer.optim.beta1": value[0], "trainer.optim.beta2": value[1]})


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


def _only_one(value: Any) -> Any:
    """The only name of a list, where prime-rl takes one name."""
    names = value if isinstance(value, list) else [value]
    return names[0] if len(names) == 1 else Left(ONE_DATA_SET)


def _examples(value: Any) -> Any:
    return 1_000_000 if value == -1 else value


def _monitors(value: Any) -> Any:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in ("wandb", "tensorboard")]
    return Several({f"monitors.{name}": {} for name in known}) if known else Left()


def _modules(value: Any) -> Any:
    """Names of modules. A text is a regular expression of PEFT, or stands for all of them."""
    if value in ("all-linear", ["all-linear"]):
        return Left("as by default: every linear module")
    return Left("a list of name endings here") if isinstance(value, str) else value


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

NOT_HERE = {
    "trainer.loss.type": {"sft": 'orchestrator.algo.type = "sft" has this loss'},
    "orchestrator.algo.type": {"dataset_sft": FROM_DATA},
    "orchestrator.train.env.algo.type": {"dataset_sft": FROM_DATA},
}
"""Values of keys of ours that only upstream has, and what to do."""

VALUES: dict[str, Callable[[Any], Any]] = {
    "wandb.offline": _OFFLINE,
    "monitors.wandb.offline": _OFFLINE,
    "model.compile": _switch,
    "trainer.model.compile": _switch,
    "trainer.model.compile.fullgraph": _hint,
    "trainer.model.ac": _each_block,
    "trainer.model.ac.mode": _each_block,
    "weight_broadcast.quantize_in_weight_transfer": _chosen({True: "bfloat16"}),
    "data.subsets": _only_one,
    "data.splits": _only_one,
    "val.data.splits": _only_one,
    "data.loss_mask.*": _hint,
    "deployment.num_infer_gpus": _hint,
    "deployment.nodes_per_fsdp_group": _hint,
    "max_async_level": _hint,
    "async_level": _hint,
    "orchestrator.max_async_level": _hint,
    "trainer.max_async_level": _hint,
    "orchestrator.training_mode": _RL_IS_GRPO,
    "orchestrator.advantage.type": _chosen({"default": "grpo"}, "docs/migrating.md"),
    **dict.fromkeys(
        [f"orchestrator.eval.{each}num_examples" for each in ("", "source.")]
        + [f"orchestrator.eval.{each}select.limit" for each in ("", "source.", "env.")],
        _examples,
    ),
    "orchestrator.eval.eval_base_model": lambda value: not value,
    "orchestrator.eval.skip_eval_on_resume": lambda value: not value,
    **dict.fromkeys(
        ("orchestrator.*.source.env.agent.runtime.type", "orchestrator.*.env.harness.runtime.type"),
        lambda value: Left("as by default") if value == "subprocess" else value,
    ),
    **dict.fromkeys(
        (
            *("trainer.model.lora.target_modules", "lora_target_modules"),
            *("actor_rollout_ref.model.target_modules", "peft_config.target_modules"),
        ),
        _modules,
    ),
    "actor_rollout_ref.model.enable_gradient_checkpointing": _each_block,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": _hint,
    "actor_rollout_ref.actor.ppo_mini_batch_size": _hint,
    "actor_rollout_ref.actor.clip_ratio": _clipped,
    "actor_rollout_ref.actor.optim.betas": _betas,
    "actor_rollout_ref.actor.entropy_coeff": _not_zero,
    "actor_rollout_ref.actor.kl_loss_coef": _kl,
    "actor_rollout_ref.actor.kl_loss_type": _chosen(
        {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
    ),
    "actor_rollout_ref.actor.loss_agg_mode": _chosen(
        {"token-mean": "tokens", "seq-mean-token-mean": "sequences"}
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": _chosen(
        {"vanilla": "ppo_clip", "geo_mean": "gmpo"}
        | {name: name for name in ("gspo", "clip_cov", "kl_cov", "cispo", "sapo")},
        "docs/tutorial-loss.md",
    ),
    "trainer.logger": _monitors,
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
    **dict.fromkeys(
        ("torch_dtype", "dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"),
        _chosen({"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"}),
    ),
    "attn_implementation": _hint,
    "gradient_checkpointing": _each_block,
    "enable_gradient_checkpointing": _each_block,
    "report_to": _monitors,
    "use_vllm": _chosen({True: "vllm"}),
    "vllm_mode": _chosen({"colocate": True}),
    "vllm_importance_sampling_correction": _hint,
    "importance_sampling_level": _chosen({"sequence": "gspo"}),
    "loss_type": _chosen({name: Several(keys) for name, keys in _LOSS_TYPES.items()}),
    "use_cpu": _chosen({True: "cpu"}),
    "eval_on_start": lambda value: not value,
    "metric_for_best_model": _hint,
    "scale_rewards": _chosen(
        {"group": "grpo_std", True: "grpo_std", "none": "grpo", False: "grpo"}
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
    """A default of another framework that differs from ours without an error."""

    key: str
    theirs: Any
    ours: str
    note: str = ""
    applies: Callable[[dict[str, Any]], bool] = lambda table: True


def _is(key: str, value: Any) -> Callable[[dict[str, Any]], bool]:
    return lambda table: get(table, key) == value


def _has(key: str) -> Callable[[dict[str, Any]], bool]:
    return lambda table: bool(get(table, key))


def _endless_sft(table: dict[str, Any]) -> bool:
    return "sft" in table and "max_steps" not in table


DIFFERENCES = (
    Difference("max_steps", None, ours="required", note="upstream trains until it is stopped"),
    Difference(
        "orchestrator.group_size", 1, ours="8", note="algorithms that compare siblings refuse 1"
    ),
    Difference(
        "trainer.scheduler.warmup_steps",
        10,
        ours="0",
        note="",
        applies=_is("trainer.scheduler.type", "linear"),
    ),
    Difference(
        "trainer.scheduler.warmup_steps",
        10,
        ours="0",
        note="",
        applies=_is("trainer.scheduler.type", "cosine"),
    ),
    Difference(
        "trainer.scheduler.decay_steps",
        10,
        ours="all after warm-up",
        note="",
        applies=_is("trainer.scheduler.type", "linear"),
    ),
    Difference(
        "trainer.optim.beta2",
        0.95,
        ours="0.999",
        note="of muon",
        applies=_is("trainer.optim.type", "muon"),
    ),
    Difference(
        "trainer.optim.momentum",
        0.9,
        ours="0.0",
        note="of sgd",
        applies=_is("trainer.optim.type", "sgd"),
    ),
    Difference(
        "trainer.optim.nesterov",
        True,
        ours="false",
        note="of sgd",
        applies=_is("trainer.optim.type", "sgd"),
    ),
    Difference(
        "orchestrator.algo.min_gain",
        None,
        ours="0.2",
        note="the gate of opsd: an example trains while its demonstration helps",
        applies=_is("orchestrator.algo.type", "opsd"),
    ),
    Difference(
        "orchestrator.algo.skip_truncated",
        False,
        ours="true",
        note="",
        applies=_is("orchestrator.algo.type", "opsd"),
    ),
    Difference(
        "orchestrator.post_batch_filters",
        None,
        ours="zero_advantage enforces",
        note="a rollout that is filtered is replaced here; upstream's batch shrinks",
    ),
    Difference(
        "orchestrator.eval.env.interval",
        100,
        ours="only at the ends",
        note="",
        applies=_has("orchestrator.eval.env"),
    ),
    Difference(
        "orchestrator.eval.env.num_examples",
        -1,
        ours="64",
        note="all examples",
        applies=_has("orchestrator.eval.env"),
    ),
    Difference("orchestrator.train.env.timeout", None, ours="600.0", note="seconds of a rollout"),
    Difference(
        "weight_broadcast.timeout",
        1200,
        ours="120.0",
        note="seconds",
        applies=_is("weight_broadcast.type", "nccl"),
    ),
    Difference(
        "recovery.hang_timeout",
        600,
        ours="1800.0",
        note="seconds; trainer.dist_timeout_seconds there",
    ),
    Difference(
        "orchestrator.max_inflight_rollouts",
        None,
        ours="what the engines can run",
        note="upstream adapts it from the engines' load",
    ),
    Difference(
        "ckpt.interval", None, ours="every 600 seconds", note="only at the end, if [ckpt] is set"
    ),
    Difference(
        "ckpt.enabled", False, ours="true", note="", applies=lambda table: "ckpt" not in table
    ),
    Difference(
        "trainer.activation_checkpointing", 1, ours="0", note="less memory, a third more arithmetic"
    ),
    Difference("trainer.compile", True, '"auto"', note="on for large models on a GPU"),
    Difference(
        "trainer.optim.type",
        "adamw_offload",
        ours="adamw",
        note="upstream offloads the optimizer's state",
    ),
    Difference(
        "trainer.lora.target_modules",
        None,
        ours="every linear module",
        note="ten names",
        applies=_has("trainer.lora"),
    ),
    Difference("rollout_transport.hwm", 10, "4"),
    Difference(
        "sft.batch_size",
        128,
        ours="32",
        note="conversations here, rows of seq_len tokens there",
        applies=_has("sft"),
    ),
    Difference("sft.epochs", None, ours="1.0", note="max_steps decides", applies=_endless_sft),
    Difference("seq_len", 128, ours="2048", note="of sft", applies=_has("sft")),
)
"""In the order of the page docs/migrating.md, which has each of them."""


def _clips_by_default(table: dict[str, Any]) -> bool:
    """Whether the config of verl leaves the loss to its default, PPO's clip."""
    return get(table, "trainer.loss.type") is None


DIFFERENCES_FROM_VERL = (
    Difference(
        "trainer.loss.type",
        "ppo_clip",
        ours='"default"',
        note="clip_ratio 0.2 and clip_ratio_c 3.0 there; a trust region here, without a clip",
        applies=_clips_by_default,
    ),
    Difference(
        "trainer.loss.dual_clip",
        3.0,
        ours="not set",
        note="clip_ratio_c there",
        applies=_is("trainer.loss.type", "ppo_clip"),
    ),
    Difference(
        "orchestrator.algo.type", "ppo", ours='"grpo"', note="adv_estimator = gae, with a critic"
    ),
    Difference("orchestrator.group_size", 1, ours="8", note="rollout.n there"),
    Difference(
        "orchestrator.batch_size",
        1024,
        ours="128 rollouts",
        note="train_batch_size, in prompts there",
    ),
    Difference(
        "trainer.minibatches",
        None,
        ours="1",
        note="train_batch_size / 256 there (ppo_mini_batch_size)",
    ),
    Difference(
        "orchestrator.max_off_policy_steps",
        0,
        ours="8",
        note="sampling and training take turns there",
    ),
    Difference(
        "orchestrator.train.sampling.max_completion_tokens",
        512,
        ours="up to seq_len",
        note="max_response_length there",
    ),
    Difference(
        "trainer.activation_checkpointing",
        1,
        ours="0",
        note="enable_gradient_checkpointing there",
    ),
    Difference("ckpt.interval", None, ours="every 600 seconds", note="save_freq = -1: none"),
)
"""The same for verl."""


def migrate(table: Mapping[str, Any]) -> Migration:
    """Translate a config of upstream prime-rl, TRL or verl into one of this project."""
    result = Migration()
    whole = as_whole(table)
    tables = [VERL] if "actor_rollout_ref" in whole else [PRIME_RL]
    is_flat = _is_flat(whole)
    is_upstream = tables == [PRIME_RL] and not is_flat
    carried: list[tuple[Match, Path, Any]] = []
    for path, value in leaf_paths(whole):
        if "env_vars" in path[:-1] and is_ours(path):
            _carry_variable(result, path=path, value=value)
            continue
        match = next(filter(None, (_find(path, each) for each in tables)), None)
        if match is None and _is_of_one_model(path) and _knows("trainer", path):
            match = look_up(("trainer", *path), PRIME_RL)
        if match is None and (is_flat or len(path) == 1) and not is_ours(path):
            match = _of_trl(path)
        if match is not None:
            carried.append((match, path, value))
        elif not is_ours(path):
            result.unknown.append(_assigned(path, value))
        elif _has_null(value):
            result.left_out.append(f"{_assigned(path, value)}: {_why_null(value).why}")
        elif not _has_our_form(path, value):
            result.unknown.append(_assigned(path, value))
        elif is_flat and not _fits(path, value):  # max_steps = -1: no limit of steps
            result.left_out.append(f"{_assigned(path, value)}: no value of {path[0]}")
        elif why := _why_not_here(path, value):
            result.left_out.append(f"{_assigned(path, value)}: {why}")
        else:
            _put(result.table, path, value)
            result.carried[path] = [".".join(map(str, path))]

    # Keys that mean the same here come first: another key for the same is compared with them.
    # A clip for both sides comes last: it gives way to one for a side.
    carried.sort(key=lambda each: VALUES.get(each[0].pattern) is _clipped)
    for match, path, value in carried:
        _carry(result, match, path=path, value=value)

    _combine(result, whole)
    result.table = _with_lists(result.table)
    _spread(result)
    if get(result.table, "trainer.compile") is True:
        _without_compiling(result)
    if is_upstream:
        _complete(result)
    elif tables == [VERL]:
        _add_defaults(result, DIFFERENCES_FROM_VERL)
    return result


def _without_compiling(result: Migration) -> None:
    """Leave ``trainer.compile`` to its default, which is on unless something stands against it."""
    ranks = get(result.table, "trainer.expert_parallel")
    if get(result.table, "trainer.router_replay"):
        why = "trainer.router_replay needs blocks as they are"
    elif ranks is True or ranks not in (None, False, 0, 1):
        why = "with trainer.expert_parallel ranks exchange tokens inside the blocks"
    else:
        return
    _remove(result, "trainer.compile", why)


def _has_our_form(path: Path, value: Any) -> bool:
    """Whether there are tables where our schema has tables, and lists where it has lists."""
    lists = [path[:place] for place, part in enumerate(path) if isinstance(part, int)]
    if not all(map(may_be_list, lists)):
        return False
    info = our_keys().get(".".join(part for part in path if isinstance(part, str)))
    is_entry = isinstance(path[-1], int) and info and _is_list_of_tables(info.annotation)
    return isinstance(value, dict) or not (is_table(path) or is_entry)


def _fits(path: Path, value: Any) -> bool:
    """Whether our schema, where it has the key, takes the value."""
    info = our_keys().get(".".join(part for part in path if isinstance(part, str)))
    return info is None or isinstance(path[-1], int) or fits(info, value)


def _find(path: Path, table: dict[str, Foreign]) -> Match | None:
    """The entry for a key. The rest of a table (``**``) may have other names here, too."""
    match = look_up(path, table)
    if match is None or match.path is None or not match.pattern.endswith("**"):
        return match
    inner = look_up(match.path, table)
    if inner is None or inner.pattern == match.pattern:
        return match
    return inner._replace(numbers=match.numbers + inner.numbers)


def _of_trl(path: Path) -> Match | None:
    """The entry for a key of a flat config. One of its tables, such as ``fsdp_config``, may have a
    single entry for all of its keys."""
    whole = look_up(path, NAMES) or look_up(path, TRL)
    if whole is not None:
        return whole
    table = look_up(path[:1], NAMES) or look_up(path[:1], TRL)
    return table if table is not None and table.path is None else None


def _is_flat(table: Mapping[str, Any]) -> bool:
    """Whether it is a config of TRL or of Hugging Face's trainer: no tables but those that are the
    value of one of its arguments."""
    of_tables = {"deepspeed", "datasets"}
    tables = {name for name, value in table.items() if _has_a_table(value)}
    of_arguments = all(name.endswith(("_kwargs", "_config")) for name in tables - of_tables)
    return of_arguments and any(name in NAMES for name in table.keys() - tables)


def _has_a_table(value: Any) -> bool:
    inner = value if isinstance(value, list) else [value]
    return any(isinstance(each, dict) for each in inner)


SHARED = {
    *("model", "max_steps", "seq_len", "ckpt", "monitors", "wandb", "log", "output_dir", "run"),
    "slurm",
}
PROCESSES = ("orchestrator", "trainer", "inference")
OF_ANY_MODEL = ("name", "vlm")
"""Keys of upstream's ``[model]`` of a whole run. In the config of one process it has the others of
that process's model, too."""


def as_whole(table: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the config of a single upstream process, whose keys stand at the top level, into a
    config of a run."""
    if is_sft(table):
        return _as_run_of_sft(table)
    if _is_evaluation(table):
        return _as_run_that_evaluates(table)
    if _is_flat(table) and isinstance(table.get("model"), str):  # an argument of GRPOTrainer
        return {"model_name_or_path" if k == "model" else k: v for k, v in table.items()}
    if any(name in table for name in (*PROCESSES, "actor_rollout_ref")) or _is_flat(table):
        return dict(table)

    process = _process_of(table)
    if process is None:
        return dict(table)
    inner = {key: value for key, value in table.items() if _is_of(process, key, value)}
    outer = _with_model({key: value for key, value in table.items() if key not in inner})
    model = outer.get("model")
    if isinstance(model, dict):
        outer["model"], of_process = _split_model(model)
        inner |= of_process
        if not outer["model"]:
            del outer["model"]
    served = get(table, "vllm.model")
    if process == "inference" and isinstance(served, str):
        outer.setdefault("model", {"name": served})
    return {**outer, process: inner}


OF_EVALUATIONS = ("source", "num_examples")
"""Keys at the top level of upstream's config of evaluations, which no other config has there."""


def _is_evaluation(table: Mapping[str, Any]) -> bool:
    """Whether it is a config of upstream's evaluations without a table ``[eval]``."""
    if {"eval", "orchestrator", "trainer", "actor_rollout_ref"} & table.keys():
        return False
    is_text = isinstance(table.get("model"), str) and not _is_flat(table)
    return is_text or not table.keys().isdisjoint(OF_EVALUATIONS)


def _as_run_that_evaluates(table: Mapping[str, Any]) -> dict[str, Any]:
    run = {
        key: value
        for key, value in table.items()
        if key in SHARED
        or any(is_ours(path) or look_up(path, PRIME_RL) for path, _ in leaf_paths({key: value}))
    }
    evaluation = {key: value for key, value in table.items() if key not in run}
    return {**_with_model(run), "orchestrator": {"eval": evaluation}}


def _with_model(run: dict[str, Any]) -> dict[str, Any]:
    """Upstream's evaluations name the model by a text."""
    model = run.get("model")
    return {**run, "model": {"name": model}} if isinstance(model, str) else run


def _split_model(model: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``[model]`` of the run, and the process's own as its table ``model``, if it has keys."""
    of_run = {key: model[key] for key in OF_ANY_MODEL if key in model}
    rest = {key: model[key] for key in model if key not in of_run}
    return of_run, {"model": rest} if rest else {}


def _process_of(table: Mapping[str, Any]) -> str | None:
    """The process that knows most of the keys which a run does not have at this place."""
    counts: Counter[str] = Counter()
    for path, _ in leaf_paths(table):
        is_of_run = path[0] == "model" or is_ours(path) or look_up(path, PRIME_RL) is not None
        if _is_of_one_model(path) or not is_of_run:
            counts.update(process for process in PROCESSES if _knows(process, path))
    return max(PROCESSES, key=lambda each: counts[each]) if counts else None


def _is_of_one_model(path: Path) -> bool:
    """Whether a key of ``[model]`` belongs to the model of one process."""
    is_of_any = path[1:2] == () or path[1] in OF_ANY_MODEL
    return path[0] == "model" and not is_of_any and look_up(path, PRIME_RL) is None


def _knows(process: str, path: Path) -> bool:
    """Whether a key is one of a process, by its name and not as the rest of a table."""
    match = look_up((process, *path), PRIME_RL)
    if match is not None:
        return match.pattern != f"{process}.model.**"
    return is_ours((process, *path))


def _is_of(process: str, key: str, value: Any) -> bool:
    """Whether a key at the top level is the process's and not the run's."""
    if key in SHARED:
        return False
    paths = [path for path, _ in leaf_paths({key: value})]
    if any(_knows(process, path) for path in paths):
        return True
    return not any(is_ours(path) or look_up(path, PRIME_RL) for path in paths)


def is_sft(table: Mapping[str, Any]) -> bool:
    """Whether it is a config of upstream's supervised fine-tuning: its data set is ``[data]``."""
    data = table.get("data")
    of_rl = {"orchestrator", "trainer", "actor_rollout_ref"} & table.keys()
    return isinstance(data, dict) and "fake" not in data and not of_rl


RUN_OF_SFT = {
    *("data", "val", "max_steps", "seq_len", "ckpt", "resume", "monitors", "wandb", "log", "bench"),
    *("output_dir", "run", "clean", "clean_output_dir", "deployment", "slurm", "inference"),
    *("tokenizer", "env_vars", "weight_broadcast"),
}
"""Tables of such a config that are of the whole run; others are its trainer's."""
ROLES = ("system", "user", "assistant", "tool")


def _as_run_of_sft(table: Mapping[str, Any]) -> dict[str, Any]:
    """Its keys where a config of RL has them: ``[model]`` holds the trainer's model, too."""
    run = {key: value for key, value in table.items() if key in RUN_OF_SFT}
    trainer = {key: value for key, value in table.items() if key not in RUN_OF_SFT}
    orchestrator = {key: trainer.pop(key) for key in ("eval", "renderer") if key in trainer}
    model = trainer.pop("model", {})
    if isinstance(model, dict):
        run["model"], of_trainer = _split_model(model)
        trainer |= of_trainer
    else:
        run["model"] = model
    mask = get(run, "data.loss_mask")
    if isinstance(mask, dict) and all(isinstance(mask.get(role, True), bool) for role in ROLES):
        trained = [role for role in ROLES if mask.get(role, role == "assistant")]
        if not mask.keys() - {*ROLES}:
            run["data"] = {**run["data"], "loss_mask": trained}
    parts = {"orchestrator": orchestrator, "trainer": trainer}
    return run | {name: part for name, part in parts.items() if part}


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
    if path[0] == "slurm" and not is_null(value):
        result.slurm = {**(result.slurm or {}), ".".join(map(str, path[1:])): value}
    if match.path is None:
        result.left_out.append(f"{_assigned(path, value)}: {match.note}")
        return

    convert = VALUES.get(match.pattern, lambda same: same)
    means_off = is_null(value) and convert in (_switch, _each_block)
    converted = _why_null(value) if _has_null(value) and not means_off else convert(value)
    if isinstance(converted, Left):
        why = converted.why or f"here {match.ours}" + (f", {match.note}" if match.note else "")
        result.left_out.append(f"{_assigned(path, value)}: {why}")
        return

    is_several = match.pattern in VALUES and _has_dotted_keys(converted)
    pairs = converted.items() if is_several else [(match.ours or "", converted)]
    for key, each in pairs:
        target = tuple(key.split(".")) if is_several else match.path
        _set(result, target, match=match, path=path, value=each, shown=value)


def _why_null(value: Any) -> Left:
    return NO_VALUE if is_null(value) else Left("TOML has no null, and so no list with one")


def _carry_variable(result: Migration, path: Path, value: Any) -> None:
    """An environment variable, unless it is a secret or the run sets it."""
    name = str(path[-1])
    is_name = path[-2] == "env_vars" and re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
    if not is_name or isinstance(value, dict | list):
        result.unknown.append(_assigned(path, value))
    elif is_null(value):
        result.left_out.append(f"{_assigned(path, value)}: {NO_VALUE.why}")
    elif SECRET.fullmatch(name):
        result.env_vars[name] = None
        result.left_out.append(f"{'.'.join(map(str, path))}: a secret; export it in the shell")
    elif OWN.fullmatch(name):
        result.left_out.append(f"{_assigned(path, value)}: the run sets this variable itself")
    else:
        result.env_vars[name] = str(value)
        _put(result.table, path, str(value))
        result.carried[path] = [".".join(map(str, path))]


def _has_dotted_keys(value: Any) -> bool:
    return isinstance(value, dict) and any("." in key for key in value)


def _set(result: Migration, target: Path, match: Match, path: Path, value: Any, shown: Any) -> None:
    """Write a value of ours. ``shown``: the foreign one, of messages."""
    named = [part for part in target if isinstance(part, str) and part != "0"]
    names = ".".join(named)
    info = our_keys().get(names)
    if named[0] == sft.TABLE:
        info = sft.SftConfig.model_fields[named[1]]
    elif not is_ours([part.replace(".", "_") for part in named]):
        result.unknown.append(_assigned(path, shown))
        return
    if why := _why_not_here(target, value):
        result.left_out.append(f"{_assigned(path, shown)}: {why}")
        return
    is_tables = info is not None and _is_list_of_tables(info.annotation)
    if is_tables and isinstance(path[-1], int) and not isinstance(value, dict):
        result.unknown.append(_assigned(path, shown))
        return
    if info is not None and isinstance(value, str) and not fits(info, value):
        value = [value] if fits(info, [value]) else value
    if info is not None and not fits(info, value):
        note = f" ({match.note})" if match.note else ""
        result.left_out.append(f"{_assigned(path, shown)}: no value of {names}{note}")
        return

    numbered = _numbered(target, list(match.numbers))
    present = _get_path(result.table, numbered)
    if present is not None and VALUES.get(match.pattern) is _clipped:
        result.carried.setdefault(path, []).append(names)
        return
    are_tables = isinstance(present, dict) and isinstance(value, dict)
    if present is not None and present != value and not are_tables:
        result.left_out.append(f"{_assigned(path, shown)}: {names} is {_toml(present)} already")
        return
    for length in range(1, len(numbered)):
        table = _get_path(result.table, numbered[:length])
        if table is not None and not isinstance(table, dict):
            outer = ".".join(part for part in numbered[:length] if isinstance(part, str))
            result.left_out.append(f"{_assigned(path, shown)}: {outer} is {_toml(table)} already")
            return
    _put(result.table, numbered, value)
    result.carried.setdefault(path, []).append(names)
    if match.note:
        result.notes.setdefault(names, []).append(match.note)


def _why_not_here(path: Path, value: Any) -> str | None:
    """What to do in place of a value that only upstream has."""
    values = NOT_HERE.get(".".join(part for part in path if isinstance(part, str)), {})
    return values.get(value) if isinstance(value, str) else None


EVERY = "*"
"""In place of a number: each entry of a list."""


def _numbered(target: Path, numbers: list[int]) -> Path:
    """A path of ours with the numbers of the list entries that it goes through."""
    result: list[PathPart] = []
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
    inner[path[-1]] = deepcopy(value)  # the user's config stays as it is


def _get_path(table: Any, path: Path) -> Any:
    for part in path:
        if not isinstance(table, dict) or part not in table:
            return None
        table = table[part]
    return table


def get(table: Any, key: str) -> Any:
    """The value at a dotted key; None: there is none. For a list, the line of its first entry."""
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
    of_every = made.pop(EVERY, {}) | {key: made[key] for key in made if isinstance(key, str)}
    return {EVERY: of_every, "": entries} if of_every else entries


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
        alone = {key: value for key, value in envs.items() if key not in (EVERY, "")}
        if not entries and (alone or "id" in shared):  # a table in place of a list of them
            entries = [alone]
        if entries:
            group["env"] = [{**shared, **entry} for entry in entries]
            continue
        del group["env"]
        place = f"orchestrator.{part}.env"
        _leave_out(result, (place,), f"there is no [[{place}]]")


# Values that several keys decide together.


def _number(value: Any) -> int | None:
    """A number above 0, also if it stands in quotes; None: it is something else."""
    if isinstance(value, str) and re.fullmatch(r"0*[1-9]\d{0,9}", value, re.ASCII):
        return int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return value if is_number else None


def _number_of(whole: Mapping[str, Any], key: str, default: int) -> int:
    """A number that decides about machines. Raises ``ConfigError``."""
    value = get(whole, key)
    if is_null(value):
        return default
    number = _number(value)
    if number is None:
        raise ConfigError(f"{key}: expected a number above 0, got {_toml(value)}")
    return number


GPUS_PER_NODE = 8
"""Upstream's default."""


def _combine(result: Migration, whole: Mapping[str, Any]) -> None:
    """Values that depend on several foreign keys."""
    table = result.table

    def number(key: str) -> int | None:
        return _number(get(whole, key))

    def put(key: str, value: Any, note: str = "", of: Sequence[str] = ()) -> None:
        """``of``: the foreign keys that the value is from."""
        path = tuple(key.split("."))
        if _get_path(table, path) is not None:
            return
        _put(table, path, value)
        if note:
            result.notes.setdefault(key, []).append(note)
        # Each had an entry of its own, by which it alone says nothing.
        alone = tuple(f"{each} = " for each in of)
        result.left_out[:] = [each for each in result.left_out if not each.startswith(alone)]
        for each in of:
            result.carried.setdefault(tuple(each.split(".")), []).append(key)

    if get(whole, "deployment.type") == "multi_node":
        per_node = _number_of(whole, "deployment.gpus_per_node", default=GPUS_PER_NODE)
        nodes = _number_of(whole, "deployment.num_train_nodes", default=1)
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
        of_verl = "data.train_batch_size"
        put("orchestrator.batch_size", prompts * per_prompt, note, of=[of_verl])
        in_prompts = "actor_rollout_ref.actor.ppo_mini_batch_size"
        if mini := number(in_prompts):
            number_of_steps = max(1, prompts // mini)
            note = f"{prompts} / {mini} prompts"
            put("trainer.minibatches", number_of_steps, note, of=[in_prompts])
    gpus_of_verl = "trainer.n_gpus_per_node"
    if gpus := number(gpus_of_verl):
        put("trainer.num_ranks", gpus * (number("trainer.nnodes") or 1), of=[gpus_of_verl])
    per_device = "per_device_train_batch_size"
    if rows := number(per_device):
        factors = ("steps_per_generation", "gradient_accumulation_steps")
        factor = next(filter(number, factors), None)
        rollouts = rows * ((number(factor) if factor else None) or 1)
        of_trl = [per_device, *([factor] if factor else [])]
        put("orchestrator.batch_size", rollouts, "times the number of GPUs", of=of_trl)

    for prompt, completion in (
        ("data.max_prompt_length", "data.max_response_length"),
        ("max_prompt_length", "max_completion_length"),
    ):
        lengths = number(prompt), number(completion)
        if lengths[0] and lengths[1]:
            both = lengths[0] + lengths[1]
            put("seq_len", both, "prompt and completion together", of=[prompt])
    _fit_loss(result, whole)
    _fit_algorithm(result, whole)
    if any("teacher_rollout_model" in path for path in result.carried):
        put("orchestrator.algo.type", "sft", "the teacher samples: teacher_rollout_model there")
    _fit_lora(result, whole)
    _fit_monitors(result, whole)
    steps_of_run = get(table, "max_steps")
    for key in ("warmup_ratio", "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"):
        ratio = get(whole, key)
        if isinstance(ratio, float) and isinstance(steps_of_run, int) and 0 < ratio <= 1:
            steps = round(ratio * steps_of_run)
            put("trainer.scheduler.warmup_steps", steps, f"{ratio} of a run", of=[key])


CLIPS = ("clip_eps_low", "clip_eps_high", "dual_clip")
"""Keys of ``ppo_clip``."""


def _fit_loss(result: Migration, whole: Mapping[str, Any]) -> None:
    """The loss with the keys that it has: gspo is a sum over rollouts, dr_grpo needs its constant,
    cispo bounds the ratio itself in TRL, and sapo has no clip."""
    loss = get(result.table, "trainer.loss")
    if not isinstance(loss, dict):
        return
    if "type" not in loss and not loss.keys().isdisjoint(CLIPS):
        loss["type"] = "ppo_clip"
        result.notes["trainer.loss.type"] = ["the loss with these keys"]
    name = loss.get("type")
    if name != "ppo_clip" and loss.pop("dual_clip", None) is not None:
        _leave_out(result, ("trainer.loss.dual_clip",), f"the loss {name} has no such clip")
    if name in ("gmpo", "kl_cov"):
        for key in CLIPS:
            loss.pop(key, None)
        clips = tuple(f"trainer.loss.{key}" for key in CLIPS)
        _leave_out(result, clips, f"the loss {name} has keys of its own")
    if name in ("gspo", "gmpo") and loss.pop("normalize_by", None) is not None:
        _leave_out(result, ("trainer.loss.normalize_by",), f"the loss {name} has a mean of its own")
    if loss.get("type") == "dr_grpo" and "constant" not in loss:
        rollouts = get(result.table, "orchestrator.batch_size") or 128
        tokens = get(result.table, "orchestrator.train.sampling.max_completion_tokens") or 256
        if isinstance(rollouts, int) and isinstance(tokens, int):
            loss["constant"] = float(rollouts * tokens)
            note = f"{rollouts} rollouts of at most {tokens} tokens"
            result.notes["trainer.loss.constant"] = [note]
    is_verl = "actor_rollout_ref" in whole
    if loss.get("type") not in ("cispo", "sapo") or (is_verl and loss["type"] == "cispo"):
        return  # verl clips the weights of cispo at 1 - clip_ratio_low and 1 + clip_ratio_high
    epsilon_high = get(whole, "epsilon_high")
    had = [loss.pop(key, None) for key in ("clip_eps_low", "clip_eps_high")]
    if loss["type"] == "cispo" and isinstance(epsilon_high, int | float) and epsilon_high > 1:
        loss["clip_eps_high"] = round(epsilon_high - 1.0, 9)
        result.notes["trainer.loss.clip_eps_high"] = ["epsilon_high - 1: of the ratio there"]
    elif any(value is not None for value in had):
        result.notes.setdefault("trainer.loss.type", []).append("without the clip of epsilon")
        clips = ("trainer.loss.clip_eps_low", "trainer.loss.clip_eps_high")
        _leave_out(result, clips, f"the loss {loss['type']} has no such clip")


PENALIZED = {"dapo", "dr_grpo", "grpo_std", "opo", "reinforce", "rloo"}
"""Algorithms with the key ``penalties``."""


def _fit_algorithm(result: Migration, whole: Mapping[str, Any]) -> None:
    """The algorithm with the keys that it has, and a critic only where one is read."""
    algo = get(result.table, "orchestrator.algo")
    if not isinstance(algo, dict):
        algo = {}
    is_trl = _is_flat(whole) and "num_generations" in whole
    if get(whole, "algorithm.norm_adv_by_std_in_grpo") is False and algo.get("type") == "grpo_std":
        algo["type"] = "grpo"
        result.notes["orchestrator.algo.type"] = ["norm_adv_by_std_in_grpo = false: no division"]
    if "penalties" in algo and "type" not in algo and is_trl:
        algo["type"] = "grpo_std"  # TRL divides by the deviation, unless scale_rewards forbids it
        result.notes["orchestrator.algo.type"] = ["the default of scale_rewards is group"]
    if is_trl and "type" not in algo:
        why = 'orchestrator.algo.type: grpo_std there (scale_rewards = "group"), grpo here'
        result.defaults.append(f"{why}: no division by the group's deviation")

    actor = get(whole, "actor_rollout_ref.actor")
    if isinstance(actor, dict) and actor.get("use_kl_loss") is not True:
        _without_kl(result, algo, "verl reads it only where use_kl_loss = true")

    name = algo.get("type", "grpo")
    if "penalties" in algo and name not in PENALIZED:
        del algo["penalties"]
        losses = get(result.table, "trainer.losses")
        if isinstance(losses, dict):
            losses.pop("kl_to_initial", None)
        why = f"algorithm {name} has no penalties; those of prime-rl-baselines have, such as rloo"
        _leave_out(result, ("orchestrator.algo.penalties", "trainer.losses.kl_to_initial"), why)
    trainer = result.table.get("trainer")
    if name != "ppo" and isinstance(trainer, dict) and trainer.pop("heads", None):
        _leave_out(result, ("trainer.heads",), f"algorithm {name} reads no critic")


def _fit_lora(result: Migration, whole: Mapping[str, Any]) -> None:
    """The adapter, where the other framework trains one: rank 0 is its word for none."""
    lora = get(result.table, "trainer.lora")
    if not isinstance(lora, dict):
        return
    rank = lora.get("rank")
    is_trl = "lora_rank" not in whole and "peft_config" not in whole  # both have no switch
    if isinstance(rank, int | float) and rank <= 0:
        why = f"rank {_toml(rank)}: no adapter"
    elif "actor_rollout_ref" in whole and rank is None:
        why = "verl trains an adapter only where lora_rank is above 0"
    elif _is_flat(whole) and is_trl and whole.get("use_peft") is not True:
        why = "TRL trains an adapter only where use_peft = true"
    else:
        return
    _remove(result, "trainer.lora", why)


IN_ANY_CASE = ("console", "file", "none")
"""Where verl's and TRL's numbers go besides: here they are always in the log and in files."""


def _fit_monitors(result: Migration, whole: Mapping[str, Any]) -> None:
    """The project of W&B counts where its metrics go there. Other places are named."""
    key = "trainer.logger" if "actor_rollout_ref" in whole else "report_to"
    value = get(whole, key)
    if value is None or (key == "report_to" and not _is_flat(whole)):
        return
    names = [
        each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)
    ]
    if "wandb" not in names and "all" not in names:
        _remove(result, "monitors.wandb", f"{key} has no wandb")
    path = tuple(key.split("."))
    others = [name for name in names if name not in ("wandb", "tensorboard", *IN_ANY_CASE)]
    if path in result.carried:
        why = "no such monitor; prime-rl plugins new makes a package for one"
        result.left_out += [f"{_assigned(path, name)}: {why}" for name in others]


def _remove(result: Migration, key: str, why: str) -> None:
    """Take a table out of the result; what was carried to it is left out."""
    *tables, name = key.split(".")
    outer = get(result.table, ".".join(tables))
    if not isinstance(outer, dict) or name not in outer:
        return
    del outer[name]
    if not outer and len(tables) == 1:
        del result.table[tables[0]]
    _leave_out(result, (key,), why)


def _without_kl(result: Migration, algo: dict[str, Any], why: str) -> None:
    """Without the penalty of the KL, and with the other penalties."""
    penalties = algo.get("penalties")
    if isinstance(penalties, dict):
        penalties.pop("kl_to_initial", None)
        if not penalties:
            del algo["penalties"]
    losses = get(result.table, "trainer.losses")
    if isinstance(losses, dict):
        losses.pop("kl_to_initial", None)
        if not losses:
            del result.table["trainer"]["losses"]
    kl = ("orchestrator.algo.penalties.kl_to_initial", "trainer.losses.kl_to_initial")
    _leave_out(result, kl, why)


def _leave_out(result: Migration, tables: tuple[str, ...], why: str) -> None:
    """What was carried to ``tables`` is left out after all."""
    for path, names in [*result.carried.items()]:
        result.carried[path] = [name for name in names if not name.startswith(tables)]
        if not result.carried[path]:
            del result.carried[path]
            result.left_out.append(f"{'.'.join(map(_key, path))}: {why}")


ENDLESS = 1000
"""Steps of a run whose config has no end."""


def _complete(result: Migration) -> None:
    """What upstream has without a key, and the differences of defaults."""
    table = result.table
    if "sft" in table:
        _complete_sft(result)
        return
    inference = table.setdefault("inference", {})
    if "base_url" not in inference and "engine" not in inference:
        inference["engine"] = "vllm"
        result.notes.setdefault("inference.engine", []).append("upstream's only engine")
    if "max_steps" not in table:
        table["max_steps"] = ENDLESS
        note = "required here: upstream trains until it is stopped"
        result.notes.setdefault("max_steps", []).append(note)
    _add_defaults(result, DIFFERENCES)


def _complete_sft(result: Migration) -> None:
    """The same for supervised fine-tuning, in which nothing is sampled unless it evaluates."""
    if get(result.table, "orchestrator.eval.env"):
        result.table.setdefault("inference", {}).setdefault("engine", "vllm")
        result.notes.setdefault("inference.engine", []).append("upstream's only engine")
    parts = ("trainer.", "ckpt.", "recovery.", "orchestrator.eval.", "sft.", "seq_len")
    _add_defaults(result, [each for each in DIFFERENCES if each.key.startswith(parts)])


def _add_defaults(result: Migration, differences: Sequence[Difference]) -> None:
    table = result.table
    for each in differences:
        if get(table, each.key) is None and each.applies(table):
            theirs = "not set" if each.theirs is None else _toml(each.theirs)
            note = f"; {each.note}" if each.note else ""
            result.defaults.append(f"{each.key}: {theirs} there, {each.ours} here{note}")


# Writing.


def _assigned(path: Sequence[PathPart], value: Any) -> str:
    """``KEY = VALUE``, on one line, without the value of a secret."""
    if isinstance(value, str) and SECRET.fullmatch(str(path[-1])):
        value = "..."
    return f"{'.'.join(map(_key, path))} = {_toml(value)}"


def _key(part: PathPart) -> str:
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
        return "null"  # of comments: no value of a migrated table is null
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
    engines = _number_of(migration.table, "inference.replicas", default=1)
    engines = _number_of(whole, "deployment.num_infer_nodes", default=engines)
    nodes = _number_of(whole, "deployment.num_train_nodes", default=1) + engines
    gpus = _number_of(whole, "deployment.gpus_per_node", default=GPUS_PER_NODE)
    options: dict[str, Any] = {"job-name": "prime-rl", "nodes": nodes, "ntasks-per-node": 1}
    options["gpus-per-node"] = gpus
    options |= {_DIRECTIVES[key]: slurm[key] for key in slurm if key in _DIRECTIVES}
    lines = []
    for option, value in options.items():
        is_plain = isinstance(value, str | int) and not isinstance(value, bool)
        if not is_plain or not re.fullmatch(r"[\w.,:/@%+=\[\]-]+", str(value)):
            raise ConfigError(f"slurm: {_toml(value)} is no value of sbatch's option --{option}")
        lines.append(f"#SBATCH --{option}={value}")
    lines += ["#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --output=%x-%j.log"]
    rest = {key: slurm[key] for key in slurm if key not in (*_DIRECTIVES, *_BEFORE)}
    lines += [f"# Not used: {_one_line(_assigned((key,), value))}" for key, value in rest.items()]
    names = sorted(migration.env_vars)
    exports = []
    for name in names:
        public = migration.env_vars[name]
        if public is None:
            exports.append(f"# {name} is a secret: export it in the shell that calls sbatch.")
        else:
            exports.append(f"export {name}={shlex.quote(public)}")

    command = slurm.get("pre_run_command", "")
    if not isinstance(command, str):
        raise ConfigError(f"slurm.pre_run_command: expected a text, got {_toml(command)}")
    before = ["", "# pre_run_command", command] if command else []
    return SBATCH.format(
        directives="\n".join(lines),
        exports="\n".join(exports),
        before="\n".join(before),
        config=shlex.quote(config),
        script=script,
    )
