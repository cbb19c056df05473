"""``prime_rl.train`` and ``prime_rl.Run``."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from report_runs import make_run
from typer.testing import CliRunner
from waiting import LIMIT, eventually

import prime_rl
from prime_rl import ConfigError, RunError
from prime_rl_app.api import _table
from prime_rl_app.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
GRPO = ROOT / "configs" / "reverse_text" / "grpo.toml"
REWARD = "train/agg/all/reward/mean"


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path / "mine", "centred")
    (tmp_path / "mine" / "metrics.jsonl").write_text(
        '{"step": 0, "eval/words/avg@1": 0.25}\n'
        '{"step": 2, "loss/mean": 0.5}\n'
        '{"step": 1, "loss/mean": 1.5, "a/b": null}\n'
        '{"step": 2, "progress/total_tokens": 7}\n'
        '{"step": 3, "loss/me'
    )
    return prime_rl.Run("mine", tmp_path)


def test_the_names_are_found_without_torch_and_collide_with_nothing():
    code = (
        "import sys, prime_rl, prime_rl_app; "
        "assert prime_rl.train.__module__ == prime_rl.Run.__module__ == 'prime_rl_app.api'; "
        "assert 'torch' not in sys.modules and not hasattr(prime_rl, 'Runn')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_metrics_have_one_row_per_step(run):
    table = run.metrics
    assert table.column_names == [
        *("step", "eval/words/avg@1", "loss/mean", "progress/total_tokens", "a/b"),
    ]
    assert table.to_pylist() == [
        {name: row.get(name) for name in table.column_names}
        for row in (
            {"step": 0, "eval/words/avg@1": 0.25},
            {"step": 1, "loss/mean": 1.5},
            {"step": 2, "loss/mean": 0.5, "progress/total_tokens": 7},
        )
    ]


def test_rollouts_of_a_step_or_of_all_with_or_without_the_dropped(run):
    trained, every = list(run.rollouts(2)), list(run.rollouts(2, dropped=True))
    assert 0 < len(trained) < len(every)
    assert all(rollout.env == "words" for rollout in every)
    assert len(list(run.rollouts())) > len(trained)
    with pytest.raises(RunError, match=r"no rollouts of step 9 are saved \(saved: 1 to \d\)"):
        list(run.rollouts(9))


def test_weights_are_refused_before_they_are_whole(run):
    with pytest.raises(RunError, match="no weights yet"):
        _ = run.weights
    (run.path / "weights").mkdir()
    (run.path / "weights" / "config.json").write_text("{}")
    assert run.weights == run.path / "weights"


def test_a_run_shows_itself_in_a_notebook(run):
    assert repr(run) == f"Run({str(run.path)!r})"
    (run.path / "learning_curve.png").write_bytes(b"\x89PNG")
    assert "<b>mine</b>: unknown, step 2/" in run._repr_html_()
    assert 'src="data:image/png;base64,iVBORw=="' in run._repr_html_()


def test_overrides_lie_over_files_and_tables(tmp_path):
    above = {"max_steps": 4, "trainer": {"optim": {"lr": 1.0}}, "trainer.loss.type": "cispo"}
    table = _table(GRPO, {**above, "output_dir": tmp_path})
    assert (table["max_steps"], table["output_dir"]) == (4, str(tmp_path))
    assert table["trainer"]["optim"] == {"lr": 1.0, "beta2": 0.99, "weight_decay": 0.0}
    assert table["trainer"]["loss"] == {"type": "cispo"}
    given = {"trainer": {"optim": {"lr": 1.0}}}
    assert _table(given, {"trainer.optim.lr": 2.0}) == {"trainer": {"optim": {"lr": 2.0}}}
    assert given == {"trainer": {"optim": {"lr": 1.0}}}


def test_faults_are_found_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'max_steps'"):
        prime_rl.train(GRPO, max_step=1, output_dir=tmp_path)
    found = []

    def elsewhere():
        try:
            prime_rl.train(GRPO, output_dir=tmp_path)
        except RunError as error:
            found.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == ["train: call it in the main thread, which alone sees an interrupt"]
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_from_python_trains_resumes_and_is_talked_with(
    model_cache, tmp_path, monkeypatch, capsys
):
    """Both examples of docs/python.md, three steps of them, in a folder with our ``configs``."""
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    small = {
        "model.warmup_exact": 0.0,
        "orchestrator": {"batch_size": 8, "group_size": 4, "eval": {"env": []}},
        "orchestrator.pre_batch_filters": [],  # an untrained policy: groups may all be equal
        "orchestrator.post_batch_filters": [],
        "trainer.scheduler": {"type": "constant", "warmup_steps": 0},
    }
    train = prime_rl.train
    smaller = lambda config, **given: train(config, **small, **given)  # noqa: E731
    monkeypatch.setattr(prime_rl, "train", smaller, raising=False)
    text = (ROOT / "docs/python.md").read_text()
    example, resumes = re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names = {}
    exec(example.replace("40", "2"), names)
    run = names["run"]
    assert (run.state, run.step) == ("done", 2) and run.config["trainer"]["optim"]["lr"] == 3e-4
    rewards = [sum(r.reward for r in found) / len(found) for found in _by_step(run)]
    assert run.metrics.column(REWARD).to_pylist() == pytest.approx(rewards)
    assert json.loads((run.weights / "config.json").read_text())["model_type"] == "qwen3"
    out = capsys.readouterr().out
    assert "Run directory" in out and "Turn(" in out
    latest = prime_rl.Run("latest")
    assert latest.path.samefile(run.path)

    asked = ["chat", "latest", "--prompt", "abc", "--prompt", "/new", "--prompt", "de"]
    said = CliRunner().invoke(app, [*asked, "--max-tokens", "8"])
    assert said.exit_code == 0, said.output
    assert said.stdout.count("before") == said.stdout.count("after step 2") == 2
    assert [line.strip() for line in said.stdout.splitlines() if line[:1] in "ad"] == ["abc", "de"]
    children = psutil.Process().children()  # one that has just ended is a zombie without arguments
    alive = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
    assert not [each for each in alive if "serve" in each.cmdline()]

    monkeypatch.setattr(prime_rl, "train", train, raising=False)
    assert resumes == 'prime_rl.Run("latest").resume()\n'
    again = eval(resumes.replace("()", "(max_steps=3)"), {"prime_rl": prime_rl})
    assert again.path.samefile(run.path) and (again.state, again.step) == ("done", 3)


@pytest.mark.slow
def test_the_example_script_trains_and_looks(model_cache, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    script = [sys.executable, str(ROOT / "docs/examples/train_and_look.py"), "2"]
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache)}
    done = subprocess.run(script, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = prime_rl.Run("latest", tmp_path / "outputs")
    rewards = [found["reward"] for found in run.evals]
    rollouts = sorted(each.reward for each in run.rollouts(step=2))
    for line in (
        f"reward at step 2: {run.metrics.column(REWARD).to_pylist()[-1]:.3f}",
        f"held-out reward of version 0: {rewards[0]:.3f}",
        f"held-out reward of version 2: {rewards[-1]:.3f}",
        "outputs/reverse-text--tiny-reverse--1/weights: 364,288 parameters",
        f"reward {rollouts[-1]:.2f}, credit +",
        f"reward {rollouts[0]:.2f}, credit -",
    ):
        assert line in done.stdout, done.stdout


CELLS = """
import os
import prime_rl

