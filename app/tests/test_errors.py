"""Config errors name file and line, and know what other frameworks call a key."""

import os
import tomllib
from pathlib import Path

import pytest

from prime_rl import ConfigError
from prime_rl_app.cli import main
from prime_rl_app.config import load_config
from prime_rl_app.errors import KeySource, explained, lines_of_keys

TOML = '''# a comment = 1
max_steps = 3
model.name = "tiny"

[orchestrator]
batch_size = 8
text = """
inside = 1
"""
[[orchestrator.train.env]]
id = "a"
args = { split = "x" }
[[orchestrator.train.env]]
id = "b"
[orchestrator.train.env.algo]
type = "c"
[ trainer . "optim" ]  # spaced
lr = 1.0
'''


def test_every_key_has_its_line():
    assert dict(lines_of_keys(TOML)) == {
        "max_steps": 2,
        "model.name": 3,
        "orchestrator": 5,
        "orchestrator.batch_size": 6,
        "orchestrator.text": 7,
        "orchestrator.train.env.0": 10,
        "orchestrator.train.env.0.id": 11,
        "orchestrator.train.env.0.args": 12,
        "orchestrator.train.env.1": 13,
        "orchestrator.train.env.1.id": 14,
        "orchestrator.train.env.1.algo": 15,
        "orchestrator.train.env.1.algo.type": 16,
        "trainer.optim": 17,
        "trainer.optim.lr": 18,
    }
    parsed = tomllib.loads(TOML)
    assert parsed["orchestrator"]["train"]["env"][1]["algo"] == {"type": "c"}


