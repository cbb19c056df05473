"""Keys of other frameworks: every error about one says where it belongs here."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl_app.cli import main
from prime_rl_app.errors import explained, in_words
from prime_rl_app.foreign import NAMES, PRIME_RL, SHORT, VERL, advice, look_up, our_keys, path_of

CONFIG_PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
TABLES = {**PRIME_RL, **SHORT, **VERL, **NAMES}


def is_documented(ours):
    """Whether the generated page has the key, in whatever table."""
    part, _, name = ours.removesuffix(".**").rpartition(".")
    is_free = part.startswith("inference.vllm") or "extra_body" in ours or ".args" in ours
    return is_free or f"| `{name}` |" in CONFIG_PAGE or f"`[{ours}]`" in CONFIG_PAGE


@pytest.mark.parametrize(("theirs", "foreign"), TABLES.items())
def test_each_entry_leads_to_a_key_of_ours_or_says_why_not(theirs, foreign):
    if foreign.ours is None:
        assert foreign.note
        return
    for part in ("train", "eval"):
        path = [
            p for p in foreign.ours.replace("*.", f"{part}.", 1).split(".") if not p.isdecimal()
        ]
        ours = ".".join(path).removesuffix(".**")
        tables_of_plugins = ("penalties.", "harness", "monitors.wandb", "teacher.headers")
        is_known = ours in our_keys() or any(each in ours for each in tables_of_plugins)
        assert is_known or is_documented(ours), ours


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("temprature", "orchestrator.train.sampling.temperature"),
        ("max_completion_token", "orchestrator.train.sampling.max_completion_tokens"),
        ("temperature", "orchestrator.train.sampling.temperature"),
        ("nothing_like_it", "orchestrator.train.sampling"),
    ],
)
def test_a_misspelt_key_of_a_renamed_table_leads_to_one_that_exists(name, ours):
    said = explained(f"orchestrator.sampling.{name}: unknown key; known here: a", [])
    assert said.endswith(f"unknown key; did you mean {ours!r}?")
    assert ours in our_keys()


@pytest.mark.parametrize(("theirs", "foreign"), TABLES.items())
def test_an_unknown_key_of_another_framework_gets_the_advice_of_the_table(theirs, foreign):
    key = theirs.replace("**", "x").replace("*", "train")
    path = path_of(key)
    match = look_up(path, PRIME_RL) or look_up(path, SHORT) or look_up(path, VERL) or advice(key)
    if match is None or match.ours == key:  # the same name here
        return
    if theirs.endswith("**"):  # `x` is no key of ours
        match = advice(key)
    said = explained(f"{key}: unknown key; known here: a, b", [])
    assert said == f"{key}: {in_words(match)}"
    assert "known here" not in said and (match.ours is None or match.ours in said)


WRONG = """max_steps = 3
token_batch_size = 5
[model]
name = "tiny-reverse"
[trainer.model.lora]
rank = 8
[trainer.model]
attn = "flash_attention_3"
ac = { freq = 2 }
[trainer.ckpt]
skip_optimizer = true
[inference.vllm]
gpu_memory_utilization = 0.5
[deployment]
num_infer_nodes = 2
[orchestrator]
batch_size = 8
group_size = 4
[orchestrator.eval]
group_size = 2
temperature = 0.5
[orchestrator.renderer]
name = "qwen3"
[[orchestrator.train.env]]
id = "reverse-text"
[[orchestrator.post_batch_filters]]
type = "repetition"
threshold = 0.4
[monitors.prime]
"""


def test_hints_for_keys_of_upstream_are_right(tmp_path, monkeypatch, capsys):
    file = tmp_path / "wrong.toml"
    file.write_text(WRONG)
    words = ["prime-rl", "run", str(file), "--dry-run", "--trainer.optim.betas2", "0.9"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()

    def line(key):
        return next(each for each in lines if f"{key}: " in each)

    threshold = "orchestrator.post_batch_filters.threshold"
    assert "did you mean 'orchestrator.post_batch_filters.ngram_threshold'" in line(threshold)
    assert line(threshold).startswith(f"{file}:28: ")
    assert line("trainer.model.lora.rank") == (
        f"{file}:6: trainer.model.lora.rank: unknown key; did you mean 'trainer.lora.rank'?"
    )
    assert "'trainer.activation_checkpointing'" in line("trainer.model.ac.freq")
    assert "trainer.attention selects the kernel" in line("trainer.model.attn")
    assert "no counterpart here: one [ckpt]" in line("trainer.ckpt.skip_optimizer")
    assert 'Set inference.engine = "vllm"' in line("inference.vllm")
    assert "the launcher places the engines" in line("deployment.num_infer_nodes")
    assert "did you mean 'orchestrator.token_batch_size'" in line("token_batch_size")
    assert "'orchestrator.eval.env.group_size' (of each env)" in line(
        "orchestrator.eval.group_size"
    )
    assert "'orchestrator.eval.sampling.temperature'" in line("orchestrator.eval.temperature")
    assert "the platform of upstream" in line("monitors.prime")
    assert line("trainer.optim.betas2") == (
        "command line: trainer.optim.betas2: unknown key; did you mean 'trainer.optim.beta2'?"
    )
    assert "by convention prime-rl-" not in "".join(lines)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("eval.group_size", "orchestrator.eval.env.group_size"),
        ("eval.interval", "orchestrator.eval.env.interval"),
        ("train.sampling.temperature", "orchestrator.train.sampling.temperature"),
        ("optim.lr", "trainer.optim.lr"),
        ("scheduler.warmup_steps", "trainer.scheduler.warmup_steps"),
    ],
)
def test_a_table_of_one_process_without_its_name_is_found(key, ours):
    assert advice(key).ours == ours


def test_a_hint_by_spelling_needs_a_value_of_the_right_type(tmp_path, monkeypatch, capsys):
    file = tmp_path / "wrong.toml"
    file.write_text(
        'max_steps = 1\n[model]\nname = "tiny-reverse"\n[orchestrator]\nseed_ = 1\nbach_size = 8\n'
        'save_rollout = "step_{}"\n[trainer]\nepoch = 2\ncompiled = [1]\n'
    )
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", str(file), "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "orchestrator.bach_size: unknown key; did you mean 'batch_size'?" in said
    assert "orchestrator.save_rollout: unknown key; known here: algo, batch_size, env_v" in said
    assert f"{file}:9: trainer.epoch: " in said and "did you mean 'epochs'?" in said


def test_an_override_inside_a_table_of_the_file_is_on_the_command_line(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[trainer.optim]\ntype = "adamw"\n[orchestrator.train]\n')
    words = [
        "run",
        str(file),
        "--trainer.optim.lr=-1",
        "--no-trainer.compile",
        "--orchestrator.eval",
    ]
    words += ["--stop", "{patience = 0}"]
    message = (
        "trainer.optim.lr: too small\ntrainer.optim.type: bad\ntrainer.compile: bad\n"
        "stop.patience: too small\ntrainer: bad\ninference.port: bad"
    )
    assert explained(message, words).splitlines() == [
        "command line: trainer.optim.lr: too small",
        f"{file}:2: trainer.optim.type: bad",
        "command line: trainer.compile: bad",
        "command line: stop.patience: too small",
        "trainer: bad",  # by the file or by the command line
        "inference.port: bad",
    ]


@given(st.lists(st.sampled_from(["a", "env", "trainer", "optim", "lr", "0", "type"]), min_size=1))
def test_any_unknown_key_keeps_its_name_in_the_message(parts):
    key = ".".join(["x", *parts])
    assert explained(f"{key}: unknown key; known here: a", []).startswith(f"{key}: unknown key")