try:
    prime_rl.train(
        {config!r}, max_steps=1000, output_dir={folder!r}, run={{"name": "cell"}}, **{small!r}
    )
except KeyboardInterrupt:
    print("interrupted", flush=True)

run = prime_rl.Run("cell", {folder!r})
print(run.state, run.step > 0, run.weights.is_dir(), flush=True)
again = run.resume(max_steps=run.step + 1)
print(again.state, again.path == run.path, flush=True)
"""


@pytest.mark.slow
def test_the_stop_button_of_a_notebook_ends_the_run_and_not_the_kernel(model_cache, tmp_path):
    """A notebook's server sends SIGINT to the kernel's process group, and so to every process that
    the kernel has started. The next cells go on."""
    small = {
        "model.warmup_exact": 0.0,
        "orchestrator": {"batch_size": 8, "group_size": 4, "eval": {"env": []}},
        "orchestrator.pre_batch_filters": [],
        "orchestrator.post_batch_filters": [],
        "trainer.scheduler": {"type": "constant", "warmup_steps": 0},
    }
    code = CELLS.format(config=str(GRPO), folder=str(tmp_path), small=small)
    kernel = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PRIME_RL_CACHE": str(model_cache)},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        eventually((tmp_path / "cell" / "trainer.jsonl").exists, kernel)
        os.killpg(kernel.pid, signal.SIGINT)
        out, err = kernel.communicate(timeout=LIMIT)
    finally:
        if kernel.poll() is None:
            os.killpg(kernel.pid, signal.SIGKILL)
    assert kernel.returncode == 0, err
    shown = [line for line in out.splitlines() if line in SHOWN]
    assert shown == SHOWN, out + err


SHOWN = ["interrupted", "stopped True True", "done True"]


def test_chat_needs_the_weights_of_a_run_that_has_ended(run):
    said = CliRunner().invoke(app, ["chat", "mine", "--output-dir", str(run.path.parent)])
    assert said.exit_code == 1 and "mine" in said.output and "error: " in said.output


def _by_step(run):
    return [list(run.rollouts(step, dropped=True)) for step in (1, 2)]


# -- prompts and a reward -------------------------------------------------------------------------


SUMS = [{"prompt": "2+3?", "answer": "5"}, {"prompt": "1+1?", "answer": "2"}]


def is_in(reply, answer):
    return float(answer in reply)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "train: give a config .* or model, prompts and reward"),
        ({"prompts": SUMS}, "reward is missing; prompts and reward belong together"),
        ({"reward": is_in}, "prompts is missing"),
        ({"weights": {"a": 1}, "config": GRPO}, "weights: goes with prompts and reward"),
        ({"prompts": SUMS, "reward": is_in}, "model is missing"),
        ({"prompts": SUMS, "reward": is_in, "config": GRPO}, "the config has training envs"),
        ({"prompts": [{"q": 1}], "reward": is_in, "model": "tiny-chat"}, "no column 'prompt'"),
        ({"prompts": SUMS, "reward": lambda x: 1, "model": "tiny-chat"}, "'x' is no column"),
        ({"prompts": SUMS, "reward": is_in, "model": "tiny-chat", "on_step": 3}, "on_step: expe"),
        ({"prompts": SUMS, "reward": is_in, "model": "tiny-chap"}, "'tiny-chap' is no folder, no"),
        ({"prompts": SUMS, "reward": 3, "model": "tiny-chat"}, "reward: got 3, expected a funct"),
        ({"prompts": SUMS, "reward": [is_in, 3], "model": "tiny-chat"}, "reward: got 3, expected"),
        ({"prompts": SUMS, "reward": [], "model": "tiny-chat"}, r"reward: got \[\], expected"),
        (
            {"prompts": SUMS, "reward": is_in, "model": "tiny-chat", "eval_prompts": ["a"]},
            "eval_prompts: reward .*'answer' is no column",
        ),
        (
            {"prompts": SUMS, "reward": is_in, "model": "tiny-chat", "learning_rate": 1e-5},
            "learning_rate: unknown key; did you mean 'trainer.optim.lr'",
        ),
    ],
)
def test_prompts_and_rewards_that_do_not_fit_are_refused_before_anything_starts(
    tmp_path, given, message
):
    with pytest.raises(ConfigError, match=message):
        prime_rl.train(**given, max_steps=1, output_dir=tmp_path / "outputs")
    found = [*(tmp_path / "outputs").glob("*")]
    assert not [path for path in found if path.name != ".functions"]


def test_a_model_that_a_missing_package_makes_is_named(tmp_path, monkeypatch):
    from prime_rl_smollm2 import convert

    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(convert, "PACKAGE", "llm-of-nobody")
    with pytest.raises(ConfigError, match="made from the package llm-of-nobody, which is not inst"):
        prime_rl.train(
            model="smollm2-135m", prompts=SUMS, reward=is_in, max_steps=1, output_dir=tmp_path
        )


def test_the_config_of_prompts_and_a_reward(tmp_path):
    from prime_rl_app.api import _with_functions

    table = {"model": {"name": "tiny-chat"}, "seq_len": 64, "output_dir": str(tmp_path)}
    made = _with_functions(table, SUMS, is_in, SUMS[:1], weights={"is_in": 2})
    env = made["orchestrator"]["train"]["env"][0]
    assert (env["id"], env["args"]["weights"]) == ("function", {"is_in": 2})
    assert Path(env["args"]["data"]).read_text().splitlines() == [json.dumps(r) for r in SUMS]
    assert len(made["orchestrator"]["eval"]["env"]) == 1
    assert made["orchestrator"]["workers"]["pass_env"] == ["PRIME_RL_FUNCTIONS_KEY"]
    assert made["seq_len"] == 64 and made["orchestrator"]["batch_size"] == 32
    assert "renderer" not in made["orchestrator"]  # auto chooses by the tokenizer


def test_a_model_goes_to_a_folder_and_to_nothing_else(run, tmp_path, monkeypatch):
    weights = run.path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    assert Path(run.push(tmp_path / "copy")) == tmp_path / "copy"
    assert (tmp_path / "copy" / "config.json").read_text() == "{}"
    run.push(tmp_path / "copy")  # again, over a model
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="holds something else than a model"):
        run.push(tmp_path / "other")
    with pytest.raises(ConfigError, match="is a file; expected a folder"):
        run.push(weights / "config.json")
    asked = []

    class Api:
        def create_repo(self, name, **options):
            asked.append((name, options))
            return f"https://hub/{name}"

        def upload_folder(self, **options):
            asked.append(options)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.chdir(tmp_path)
    assert run.push("me/mine", private=False) == "https://hub/me/mine"
    assert asked == [
        ("me/mine", {"private": False, "exist_ok": True}),
        {"repo_id": "me/mine", "folder_path": weights},
    ]
    monkeypatch.setattr(Api, "create_repo", lambda *a, **b: 1 / 0)
    with pytest.raises(RunError, match="uploading to 'me/mine' failed: ZeroDivisionError"):
        run.push("me/mine")

    class TransportError(Exception):  # as HTTP clients call it
        pass

    def unreachable(*args, **options):
        raise type("ConnectError", (TransportError,), {})("Name or service not known")

    monkeypatch.setattr(Api, "create_repo", unreachable)
    with pytest.raises(RunError, match=r"hub cannot be reached \(Name or.*model is in .*weights"):
        run.push("me/mine")


def test_callbacks_come_once_per_trained_step_and_what_they_raise_ends_the_run(tmp_path):
    from prime_rl import PluginConfig
    from prime_rl.plugins.view import RunView
    from prime_rl_app.output import CallingView

    seen = []
    inner = RunView(PluginConfig(), tmp_path, 3)
    view = CallingView(inner, [seen.append, lambda step: seen.append(-step)], 1)
    rows = tmp_path / "metrics.jsonl"
    view.refresh()
    rows.write_text('{"step": 1, "optim/lr": 1}\n{"step": 2, "a": 1}\n')
    view.refresh()
    assert seen == []
    rows.write_text(rows.read_text() + '{"step": 2, "optim/lr": 1}\n{"step": 3, "optim/lr": 1}\n')
    view.refresh()
    view.refresh()
    assert seen == [2, -2, 3, -3]
    failing = CallingView(inner, [lambda step: 1 / 0], 0)
    with pytest.raises(ZeroDivisionError):
        failing.refresh()


def test_a_callback_sees_the_run_as_it_was_after_its_step(run):
    newest = run.step
    assert newest >= 2
    earlier = prime_rl.Run(run.path, up_to=1)
    assert earlier.step == 1
    assert earlier.metrics.column("step").to_pylist() == [0, 1]
    with pytest.raises(RunError, match=r"no rollouts of step 2 are saved \(saved: 1 to 1\)"):
        list(earlier.rollouts(2))
    assert len(list(earlier.rollouts())) < len(list(run.rollouts()))


def test_the_functions_of_a_notebook_cell_travel(tmp_path):
    """A cell's functions are in ``__main__`` and in no file: their source cannot be read again."""
    cell = {"__name__": "__main__"}
    code = "bonus = 2.0\nasync def graded(reply, answer):\n    return bonus * (reply == answer)\n"
    exec(compile(code, "<ipython-input-1>", "exec"), cell)
    rows = [{"prompt": "a", "answer": "b"}]
    env = prime_rl.function_env(rows, cell["graded"], output_dir=tmp_path)
    check = (
        "import asyncio, sys\n"
        "from function.load import load_functions\n"
        "(graded,) = load_functions((), sys.argv[1])\n"
        "print(asyncio.run(graded(reply='b', answer='b')))"
    )
    path = env["args"]["functions"]
    command = [sys.executable, "-c", check, path]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "2.0\n", done.stderr