def test_an_error_has_the_line_of_the_file_that_set_the_key_last(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("max_steps = 1\nseed = 2\n")
    second.write_text("\n\nmax_steps = 0\n")
    arguments = ["run", str(first), str(second), "--run.name", "x"]
    message = "max_steps: too small\nseed: bad\nrun.name: bad\nsomething else"
    assert explained(message, arguments).splitlines() == [
        f"{second}:3: max_steps: too small",
        f"{first}:2: seed: bad",
        "command line: run.name: bad",
        "something else",
    ]
    said = explained("seed: bad", [*arguments, "--seed", "3"])
    assert said == "command line: seed: bad"


BASE = """
[model]
name = "tiny-reverse"
[orchestrator]
batch_size = 8
[[orchestrator.train.env]]
id = "a"
[[orchestrator.train.env]]
id = "b"
[[orchestrator.post_batch_filters]]
type = "zero_advantage"
"""
TABLE = "expected a table of keys"
TRAIN = "orchestrator.train.env"
FILTERS = "orchestrator.post_batch_filters"


def refused(words):
    """What ``prime-rl run`` says of a config that it refuses."""
    files = [Path(word) for word in words if word.endswith(".toml")]
    with pytest.raises(ConfigError) as caught:
        load_config(files, words[len(files) :])
    return explained(str(caught.value), ["run", *words])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f'{TRAIN} = ["x"]',
            [f"1: {TRAIN}.0: {TABLE} (got 'x'). Write [[{TRAIN}]] with id = \"x\""],
        ),
        (
            f'\n{TRAIN} = [\n"x",\n{{ id = "y" }},\n"z"]',
            [
                f"2: {TRAIN}.0: {TABLE} (got 'x'). Write [[{TRAIN}]] with id = \"x\"",
                f"2: {TRAIN}.2: {TABLE} (got 'z'). Write [[{TRAIN}]] with id = \"z\"",
            ],
        ),
        (
            f'{TRAIN} = "x"',
            [f"1: {TRAIN}: expected a list (got 'x'). Write [[{TRAIN}]] with id = \"x\""],
        ),
        (
            '[orchestrator]\npost_batch_filters = ["x"]',
            [f"2: {FILTERS}.0: {TABLE} (got 'x'). Write [[{FILTERS}]] with type = \"x\""],
        ),
        (
            "seed = 1\n[[orchestrator]]\nbatch_size = 3",
            [
                f"2: orchestrator: {TABLE} (got [{{'batch_size': 3}}]). Write [orchestrator], in "
                "single brackets"
            ],
        ),
        ('monitors = ["x"]', [f"1: monitors: {TABLE} (got ['x']). Write [monitors.x]"]),
        (
            'trainer.losses = ["x", "y"]',
            [
                f"1: trainer.losses: {TABLE} (got ['x', 'y']). Write [trainer.losses.x], "
                "[trainer.losses.y]"
            ],
        ),
        ('env_vars = ["x"]', [f"1: env_vars: {TABLE} (got ['x'])"]),
        (
            'trainer.loss = "x"',
            [f"1: trainer.loss: {TABLE} (got 'x'). Write trainer.loss.type = \"x\""],
        ),
    ],
)
def test_a_name_where_a_table_belongs_is_shown_as_toml_at_the_file_that_has_it(
    tmp_path, text, said
):
    base = tmp_path / "base.toml"
    own = tmp_path / "x.toml"
    base.write_text(BASE)
    own.write_text(text + "\n")
    # ``max_steps`` is missing, which is a line of its own.
    lines = [each for each in refused([str(base), str(own)]).split("\n") if "max_steps" not in each]
    assert lines == [f"{own}:{line}" for line in said]
    # What is advised is TOML, with the value at the place where it was given.
    for line in lines:
        advised = line.partition(". Write ")[2]
        if " with " in advised:
            table, _, key = advised.partition(" with ")
            assert tomllib.loads(f"{table}\n{key}")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (TRAIN, '["x"]', f"""{TRAIN}.0: {TABLE} (got 'x'). Write --{TRAIN} '[{{id = "x"}}]'"""),
        (TRAIN, "x", f"""{TRAIN}: expected a list (got 'x'). Write --{TRAIN} '[{{id = "x"}}]'"""),
        (
            "trainer.optim",
            '{"lr": 1e-4',
            f"""trainer.optim: {TABLE} (got '{{"lr": 1e-4'). It is no JSON: Expecting ',' """
            "delimiter",
        ),
        (
            "trainer.optim",
            "{lr = 1, lr = 2}",
            f"trainer.optim: {TABLE} (got '{{lr = 1, lr = 2}}'). It is no TOML: Duplicate inline "
            "table key 'lr'",
        ),
        (
            TRAIN,
            '[{"id": "a"}',
            f"""{TRAIN}: expected a list (got '[{{"id": "a"}}'). It is no JSON: Expecting ',' """
            "delimiter",
        ),
    ],
)
def test_a_value_of_the_command_line_that_is_no_table_says_why(tmp_path, key, value, said):
    base = tmp_path / "base.toml"
    base.write_text("max_steps = 1\n" + BASE)
    lines = refused([str(base), f"--{key}", value]).split("\n")
    assert lines[0] == f"command line: {said}"
    assert not any(key in line for line in lines[1:])  # what follows from it is no second problem


