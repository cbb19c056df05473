"""Config errors name file and line, and know what other frameworks call a key."""

import tomllib
from pathlib import Path

import pytest

from prime_rl_app.cli import main
from prime_rl_app.errors import explained, lines_of_keys

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


def test_a_file_with_a_part_of_a_config_says_how_to_compose_it(tmp_path, monkeypatch, capsys):
    part = tmp_path / "part.toml"
    part.write_text("seed = 1\n")
    monkeypatch.setattr("sys.argv", ["prime-rl", "run", str(part), "--dry-run"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.endswith("goes after one with the rest: A.toml B.toml.\n")


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
    assert found[9].endswith("lenght_penalty: unknown key; known here: length_penalty")
    assert found[12].endswith("(renderer 'qwen3').thinkin: unknown key")
    assert "no taskset 'reverse-txt'" in found[16] and "'second': algo: no" in found[18]


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


def test_a_value_that_no_plugin_offers_is_not_an_unknown_key(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[orchestrator.renderer]\nname = "qwen3"\n')
    message = "orchestrator.renderer.name: no installed plugin offers the renderer 'qwen3'"
    assert explained(message, [str(file)]) == f"{file}:2: {message}"
