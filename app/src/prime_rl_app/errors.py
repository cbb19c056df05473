"""Config errors for the user who wrote the file: where the key stands, and what it is called here.

orchestrator.bach_size: unknown key ...   ->   my.toml:12: orchestrator.bach_size: unknown key ...
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.explain import TAGS
from prime_rl.config.run import RunConfig
from prime_rl.errors import PrimeRLError
from prime_rl_app.config import (
    fitted,
    installed_defaults,
    keep_texts,
    merge,
    parse_overrides,
    read_toml,
    set_at,
    without_replaced,
)

NAMES_ELSEWHERE = {
    "learning_rate": "trainer.optim.lr",
    "actor_learning_rate": "trainer.optim.lr",
    "lr": "trainer.optim.lr",
    "weight_decay": "trainer.optim.weight_decay",
    "lr_scheduler_type": "trainer.scheduler.type",
    "lr_scheduler": "trainer.scheduler.type",
    "warmup": "trainer.scheduler.warmup_steps",
    "num_warmup_steps": "trainer.scheduler.warmup_steps",
    "warmup_steps": "trainer.scheduler.warmup_steps",
    "warmup_ratio": "trainer.scheduler.warmup_steps",
    "lr_warmup_steps": "trainer.scheduler.warmup_steps",
    "adam_beta1": "trainer.optim.beta1",
    "adam_beta2": "trainer.optim.beta2",
    "max_grad_norm": "trainer.optim.max_norm",
    "grad_clip": "trainer.optim.max_norm",
    "gradient_clipping": "trainer.optim.max_norm",
    "batch_size": "orchestrator.batch_size",
    "train_batch_size": "orchestrator.batch_size",
    "rollout_batch_size": "orchestrator.batch_size",
    "generation_batch_size": "orchestrator.batch_size",
    "ppo_mini_batch_size": "trainer.minibatches",
    "num_mini_batches": "trainer.minibatches",
    "ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "micro_train_batch_size": "trainer.micro_batch_tokens",
    "per_device_train_batch_size": "trainer.micro_batch_tokens",
    "gradient_accumulation_steps": "trainer.micro_batch_tokens",
    "num_generations": "orchestrator.group_size",
    "rollout_n": "orchestrator.group_size",
    "num_rollouts": "orchestrator.group_size",
    "n_samples_per_prompt": "orchestrator.group_size",
    "group_size": "orchestrator.group_size",
    "temperature": "orchestrator.train.sampling.temperature",
    "max_completion_length": "orchestrator.train.sampling.max_completion_tokens",
    "max_response_length": "orchestrator.train.sampling.max_completion_tokens",
    "max_new_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "max_completion_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "generate_max_len": "orchestrator.train.sampling.max_completion_tokens",
    "max_prompt_length": "seq_len",
    "max_model_len": "seq_len",
    "max_length": "seq_len",
    "max_seq_len": "seq_len",
    "max_seq_length": "seq_len",
    "model_name": "model.name",
    "model_name_or_path": "model.name",
    "total_steps": "max_steps",
    "num_steps": "max_steps",
    "num_train_epochs": "max_steps",
    "num_epochs": "max_steps",
    "num_episodes": "max_steps",
    "total_epochs": "max_steps",
    "total_training_steps": "max_steps",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep_last",
    "save_freq": "ckpt.interval",
    "eval_steps": "orchestrator.eval.env.0.interval",
    "test_freq": "orchestrator.eval.env.0.interval",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "advantage_estimator": "orchestrator.algo.type",
    "adv_estimator": "orchestrator.algo.type",
    "algorithm": "orchestrator.algo",
    "actor_rollout_ref": "trainer",
    "data": "orchestrator.train",
    "loss_type": "trainer.loss.type",
    "num_iterations": "trainer.epochs",
    "ppo_epochs": "trainer.epochs",
    "num_ppo_epochs": "trainer.epochs",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "enable_gradient_checkpointing": "trainer.activation_checkpointing",
    "bf16": "trainer.dtype",
    "attn_implementation": "trainer.attention",
    "n_gpus_per_node": "trainer.num_ranks",
    "wandb_project": "monitors.wandb.project",
    "project_name": "monitors.wandb.project",
    "report_to": "monitors",
}
"""Names that TRL, verl, OpenRLHF and Hugging Face's trainer give to a key of ours."""