def test_places_of_what_a_later_file_replaces_are_gone(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(BASE)
    second.write_text('[[orchestrator.train.env]]\nid = "z"\n[orchestrator.eval]\ninterval = 1\n')
    source = KeySource.of(["run", str(first), str(second)])
    assert source.place(f"{TRAIN}.0.id") == f"{second}:2"
    assert source.place(f"{TRAIN}.1.id") is None and "env b" not in source.places
    assert source.place("orchestrator.batch_size") == f"{first}:5"
    assert source.place(f"{FILTERS}.0.type") == f"{first}:11"


@pytest.mark.parametrize(
    ("comment", "command"),
    [
        ("", "prime-rl run WHOLE.toml part.toml"),
        (
            "# Laid over another file: prime-rl run whole.toml part.toml\n",
            "prime-rl run whole.toml part.toml",
        ),
    ],
)
def test_a_file_with_a_part_of_a_config_says_how_to_compose_it(
    comment, command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.toml").write_text(f"{comment}seed = 1\n")
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", "part.toml", "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith(
        f"part.toml is a part of a config, to be laid over a whole one. Write: {command}\n"
    )


def test_the_keys_of_core_in_the_table_of_a_plugin_are_known_there_too():
    unknown = "trainer.optim (optimizer 'adamw').{}: unknown key; known here: beta1, beta2, eps"
    close = explained(unknown.format("lrr"), ["--trainer.optim.lrr", "1e-3"])
    assert close.endswith("trainer.optim (optimizer 'adamw').lrr: unknown key; did you mean 'lr'?")

    far = explained(unknown.format("momentum"), [])
    assert "known here: beta1, beta2, betas" not in far
    assert "lr, " in far
    assert "beta1, beta2, eps, " in far

    of_env = "env 'a': algo (algorithm 'x').tpe: unknown key; known here: none"
    assert explained(of_env, []).endswith("did you mean 'type'?")

    bare = explained("trainer.loss (loss 'mine').x: unknown key; known here: none", [])
    assert "none" not in bare
    assert "type" in bare


def test_a_name_that_is_right_elsewhere_is_not_suggested_for_itself():
    line = "trainer.optim.lr: unknown key; known here: coef"  # an optimizer without a rate
    assert explained(line, []) == line


MANY_ERRORS = """max_steps = 4
learning_rate = 1.0
[model]
name = "tiny-reverse"
[orchestrator]
batch_size = 30
group_size = 8
[orchestrator.algo]
lenght_penalty = 0.1
[orchestrator.renderer]
name = "qwen3"
thinkin = true
[[orchestrator.train.env]]
id = "reverse-text"
[[orchestrator.train.env]]
id = "reverse-txt"
name = "second"
algo = { type = "max_rll" }
[trainer.loss]
epsilon = 0.3
[trainer.losses.gspo]
epsilon = 1
[trainer.heads.values]
size = 3
[inference.embedded]
num_slot = 3
"""


def test_all_errors_come_at_once_with_file_and_line(tmp_path, monkeypatch, capsys):
    """Those of core's schema, and those of plugins, of every env and of a taskset's name."""
    bad = tmp_path / "bad.toml"
    bad.write_text(MANY_ERRORS)
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", str(bad), "--dry-run", "--max_stepz", "3"])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert lines[0] == f"{bad}:2: learning_rate: unknown key; did you mean 'trainer.optim.lr'?"
    assert lines[1] == "command line: max_stepz: unknown key; did you mean 'max_steps'?"
    assert lines[2] == "With these keys left out:"
    found = {int(line.removeprefix(f"{bad}:").partition(":")[0]): line for line in lines[3:]}
    assert sorted(found) == [7, 9, 12, 16, 18, 20, 22, 24, 26]
    assert "reverse-text': group_size 8 does not divide orchestrator.batch_size" in found[7]
    # No hint by spelling: a length_penalty is a table.
    assert found[9].endswith(
        "lenght_penalty: unknown key; known here: length_penalty, sampling, type"
    )
    assert found[12].endswith(
        "(renderer 'qwen3').thinkin: unknown key; did you mean 'enable_thinking'?"
    )
    assert "no taskset 'reverse-txt'" in found[16] and "'second': algo: no" in found[18]


def test_the_settings_of_a_sampler_stand_beside_the_key_that_selects_it(monkeypatch, capsys):
    """Its place is found, and ``type`` is a key there."""
    toml = str(Path(__file__).parents[2] / "configs" / "reverse_text" / "grpo.toml")
    wrong = ["--orchestrator.sampler.typ", "x"]
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", toml, "--dry-run", *wrong])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == (
        "error: command line: orchestrator.sampler (sampler 'standard').typ: unknown key; did you "
        "mean 'type'?\n"
    )


START = 'max_steps = 3\n[model]\nname = "tiny-reverse"\n[orchestrator.renderer]\nname = "qwen3"\n'
ENV = '[[orchestrator.train.env]]\nid = "reverse-text"\n'
TEACHER = (
    "Start the model (prime-rl serve MODEL --served-model-name NAME --port 8000) and give a table: "
    '{ name = "NAME", base_url = ["http://127.0.0.1:8000/v1"] }'
)


def error_of(words, monkeypatch, capsys):
    """What ``prime-rl run WORDS --dry-run`` says."""
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", *words, "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("override", "beginning"),
    [
        ("algo.type=gpro", "env 'reverse-text': algo: no installed plugin offers the algorithm"),
        ("algo.type=opd", "env 'reverse-text': algo (algorithm 'opd').teacher: required"),
        ("batch_size=7", "env 'reverse-text': group_size 8 does not divide"),
        ("group_size=1", "env 'reverse-text': algorithm 'grpo' credits a rollout relative"),
        ("sampler.type=standrad", "orchestrator.sampler"),
        ("renderer.name=quen3", "orchestrator.renderer.name: no installed plugin offers"),
        ("batch_size", "orchestrator.batch_size: expected a value after --orchestrator.batch_size"),
    ],
)
def test_what_the_command_line_made_wrong_is_said_of_the_command_line(
    override, beginning, tmp_path, monkeypatch, capsys
):
    """Not of the line of the file that it overrides."""
    file = tmp_path / "good.toml"
    text = "[orchestrator]\nbatch_size = 16\ngroup_size = 8\n[orchestrator.algo]\ntype = 'grpo'\n"
    file.write_text(START + text + ENV)
    said = error_of([str(file), f"--orchestrator.{override}"], monkeypatch, capsys)
    assert said.startswith(f"command line: {beginning}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[orchestrator.algo]\ntype = 'opd'\n" + ENV,
            f"nothing was given. {TEACHER.replace('table: ', 'table: teacher = ')}",
        ),
        (
            "[orchestrator.algo]\ntype = 'opd'\nteacher = 'big'\n" + ENV,
            f"expected a frozen model, got 'big'. {TEACHER}",
        ),
        (ENV.replace("reverse-text", "my_env.py"), "no package (docs/python.md)."),
        (ENV.replace("id =", "name ="), "orchestrator.train.env.0.id: required, and nothing was"),
        (
            "[trainer.loss]\ntype = 'cispo'\nepsilon = 0.2\n" + ENV,
            "clip_eps_low, constant, normalize_by, per_env, type; elsewhere it is",
        ),
        ("[trainer.loss]\ntype = 'cispoo'\n" + ENV, "Did you mean 'cispo'?"),
        ('name = "qwen3"\n', "not a TOML file: the key stands twice (at line 6"),
        ('[log]\nlevel = "info\n', '(at line 7, column 14): `level = "info`. A text ends with'),
        ("log: info\n", "`log: info`. TOML sets a key by KEY = VALUE"),
        ("[log]\nlevel = info\n", "`level = info`. A text stands in quotation marks"),
        (
            ENV + "args = { lenght = 4 }\n",
            "args.lenght: unknown key; known here: agent, max_letters, min_letters, num_examples, ",
        ),
        (
            ENV + "[trainer]\nlora = true\n",
            "trainer.lora: expected a table of keys (got True). Write [trainer.lora], or ",
        ),
    ],
)
def test_a_newcomer_learns_where_and_what_to_do(text, said, tmp_path, monkeypatch, capsys):
    file = tmp_path / "new.toml"
    file.write_text(START + text)
    found = error_of([str(file)], monkeypatch, capsys)
    assert said in found
    assert found.startswith(f"{file}:")


