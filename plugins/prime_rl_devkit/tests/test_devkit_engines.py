"""The engine suite: green for a sound engine, and what it is called by."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm
from waiting import LIMIT

from prime_rl import EngineCommand
from prime_rl.errors import EngineError
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.launchers import Engine, EngineLaunch
from prime_rl.testing.conformance import Report
from prime_rl_devkit import check as plugin_check
from prime_rl_devkit.engines import CHECKS, EngineSubject, conformance, hold, run_check, started
from prime_rl_devkit.engines.bench import Bench, not_started
from prime_rl_devkit.engines.checkpoints import changed, merged, read, write_adapter
from prime_rl_devkit.engines.reference import Reference
from prime_rl_devkit.engines.statistics import deviation
from prime_rl_devkit.engines.suite import FIRST, LAST
from prime_rl_devkit.verdicts import promise_of

ALIVE = [check for check in CHECKS if check != LAST]


@pytest.mark.parametrize("check", ALIVE)
def test_the_embedded_engine_keeps_every_promise(engine: EngineSubject, check: str) -> None:
    hold(engine, check)


def test_every_check_states_its_promise() -> None:
    for name, check in CHECKS.items():
        first = (check.__doc__ or "").strip()
        assert first.count(".") >= 1 and len(first) > 30, name


class Nothing(Engine):
    """Its process says a word and ends."""

    name = "nothing"
    config_class = PluginConfig

    def command(self, launch: EngineLaunch) -> EngineCommand:
        return EngineCommand(
            [sys.executable, "-c", "print('no accelerator here'); raise SystemExit(3)"]
        )


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(EngineError, match=r"ended with code 3[^$]*no accelerator here"),
        started(Nothing(PluginConfig()), tmp_path, model_folder=tmp_path),
    ):
        pass


def test_the_bench_reports_a_server_that_does_not_start_as_a_failed_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prime_rl_devkit.engines import starting

    monkeypatch.setattr(starting, "write_tiny_model", lambda folder: folder)
    report = Bench(Nothing, {}, "--set").report()
    (outcome,) = report.failed
    assert outcome.check == FIRST[0] and "no accelerator here" in outcome.message


def test_the_bench_reports_an_error_of_the_engines_own_code_as_a_failed_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoCommand(Nothing):
        def command(self, launch: Any) -> EngineCommand:
            raise RuntimeError("no server")

    from prime_rl_devkit.engines import starting

    monkeypatch.setattr(starting, "write_tiny_model", lambda folder: folder)
    (outcome,) = Bench(NoCommand, {}, "--set").report().failed
    assert outcome.message == "RuntimeError: no server"


def test_an_engine_that_is_not_named_is_not_started() -> None:
    (outcome,) = not_started(Nothing).outcomes
    assert outcome.status == "skipped" and "prime-rl plugins check nothing" in outcome.message


def test_what_an_engine_declares_to_lack_is_skipped_with_its_reason(tmp_path: Path) -> None:
    engine = EngineSubject("http://127.0.0.1:9", tmp_path, tmp_path, lacks={"chat": "no template"})
    engine.model = "known"
    outcome = run_check(engine, "chat")
    assert outcome.status == "skipped"
    assert outcome.message == "the engine declares to lack chat: no template"


def test_only_optional_features_can_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\['seeds'\] are not optional"):
        EngineSubject("http://127.0.0.1:9", tmp_path, tmp_path, lacks={"seeds": "x"})


def test_a_missing_server_fails_the_first_check_and_skips_the_rest(tmp_path: Path) -> None:
    report = conformance(EngineSubject("http://127.0.0.1:9", tmp_path, tmp_path))
    (failed,) = report.failed
    assert failed.check == "alive" and "ConnectError" in failed.message
    assert len(report.skipped) == len(CHECKS) - 1
    assert {outcome.message for outcome in report.skipped} == {"alive failed"}


# -- the numbers ------------------------------------------------------------------------


def test_the_chi_square_deviation_is_wilson_and_hilfertys() -> None:
    """Two fair bins of 100, 60 to 40: statistic 4 with 1 degree of freedom; (4^(1/3) - 7/9) /
    sqrt(2/9) = 1.7176."""
    half = math.log(0.5)
    assert deviation({1: 60, 2: 40}, {1: half, 2: half}) == pytest.approx(1.7176, abs=1e-3)
    assert deviation({1: 50}, {1: 0.0}) is None


def test_tokens_without_a_sample_count_too() -> None:
    """Half of the probability fell on nothing: 50 expected, 0 found, statistic 100."""
    found = deviation({1: 100}, {1: math.log(0.5)})
    assert found == pytest.approx((100 ** (1 / 3) - 7 / 9) / math.sqrt(2 / 9), abs=1e-6)


def test_any_single_tensor_that_is_not_updated_is_noticed(
    engine: EngineSubject, tmp_path: Path
) -> None:
    """Of the changed weights, each tensor in turn left as it was: the logprobs move by ten times
    what is allowed, so ``weight_update`` covers every one."""
    import torch

    new = Reference(changed(engine.model_folder, tmp_path / "new"))
    ids = list(range(20, 60))
    expected = new.logits(ids).log_softmax(-1)
    state, old = new.module.state_dict(), read(engine.model_folder)
    for name, tensor in old.items():
        kept = state[name].clone()
        state[name].copy_(tensor)
        gap = (new.logits(ids).log_softmax(-1) - expected).abs().max()
        assert gap > 10 * engine.bound, (name, gap)
        state[name].copy_(kept)
    assert torch.equal(new.logits(ids).log_softmax(-1), expected)


def test_merged_adapters_equal_those_of_peft(engine: EngineSubject, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = write_adapter(engine.model_folder, tmp_path / "adapter")
    ours = Reference(merged(engine.model_folder, adapter, tmp_path / "merged"))
    base = Reference(engine.model_folder).module
    theirs = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    found, expected = ours.module.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-5, name


# -- what it is called by ---------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def test_the_page_lists_the_promise_of_every_check() -> None:
    table = PAGE.read_text().partition("| check | promise |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert rows == [(name, promise_of(check)) for name, check in CHECKS.items()]


def test_the_tests_on_the_page_work_in_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for the reader's own package."""
    (shown,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    theirs = ModuleType("my_engine")
    vars(theirs).update(MyEngine=Nothing, MyConfig=PluginConfig)
    monkeypatch.setitem(sys.modules, "my_engine", theirs)
    names: dict[str, Any] = {}
    exec(shown, names)
    (mark,) = names["test_the_engine_keeps_its_promises"].pytestmark
    assert mark.args == ("check", CHECKS)


def test_plugins_check_runs_the_suite_only_on_an_engine_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started_with = []

    def report(self: Bench) -> Report:
        started_with.append((self.engine.name, self.engine.config.num_slots))  # type: ignore[attr-defined]
        return Report("engine", self.engine.name, ())

    nothing = Report("", "", ())
    monkeypatch.setattr(Bench, "report", report)
    for name in ("loads", "light_import", "documented"):  # slow, and tested elsewhere
        monkeypatch.setattr(plugin_check, name, lambda *_: None)
    monkeypatch.setattr(plugin_check, "_offer", lambda *_: nothing)
    named = plugin_check.check("embedded", {"num_slots": 3})
    assert [each.kind for each in named] == ["plugin", "engine"]
    assert started_with == [("embedded", 3)]
    everything = {each.name: each for each in plugin_check.check(None, {}) if each.kind == "engine"}
    assert everything["embedded"].skipped and started_with == [("embedded", 3)]


def test_python_among_the_settings_is_the_interpreter_of_the_server() -> None:
    """An engine that runs under ours alone says so."""
    bench = Bench(Nothing, {"python": "other/python"}, "--set")
    (outcome,) = bench.report().failed
    assert "inference.python" in outcome.message and "leave it out" in outcome.message


def test_a_missing_command_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nothing, "command", lambda self, launch: EngineCommand(["no-such-server"]))
    with (
        pytest.raises(EngineError, match=r"cannot be started: .*no-such-server"),
        started(Nothing(PluginConfig()), tmp_path, model_folder=tmp_path),
    ):
        pass


def test_pytest_makes_a_test_of_every_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pytest of its own, which only collects."""
    options = ["-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
    done = warm.run([*command, "--prime-rl", "embedded"], cwd=tmp_path, timeout=LIMIT)
    for check in CHECKS:
        assert f"prime-rl::embedded::{check}" in done.stdout, done.stdout + done.stderr


def test_the_tiny_models_tokenizer_takes_any_text(engine: EngineSubject) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(engine.model_folder)
    text = "leaf: é 葉\n\t<tab>"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>user\na<|im_end|>\n"
    assert tokenizer.eos_token_id in engine.reference().eos_token_ids