SCRIPT = """
import sys
import prime_rl

words = ["abcd", "bcde", "cdef", "acegi"]
rows = [{"prompt": word, "answer": word[::-1]} for word in words]
bonus = 0.25
seen = []


def closeness(reply, answer):
    return sum(a == b for a, b in zip(reply, answer)) / max(len(reply), len(answer), 1)


if __name__ == "__main__":
    run = prime_rl.train(
        model={"name": "tiny-chat", "warmup_exact": 0.0},
        prompts=rows,
        reward=[
            lambda reply, answer: closeness(reply, answer) + bonus,
            lambda replies: [0.5] * len(replies),
        ],
        weights={"reward_2": 2.0},
        on_step=lambda run: seen.append(run.step),
        max_steps=2,
        orchestrator={"batch_size": 8, "group_size": 4, "post_batch_filters": []},
    )
    assert seen == [1, 2], seen
    rollouts = list(run.rollouts())
    for rollout in rollouts:
        reply, answer = rollout.reply, rollout.prompt[::-1]
        expected = {"reward": closeness(reply, answer) + bonus, "reward_2": 0.5}
        assert rollout.rewards == expected, (rollout.rewards, expected)
        assert abs(rollout.reward - expected["reward"] - 1.0) < 1e-6
        assert rollout.messages[-1]["content"].strip() == reply
    print("trained on", len(rollouts), "rollouts;", repr(run.generate("abcd", max_tokens=8)))
    assert run.config["orchestrator"]["env_workers"] == "auto"
"""