def test_a_text_where_a_table_belongs_is_one_error_with_the_key_to_write(
    tmp_path, monkeypatch, capsys
):
    """Without the key the run has the installed default: nothing else is missing."""
    file = tmp_path / "new.toml"
    file.write_text(START + "[orchestrator]\nalgo = 'grpo'\n" + ENV)
    assert error_of([str(file)], monkeypatch, capsys) == (
        f"{file}:7: orchestrator.algo: expected a table of keys (got 'grpo'). "
        'Write orchestrator.algo.type = "grpo"'
    )
    file.write_text(START + "[inference]\nbase_url = 'localhost:8000'\n" + ENV)
    said = error_of([str(file)], monkeypatch, capsys)
    assert said.startswith(f"{file}:7: inference.base_url: 'localhost:8000' is no URL")
    assert "no engine is set" not in said


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--algo grpo", "did you mean 'orchestrator.algo.type'?"),
        ("--algo.length_penalty.type x", "did you mean 'orchestrator.algo.length_penalty.type'?"),
        ("--lora.rank 8", "did you mean 'trainer.lora.rank'?"),
        ("--lora", "did you mean 'trainer.lora' (a table)?"),
        ("--wandb", "did you mean 'monitors.wandb' (a table)?"),
        ("--vllm", """did you mean 'inference.engine' (the value is "vllm")?"""),
        ("--epochs 3", "max_steps is the length of a run"),
        ("--gpus 2", "set deployment.trainer_gpus and deployment.inference_gpus"),
        ("--model tiny-chat", "(got 'tiny-chat'). Write --model.name tiny-chat"),
        ("--model.name tiny-revers", "Did you mean 'tiny-reverse'?"),
    ],
)
def test_the_first_guess_of_a_key_is_answered_by_the_key(
    words, meant, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "new.toml"
    file.write_text(START + ENV)
    said = error_of([str(file), *words.split()], monkeypatch, capsys)
    assert said.startswith("command line: ")
    assert said.endswith(meant) or f"{meant}, or leave" in said


@pytest.mark.parametrize("path", ["configs/grpo", "config/grpo.toml", "configs/gprpo.toml"])
def test_a_path_with_one_slip_names_the_file(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/grpo.toml").write_text(START + ENV)
    monkeypatch.chdir(tmp_path)
    assert error_of([path], monkeypatch, capsys) == (
        f"{path}: no such file. Did you mean configs/grpo.toml?"
    )


def test_a_folder_that_may_not_be_listed_gives_no_guess(tmp_path, monkeypatch, capsys):
    """As `/home` on a cluster."""

    list_folder = os.listdir

    def listdir(folder):
        if Path(folder) in tmp_path.parents:
            raise PermissionError(13, "Permission denied", str(folder))
        return list_folder(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    said = error_of([str(tmp_path / "run.toml")], monkeypatch, capsys)
    assert said == f"{tmp_path}/run.toml: no such file. Give the path of a TOML config."


def test_a_path_that_is_like_no_other_gets_no_guess(tmp_path, monkeypatch, capsys):
    (tmp_path / "n.toml").write_text(START + ENV)
    monkeypatch.chdir(tmp_path)
    said = error_of(["nothing.toml"], monkeypatch, capsys)
    assert said == "nothing.toml: no such file. Give the path of a TOML config."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval nosuchrun --base-url http://127.0.0.1:9/v1", "No run of that name is in outputs"),
        ("inspect nofile", "nofile: no such file, and no run 'nofile'"),
        ("plugins prove gspo", "Write: prime-rl plugins prove grpo --loss gspo"),
    ],
)
def test_a_name_of_another_sort_is_answered(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prime-rl", *words.split()])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err


def test_a_misspelt_required_key_is_named(tmp_path, monkeypatch, capsys):
    file = tmp_path / "new.toml"
    file.write_text('max_steps = 3\nmodel.nam = "x"\n')
    said = error_of([str(file)], monkeypatch, capsys)
    assert said == (
        f"{file}:2: model.name: required, and nothing was given; 'nam' is no key here, "
        "did you mean 'name'?"
    )


def test_a_run_without_a_file_an_override_without_dashes_and_a_folder(
    tmp_path, monkeypatch, capsys
):
    said = error_of(["--seed", "3"], monkeypatch, capsys)
    assert said.endswith("No config was given. Write: prime-rl run CONFIG.toml")
    said = error_of(["max_steps=3"], monkeypatch, capsys)
    assert said == "max_steps=3: no such file. A key is set by --max_steps=3."
    said = error_of([str(tmp_path)], monkeypatch, capsys)
    assert said == f"{tmp_path}: a folder. Give the path of a TOML config in it."


def test_a_table_in_the_wrong_place_is_not_missing_as_well(tmp_path, monkeypatch, capsys):
    file = tmp_path / "new.toml"
    file.write_text(START + ENV.replace("orchestrator.train.env", "env"))
    said = error_of([str(file)], monkeypatch, capsys)
    assert said == f"{file}:6: env: unknown key; did you mean 'orchestrator.train.env'?"


def test_keys_that_do_not_go_together_are_one_error(tmp_path, monkeypatch, capsys):
    """Without their whole table, others would be missing."""
    good = tmp_path / "good.toml"
    good.write_text(
        'max_steps = 3\n[model]\nname = "tiny-reverse"\n[inference]\nreplicas = 2\n'
        'base_url = ["http://127.0.0.1:1"]\n[orchestrator]\nbatch_size = 8\ngroup_size = 4\n'
        '[orchestrator.renderer]\nname = "qwen3"\n[[orchestrator.train.env]]\nid = "reverse-text"\n'
    )
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", str(good), "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert "replicas says how to start an engine, and base_url names engines" in line


def test_args_that_tasksets_refuse_come_at_once_with_the_line_of_each_env(
    tmp_path, monkeypatch, capsys
):
    bad = tmp_path / "bad.toml"
    good = MANY_ERRORS.partition("[orchestrator]")[0].replace("learning_rate = 1.0\n", "")
    train = '[orchestrator.renderer]\nname = "qwen3"\n[[orchestrator.train.env]]\n'
    train += 'id = "reverse-text"\nargs = { min_lenght = 3 }\n'
    held_out = (
        '[[orchestrator.eval.env]]\nid = "reverse-text"\nname = "held"\nargs = { splitt = 3 }'
    )
    bad.write_text(good + train + held_out)
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", str(bad), "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert len(lines) == 2, lines
    first, second = lines
    assert first.startswith(f"{bad}:8: env 'reverse-text': args") and "min_letters" in first
    assert second.startswith(f"{bad}:12: env 'held': args") and "'split'" in second


@pytest.mark.parametrize("key", ["--max_steps", "--max-steps"])
def test_a_schedule_that_max_steps_shortens_is_no_error_beside_an_unknown_key(
    key, capsys, monkeypatch
):
    """``warmup_steps`` of that config is 10."""
    config = Path(__file__).parents[2] / "configs" / "reverse_text" / "grpo.toml"
    words = ["prime-rl", "run", str(config), "--nonsense", "3", key, "2", "--dry-run"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "nonsense: unknown key" in said and "With these keys left out" not in said


def test_data_of_sft_is_named_as_the_user_has_written_it(tmp_path):
    file = tmp_path / "sft.toml"
    file.write_text('max_steps = 1\n[sft]\ndata = "a.jsonl"\nvalidation = "b.jsonl"\n')
    message = "orchestrator.train.env.{}.args: data: row 2: no JSON"
    assert explained(message.format(0), [str(file)]) == f"{file}:3: sft.data: row 2: no JSON"
    assert explained(message.format(1), [str(file)]) == f"{file}:4: sft.validation: row 2: no JSON"
    file.write_text('max_steps = 1\n[sft]\ndata = "a.jsonl"\nhold_out = 2\n')
    both = "\n".join(map(message.format, (0, 1)))
    assert explained(both, [str(file)]) == f"{file}:3: sft.data: row 2: no JSON"
    file.write_text('[[orchestrator.train.env]]\nid = "a"\nargs = {}\n')
    assert "args: data: row 2: no JSON" in explained(message.format(0), [str(file)])


def test_a_problem_that_two_parts_find_is_said_once_with_its_place(tmp_path, monkeypatch, capsys):
    (tmp_path / "q.jsonl").write_text('{"prompt": "a"}\n')
    file = tmp_path / "a.toml"
    file.write_text(
        'max_steps = 1\nseq_len = 64\n[model]\nname = "tiny-reverse"\n'
        '[[orchestrator.train.env]]\nid = "function"\n'
        'args = { data = "q.jsonl", reward = "json.dumbs" }\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", "a.toml", "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert said.count("has no 'dumbs'") == 1
    assert "a.toml:7: orchestrator.train.env.0.args: reward: " in said


def test_a_value_that_no_plugin_offers_is_not_an_unknown_key(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[orchestrator.renderer]\nname = "qwen3"\n')
    message = "orchestrator.renderer.name: no installed plugin offers the renderer 'qwen3'"
    assert explained(message, [str(file)]) == f"{file}:2: {message}"