_PENALTY = "orchestrator.algo.penalties"
_BASELINES = "the algorithms of prime-rl-baselines"
_CLIPPED = """trainer.loss.type = "ppo_clip\""""
_LORA = "prime-rl-lora"
KEYS_OF_PLUGINS = {
    **dict.fromkeys(
        ("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "use_kl_loss"),
        (f"{_PENALTY}.kl_to_initial", _BASELINES),
    ),
    **dict.fromkeys(
        ("entropy_coeff", "entropy_coef", "ent_coef"), (f"{_PENALTY}.entropy_bonus", _BASELINES)
    ),
    **dict.fromkeys(
        ("clip_range", "clip_ratio", "cliprange", "eps_clip", "epsilon", "clip_eps"),
        ("trainer.loss.clip_eps_high", _CLIPPED),
    ),
    **dict.fromkeys(
        ("clip_ratio_high", "eps_clip_high", "epsilon_high"),
        ("trainer.loss.clip_eps_high", _CLIPPED),
    ),
    "clip_ratio_low": ("trainer.loss.clip_eps_low", _CLIPPED),
    "eps_clip_low": ("trainer.loss.clip_eps_low", _CLIPPED),
    "clip_ratio_c": ("trainer.loss.dual_clip", _CLIPPED),
    "lora_r": ("trainer.lora.rank", _LORA),
    "lora_rank": ("trainer.lora.rank", _LORA),
    "lora_alpha": ("trainer.lora.alpha", _LORA),
    "lora_dropout": ("trainer.lora.dropout", _LORA),
    "lora_target_modules": ("trainer.lora.target_modules", _LORA),
    **dict.fromkeys(
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
        ("inference.vllm.gpu_memory_utilization", "prime-rl-vllm"),
    ),
    **dict.fromkeys(
        ("vllm_tensor_parallel_size", "tensor_model_parallel_size"),
        ("inference.vllm.tensor_parallel_size", "prime-rl-vllm"),
    ),
}
"""The same for a plugin's keys: key and what has it."""

NOT_GIVEN = "required, and nothing was given"
_LINE = re.compile(r"^(?P<key>[A-Za-z_][\w.-]*): (?P<problem>.*)$", re.DOTALL)
_OF_PLUGIN = re.compile(r" \(\w+ '[^']*'\)(?=[.:])")
"""``trainer.loss (loss 'default').adv_tau``: whose key it is."""
_OF_ENV = re.compile(r"^env '(?P<label>[^']*)': (?P<rest>.*)$", re.DOTALL)
_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*")(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")


def explained(message: str, arguments: Sequence[str]) -> str:
    """The message of an error; each line about a key gets the file and line that set it.
    ``arguments``: the command line, which names the files."""
    places: dict[str, str] = {}
    for word in arguments:
        if word.endswith(".toml") and Path(word).is_file():
            text = Path(word).read_text(errors="replace")
            places |= {key: f"{word}:{number}" for key, number in lines_of_keys(text)}
            places |= {f"env {label}": places[key] for label, key in _labels(text) if key in places}

    given = {word[2:].partition("=")[0].replace("-", "_") for word in arguments if word[:2] == "--"}
    lines = message.split("\n")
    if arguments[:1] == ["run"] and (left := _left(arguments[1:], lines)):
        lines += ["With these keys left out:", *left]
    if places and all(f"{key}: {NOT_GIVEN}" in lines for key in ("model", "max_steps")):
        lines += ["A file with a part of a config goes after one with the rest: A.toml B.toml."]
    return "\n".join(_explained(line, places, given) for line in lines)