@pytest.mark.slow
def test_a_script_with_lambdas_trains_as_a_user_starts_it(model_cache, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache)}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained on 16 rollouts; '" in done.stdout
    assert "workers: 1 of 1 ready" in done.stdout or "ready" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_script_of_the_page_runs_with_a_smaller_model(page, model_cache, tmp_path):
    """In the model's place one that is made here, and two steps instead of twenty."""
    text = (ROOT / page).read_text("utf-8")
    (script,) = re.findall(
        r'^```python title="sums.py"\n(.*?)^```$', text, re.DOTALL | re.MULTILINE
    )
    small = "{'name': 'tiny-chat', 'warmup_exact': 0.0}"
    changes = (
        ('"smollm2-135m"', small),
        ("max_steps=20", "max_steps=2, orchestrator={'post_batch_filters': []}"),
    )
    for shown, run in changes:
        assert shown in script
        script = script.replace(shown, run)
    (tmp_path / "sums.py").write_text(script.replace("step=20", "step=2"))
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache)}
    command = [sys.executable, "sums.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


TOML = """
max_steps = 1
seq_len = 128
[model]
name = "tiny-chat"
warmup_exact = 0.0
[orchestrator]
batch_size = 8
group_size = 4
post_batch_filters = []
[orchestrator.renderer]
name = "default"
[[orchestrator.train.env]]
id = "function"
args = { data = "questions.jsonl", reward = "my_rewards.exact", weights = { exact = 2.0 } }
"""


@pytest.mark.slow
def test_a_toml_with_a_file_and_a_function_trains(model_cache, tmp_path):
    (tmp_path / "my.toml").write_text(TOML)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, SUMS)))
    (tmp_path / "my_rewards.py").write_text("async def exact(reply): return len(reply) / 64\n")
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache)}
    command = [sys.executable, "-m", "prime_rl", "run", "my.toml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = list(prime_rl.Run("latest", tmp_path / "outputs").rollouts())
    assert len(rollouts) == 8
    for rollout in rollouts:
        assert rollout.reward == pytest.approx(2 * len(rollout.reply) / 64)
