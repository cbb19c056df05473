"""What a model or an environment wrote reaches no terminal as a control sequence: everywhere that
it is shown, it is shown as text."""

import io
import json
import re
from types import SimpleNamespace

import pytest
from report_runs import make_run, offering
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from prime_rl import PluginConfig, Rollout, RunError, RunView, Sample
from prime_rl.errors import ProcessFailed, printable
from prime_rl.rundir.control import supervised
from prime_rl.rundir.status import Status
from prime_rl_app.cli.app import app
from prime_rl_app.saved_rollouts import write_rollouts
from prime_rl_tools.commands.chat import _say
from prime_rl_tools.replay import score
from prime_rl_tools.terminal import Console
from prime_rl_tools.view.live import TerminalView

ATTACKS = {
    "ESC": "\x1b[2J\x1b[31m",
    "OSC 52, which writes the clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "CSI of C1": "\x9b2J",
    "DCS of C1": "\x90q\x9c",
    "carriage return and backspace": "\r\b\b",
    "bidi override and isolate": "\u202e\u2066\u200f",
    "line separator": "\u2028",
    "lone surrogate": "\ud800",
    "NUL and DEL": "\x00\x7f",
}
EVIL = "EVIL" + "".join(ATTACKS.values()).replace("\ud800", "")
RULES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_each_control_character_is_one_visible_one(attack):
    shown = printable(f"a{attack}b")
    assert len(shown) == len(attack) + 2
    shown.encode()  # no surrogate is left
    assert not RULES.search(shown) and "\ufffd" in shown
    assert printable("wörter\t日本\n👨\u200d👩 \xa0") == "wörter\t日本\n👨\u200d👩 \xa0"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in which every text that a model or an environment can set is an attack."""
    monkeypatch.setattr(score, "load_plugins", lambda **_: offering())
    run_dir = tmp_path / "mine"
    make_run(run_dir)
    for name in ("trainer", "env_workers"):
        status = Status(run_dir / "status" / f"{name}.json")
        status.path.parent.mkdir(exist_ok=True)
        status.report(f"does {EVIL}", waiting_for=EVIL, why=EVIL)
    cause = {"cause": f"orchestrator failed: {EVIL}", "lost_seconds": 1.0, "step": 1, "time": 0}
    (run_dir / "recoveries.jsonl").write_text(json.dumps(cause) + "\n")
    talk = [["user", f"say {EVIL}"], ["assistant", EVIL]]
    shown = [{"reward": 0.5, "messages": talk, "error": EVIL}]
    evals = [
        {"env": "held", "policy_version": 1, "reward": 0.5, "num_rollouts": 1, "num_failed": 0,
         "shown": shown, "step": step, "when": when}
        for step, when in ((0, "before"), (3, "after"))
    ]  # fmt: skip
    (run_dir / "evals.jsonl").write_text("".join(json.dumps(each) + "\n" for each in evals))
    logs = run_dir / "logs" / "latest"
    logs.mkdir(parents=True)
    (logs / "orchestrator.log").write_text(f"d t ERROR prime_rl.x: plugin said {EVIL[:20]}\n")
    tokenizer = Tokenizer(WordLevel({"EVIL": 0, EVIL: 1}, unk_token="EVIL"))
    (run_dir / "weights").mkdir()
    tokenizer.save(str(run_dir / "weights" / "tokenizer.json"))
    return run_dir


def evil_rollouts(run_dir):
    """A newest batch whose reply, env, agent and reason are attacks."""
    sample = Sample(token_ids=[0, 1], loss_mask=[0, 1], inference_logprobs=[0, -1])
    rollouts = [
        Rollout(env=EVIL, agent=EVIL, example_id=5, group_id=0, reward=0.5, samples=[sample])
    ]
    path = run_dir / "rollouts" / "step_4.msgpack"
    write_rollouts(path, 4, rollouts, {id(rollouts[0]): EVIL})
    return path


def invoke(*words):
    result = CliRunner().invoke(app, [*map(str, words)])
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result.output


def test_commands_show_it_as_text(run):
    with supervised(run):  # so that `status` shows the processes
        said = invoke("status", run)
    assert said.count("EVIL") == 7 and "restarts" in said
    assert not RULES.search(said)
    assert not RULES.search(invoke("runs", "--output-dir", run.parent))
    assert not RULES.search(invoke("replay", run))
    assert "EVIL" in (said := invoke("inspect", evil_rollouts(run))) and "dropped" in said
    assert not RULES.search(said)
    for command in ("status", "inspect"):
        assert not RULES.search(invoke(command, run, "--json"))


def test_the_live_view_and_the_summary_show_it_as_text(run):
    evil_rollouts(run)
    console = Console(
        force_terminal=True, color_system=None, width=100, height=60, file=io.StringIO()
    )
    with TerminalView(PluginConfig(), run, 3, console) as view:
        view.print(f"restarted: {EVIL}")
        view.refresh()
        picture = console.file.getvalue()
        own = re.sub(r"\x1b\[(\?1049h|\?25l|H|2J)", "", picture)  # the alternate screen
        assert not RULES.search(own)
    assert "reward 0.5" in picture  # the rollout
    assert picture.count("EVIL") >= 7  # its reply, two processes' words, and the message
    console = Console(width=100, file=io.StringIO())
    view = TerminalView(PluginConfig(), run, 3, console)
    view.refresh()
    view.ended()
    printed = console.file.getvalue()
    assert not RULES.search(printed)
    assert all(word in printed for word in ("does EVIL", "ERROR", "Held-out", "Restarts", "say"))


def test_the_doctor_chat_the_plain_view_and_errors_show_it_as_text(run, monkeypatch, capsys):
    from prime_rl_tools.doctor import Verdict

    verdict = Verdict(
        name="one_reply",
        finding=EVIL,
        evidence=EVIL,
        threshold=EVIL,
        advice=EVIL,
        env="held",
    )
    history = SimpleNamespace(run_dir=run, steps=[*range(99)], values=lambda *_: [])
    monkeypatch.setattr("prime_rl_tools.doctor.History", lambda run_dir: history)
    monkeypatch.setattr("prime_rl_tools.doctor.diagnose", lambda history: [verdict])
    monkeypatch.setattr("prime_rl_tools.doctor.pace_line", lambda history: None)
    assert "EVIL" in (said := invoke("doctor", run)) and not RULES.search(said)
    talk = SimpleNamespace(ask=lambda line: [EVIL, EVIL], sides=[SimpleNamespace(label="a")] * 2)
    console = Console(width=100, file=io.StringIO())
    _say(console, talk, f"say {EVIL}")
    assert console.file.getvalue().count("EVIL") == 3
    assert not RULES.search(console.file.getvalue())
    RunView(PluginConfig(), run, 3).print(EVIL)
    RunView(PluginConfig(), run, 3).refresh()
    print(f"error: {RunError(EVIL)} {ProcessFailed(EVIL, 'trainer', EVIL)}")
    assert (said := capsys.readouterr().out).count("EVIL") >= 5 and not RULES.search(said)