def _left(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """What the installed plugins refuse in a config of which the schema refuses some keys: those
    are left out. Nothing if one of them is required."""
    from prime_rl_app.cli.run import split_arguments
    from prime_rl_app.resolve import check

    try:
        files, overrides = split_arguments(list(arguments))
        table: dict[str, Any] = {}
        for file in files:
            table = merge(table, read_toml(Path(file)))
        for path, value in parse_overrides(overrides):
            set_at(table, path, value)
        keep_texts(table, overrides)
        config, refused = _without_refused(without_replaced(merge(installed_defaults(), table)))
        if config is not None and any(line.startswith(refused) for line in known):
            check(fitted(config)[0])
    except PrimeRLError as error:
        return [line for line in str(error).split("\n") if line not in known]

    return []


def _without_refused(table: dict[str, Any]) -> tuple[RunConfig | None, tuple[str, ...]]:
    """The config without the keys that the schema refuses, and these keys; None if one of them is
    required."""
    refused: list[str] = []
    while True:
        try:
            return RunConfig.model_validate(table), tuple(refused)
        except ValidationError as error:
            for each in error.errors():
                path = [part for part in each["loc"] if part not in TAGS]
                inner: Any = table
                for part in path[:-1]:
                    inner = inner[part]
                if not isinstance(inner, dict) or path[-1] not in inner:
                    return None, ()
                if isinstance(inner[path[-1]], dict):
                    return None, ()  # keys that do not go together: without all, others are missing
                del inner[path[-1]]
                refused.append(f"{'.'.join(map(str, path))}: ")


def _explained(line: str, places: dict[str, str], overridden: set[str]) -> str:
    found = _OF_ENV.match(line)
    if found:
        label, rest = found.groups()
        place = _place_of_env(label, _OF_PLUGIN.sub("", rest), places, overridden)
        return f"{place}: {line}" if place else line

    found = _LINE.match(_OF_PLUGIN.sub("", line))
    if found is None:
        return line
    key = found["key"]
    problem = found["problem"]
    name = key.rpartition(".")[2]
    ours, owner = KEYS_OF_PLUGINS.get(name, (NAMES_ELSEWHERE.get(name), ""))
    if problem.startswith("unknown key") and ours not in (None, key):
        line = f"{key}: unknown key; did you mean {ours!r}" + (f" of {owner}?" if owner else "?")
    place = None if key in overridden else places.get(key)
    return line if place is None else f"{place}: {line}"


def _place_of_env(
    label: str, rest: str, places: dict[str, str], overridden: set[str]
) -> str | None:
    """Where the key is set that an env's message begins with (its own table or the shared one);
    else where the env's table begins."""
    key = (re.match(r"[\w.]+", rest) or [""])[0]
    table = places.get(f"env {label}", "")
    own = next((k for k, place in places.items() if place == table and k[-1:].isdigit()), "")
    for each in (f"{own}.{key}", f"{own}.{key.partition('.')[0]}", f"orchestrator.{key}"):
        if each in places or each in overridden:
            return places.get(each) if each not in overridden else None
    return table or None


def _labels(text: str) -> Iterator[tuple[str, str]]:
    """Label and table of each env of a TOML file; those of training last, because their label
    may be that of a held-out one too."""
    try:
        orchestrator = tomllib.loads(text).get("orchestrator", {})
        for part in ("eval", "train"):
            for number, env in enumerate(orchestrator.get(part, {}).get("env", [])):
                yield env.get("name") or env["id"], f"orchestrator.{part}.env.{number}"
    except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError):
        return


def lines_of_keys(text: str) -> Iterator[tuple[str, int]]:
    """``(dotted key, line number)`` of each table and key of a TOML file; entries of an array of
    tables are numbered: ``orchestrator.train.env.0.id``. Inline tables count as one key."""
    table = ""
    entries = dict[str, int]()
    closing = ""
    for number, line in enumerate(text.split("\n"), 1):
        if closing:  # inside a text of several lines
            closing = "" if line.count(closing) % 2 else closing
            continue

        closing = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")
        header = _TABLE.match(line)
        if header:
            table = _numbered(_plain(header[2]), entries)
            if header[1] == "[[":
                entries[table] = entries.get(table, -1) + 1
                table = f"{table}.{entries[table]}"
            yield table, number
        elif key := _KEY.match(line):
            yield f"{table}.{_plain(key[1])}".lstrip("."), number


def _plain(key: str) -> str:
    return re.sub(r"\s*\.\s*", ".", key).replace('"', "")


def _numbered(table: str, entries: dict[str, int]) -> str:
    """A table inside the newest entry of an array of tables."""
    path = ""
    for part in table.split("."):
        path = f"{path}.{part}".lstrip(".")
        if path in entries and path != table:
            path = f"{path}.{entries[path]}"
    return path
