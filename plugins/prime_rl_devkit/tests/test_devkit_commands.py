"""``prime-rl plugins``: ``list``, ``show`` and ``check``."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from commandline import prime_rl
from typer.testing import CliRunner

from prime_rl.registry.checks import CONTRACT_VERSION
from prime_rl_app.cli.app import app
from prime_rl_devkit import limits

BIN = Path(sys.executable).with_name("prime-rl")


def test_a_broken_plugin_is_listed_with_the_reason_beside_the_others(tmp_path, site):
    site("bad", "[prime_rl]\nbad = no_such_module_anywhere\n")
    done = prime_rl("plugins", "list", "--verbose", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    text = " ".join(done.stdout.split())
    assert "prime-rl-grpo" in text and "broken: plugin 'bad' (bad" in text
    rows = json.loads(prime_rl("plugins", "list", "--json", cwd=tmp_path).stdout)
    assert [row["plugin"] for row in rows if row["error"]] == ["bad"]


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ("[prime-rl]\nzzz = bad\n", "in the group 'prime-rl', which nothing reads; did you mean"),
        ("[prime_rl.plugins]\nzzz = bad\n", "in the group 'prime_rl.plugins', which nothing reads"),
        (
            "[prime_rl]\nzzz = \n",
            "its entry point in the group 'prime_rl' is '', expected a module",
        ),
        ("[prime_rl]\nzzz = bad:a b c\n", "is 'bad:a b c', expected a module, or a module and a"),
    ],
)
def test_entry_points_that_nothing_reads_or_loads_are_listed_shown_and_checked(
    tmp_path, site, points, says
):
    site("bad", points)
    for command in (["list"], ["list", "--verbose"], ["show", "zzz"], ["check", "zzz"]):
        done = prime_rl("plugins", *command, cwd=tmp_path)
        words = " ".join(done.stdout.split())
        assert "".join(says.split()) in "".join(words.split()), (command, words)
        assert done.returncode == (0 if command[0] == "show" else 1)
    # The check of other plugins is not disturbed by a name that is taken there.
    assert prime_rl("plugins", "check", "grpo", cwd=tmp_path).returncode == 0
    done = prime_rl("zzz", cwd=tmp_path)
    assert done.returncode == 2 and "no command 'zzz'" in done.stderr
    assert "".join(says[:30].split()) in "".join(done.stderr.replace("│", "").split())


def test_a_broken_plugin_is_shown_with_the_reason(tmp_path, site):
    code = "from prime_rl import hookimpl\n@hookimpl\ndef register_algorithms(): return [1]\n"
    site("bad", "[prime_rl]\nbad = bad\n", code)
    (row,) = json.loads(prime_rl("plugins", "show", "bad", "--json", cwd=tmp_path).stdout)
    assert (row["version"], row["entry_point"], row["offers"]) == ("0.1", "bad", [])
    assert row["error"] == (
        "plugin 'bad' (bad 0.1): register_algorithms must give subclasses of Algorithm, got 1"
    )
    assert "broken" in prime_rl("plugins", "show", "bad", cwd=tmp_path).stdout
    other = prime_rl("plugins", "show", "grpo", cwd=tmp_path)
    assert other.returncode == 0 and "broken" not in other.stdout


def test_two_plugins_of_one_name_are_listed_with_the_reason(tmp_path, site):
    site("second", "[prime_rl]\nzz = second\n")
    site("first", "[prime_rl]\nzz = first\n")
    rows = json.loads(prime_rl("plugins", "list", "--json", cwd=tmp_path).stdout)
    ((first, second),) = [[row for row in rows if row["plugin"] == "zz"]]
    assert first["error"] is None
    assert second["error"] == (
        f"plugin 'zz' is also brought by plugin 'zz' ({first['distribution']} 0.1). Uninstall one, "
        f"or list {second['distribution']!r} under plugins.disabled."
    )


def test_the_short_list_reads_metadata_and_imports_nothing(tmp_path, site, monkeypatch):
    """A name that is taken, another version of core, and a package that no index knows."""
    site("mine", "[prime_rl]\nmine = mine\nother = mine\n", "raise SystemExit")
    site("second", "[prime_rl]\nzz = second\n", "raise SystemExit")
    site("first", "[prime_rl]\nzz = first\n", "raise SystemExit")
    site("late", "[prime_rl]\nlate = late\n", "raise SystemExit")
    metadata = tmp_path / "site"
    with (metadata / "mine-0.1.dist-info/METADATA").open("a") as file:
        file.write("Summary: Credit by turns\n")
    with (metadata / "late-0.1.dist-info/METADATA").open("a") as file:
        file.write("Requires-Dist: prime-rl-core>=7\n")

    monkeypatch.setenv("COLUMNS", "250")
    done = prime_rl("plugins", "list", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    lines = {words[0]: " ".join(words) for words in rows}
    assert lines["mine"] == "mine 0.1 mine Credit by turns" and "other" in lines
    assert "broken: it asks for prime-rl-core>=7; " in lines["late"]
    # `prime-rl` and `prime-rl-app` both say what these bring.
    assert "observers: evals " in f"{lines['prime-rl-evals']} "
    assert "evals, evals" not in done.stdout
    broken = [name for name in ("first", "second") if "broken" in lines[name]]
    assert len(broken) == 1
    assert "brings a plugin 'zz' too. Uninstall one, or list" in lines[broken[0]]


def test_the_inventory_as_json_through_the_real_command(tmp_path):
    command = [BIN, "plugins", "list", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["plugin"]: row for row in json.loads(done.stdout)}
    assert rows["app"]["offers"] == {
        "launchers": ["local"],
        "observers": ["save_rollouts"],
        "views": ["lines"],
    }
    assert rows["grpo"]["distribution"] == "prime-rl-grpo"
    assert rows["grpo"]["offers"] == {
        "algorithms": [
            "grpo",
            "hierarchical_grpo",
            "max_rl",
            "rae",
            "reinforce_pp",
            "reinforce_pp_baseline",
        ]
    }
    assert rows["filters"]["offers"] == {"filters": ["gibberish", "repetition", "zero_advantage"]}
    assert rows["losses"]["group"] == "prime_rl.trainer"


@pytest.mark.parametrize("options", [[], ["--verbose"]])
def test_the_table_names_plugin_distribution_and_offers(options):
    shown = CliRunner().invoke(app, ["plugins", "list", *options], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if "prime-rl-grpo" in line]
    assert "algorithms: grpo, hierarchical_grpo, max_rl, rae" in lines[at]
    assert version("prime-rl-grpo") in "".join(lines[at : at + 2])


def test_hooks_that_a_plugin_implements_and_wraps_are_listed(tmp_path, site):
    code = """
from prime_rl import hookimpl

@hookimpl
def step_finished(step): ...

@hookimpl(wrapper=True)
def score_group(group):
    return (yield)
"""
    site("watch", "[prime_rl]\nw = watch\n", code)
    rows = json.loads(prime_rl("plugins", "list", "--json", cwd=tmp_path).stdout)
    assert [row for row in rows if row["plugin"] == "w"] == [
        {"plugin": "w", "distribution": "watch", "version": "0.1", "group": "prime_rl",
         "contract": CONTRACT_VERSION, "offers": {}, "implements": ["step_finished"],
         "wraps": ["score_group"], "error": None}
    ]  # fmt: skip


def test_a_plugin_that_has_changed_is_listed_as_it_is_now(tmp_path, site):
    code = """
from prime_rl import hookimpl

@hookimpl
def step_finished(): ...
"""
    site("seen", "[prime_rl]\nseen = seen\n", code)

    def listed():
        rows = json.loads(prime_rl("plugins", "list", "--json", cwd=tmp_path).stdout)
        (row,) = (row for row in rows if row["plugin"] == "seen")
        return row["implements"], row["error"]

    assert listed() == (["step_finished"], None)
    module = tmp_path / "site" / "seen.py"
    module.write_text(code.replace("step_finished", "weights_published"))
    assert listed() == (["weights_published"], None)
    module.write_text(code + "raise ValueError('broken')")
    assert "ValueError: broken" in listed()[1]
    module.write_text("import warnings\nwarnings.warn('old', FutureWarning)\n" + code)
    done = prime_rl("plugins", "list", "--verbose", cwd=tmp_path)
    assert "FutureWarning: old" in done.stderr and done.returncode == 0


def shown(*arguments, columns=80):
    return CliRunner().invoke(app, ["plugins", *arguments], env={"COLUMNS": str(columns)})


@pytest.mark.parametrize("options", [[], ["--verbose"]])
def test_the_table_fits_80_columns_and_cuts_no_name(options):
    lines = shown("list", *options).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("hierarchical_grpo" in line for line in lines)
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("name", ["grpo", "prime-rl-grpo", "prime_rl_grpo"])
def test_a_plugin_is_shown_by_its_name_or_its_distribution(name):
    text = shown("show", name).stdout
    assert max(map(len, text.splitlines())) <= 80
    for fact in (
        "plugin grpo",
        f"prime-rl-grpo {version('prime-rl-grpo')}",
        "prime-rl-core<0.3,>=0.2",
        "version 2",
        "prime_rl: grpo = prime_rl_grpo",
        "algorithm grpo",
        'algo.type = "max_rl"',
        "group_relative = True",
        "score_group",
        "float >= 0, < 1",
    ):
        assert fact in text, fact
    assert "__init__.py" in "".join(text.split())  # a path may take two lines


def test_one_offer_is_shown_alone():
    text = shown("show", "max_rl").stdout
    assert "algorithm max_rl" in text and "algorithm grpo" not in text


def test_a_plugin_as_json_has_its_settings_with_defaults_and_docs():
    (row,) = json.loads(shown("show", "rae", "--json").stdout)
    assert (row["plugin"], row["group"], row["contract"]) == ("grpo", "prime_rl", 2)
    assert row["file"].endswith("prime_rl_grpo/__init__.py")
    (offer,) = row["offers"]
    assert offer["class"] == "prime_rl_grpo.rae.RAE"
    (decay,) = [each for each in offer["settings"] if each["key"] == "decay"]
    assert (decay["type"], decay["default"]) == ("float >= 0, < 1", 0.95)
    assert decay["doc"].startswith("Weight of an agent's old baseline")


def test_a_required_setting_says_so():
    (row,) = json.loads(shown("show", "opd", "--json").stdout)
    (teacher,) = [each for each in row["offers"][0]["settings"] if each["key"] == "teacher"]
    assert teacher["required"] and teacher["default"] is None
    assert "required" in shown("show", "opd").stdout


def test_a_plugin_of_the_trainer_is_shown_with_its_group():
    (row,) = json.loads(shown("show", "losses", "--json").stdout)
    assert row["group"] == "prime_rl.trainer"
    assert {offer["kind"] for offer in row["offers"]} == {"loss"}


def test_an_unknown_plugin_is_an_error_with_what_is_close(tmp_path):
    done = prime_rl("plugins", "show", "max_lr", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "error: no installed plugin is called 'max_lr' or offers anything of that name. "
        "Did you mean 'max_rl'?\n"
    )


def test_a_sound_algorithm_passes_the_check_with_code_0():
    done = shown("check", "max_rl")
    assert done.exit_code == 0, done.stdout
    assert done.stdout.startswith("algorithm max_rl  16 passed, 5 skipped\n")
    assert "permutation" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_plugin_is_checked_by_the_import_name_of_its_distribution():
    done = shown("check", "prime_rl_filters")
    assert done.exit_code == 0 and done.stdout.startswith("plugin filters  4 passed\n")


def test_settings_are_given_as_in_toml():
    teacher = ['teacher.name="t"', 'teacher.base_url="http://127.0.0.1:1/v1"']
    done = shown("check", "opd", "--set", teacher[0], "--set", teacher[1])
    assert done.exit_code == 0 and "algorithm opd  18 passed, 3 skipped" in done.stdout
    done = shown("check", "opd", "--json")
    (report,) = json.loads(done.stdout)["reports"]
    (outcome,) = report["checks"]
    assert outcome["status"] == "skipped" and "teacher: required" in outcome["message"]


def test_a_setting_that_is_no_toml_is_an_error(tmp_path):
    done = prime_rl("plugins", "check", "grpo", "--set", "limit=many", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --set: expected KEY=VALUE with a value as TOML writes it")


def test_a_setting_that_no_checked_class_has_is_an_error(tmp_path):
    done = prime_rl("plugins", "check", "rae", "--set", "decya=0.5", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --set: decya: unknown key; did you mean 'decay'?\n"


BROKEN = """
from prime_rl import Algorithm, PluginConfig, hookimpl


class Config(PluginConfig):
    scale: float = 1.0


class Odd(Algorithm):
    name = "odd"
    config_class = Config

    @hookimpl
    def score_group(self, group):
        for index, rollout in enumerate(group):
            rollout.assign_advantages(rollout.reward + index * self.config.scale)


@hookimpl
def register_algorithms():
    return [Odd]
"""
PROJECT = """
[project]
name = "odd-one"
version = "3.1"
[project.entry-points.prime_rl]
odd = "odd_one"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package folder that is not installed."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "src").mkdir()
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "src/odd_one.py").write_text(BROKEN)
    yield tmp_path
    sys.modules.pop("odd_one", None)


OBSERVES = '''"""Watches."""
from prime_rl import TrainerObserver, hookimpl

class Rows(TrainerObserver):
    """Sees rows."""
    name = "rows"

@hookimpl
def register_observers():
    """Offer it."""
    return [Rows]
'''


def test_an_observer_under_the_wrong_entry_point_group_fails_the_check(folder):
    (folder / "src/odd_one.py").write_text(OBSERVES)
    project = folder / "pyproject.toml"
    right = PROJECT.replace("entry-points.prime_rl", 'entry-points."prime_rl.trainer"')

    def failed():
        reports = json.loads(shown("check", str(folder), "--json").stdout)["reports"]
        checks = [each for report in reports for each in report["checks"]]
        return [each["message"] for each in checks if each["status"] == "failed"]

    (message,) = failed()
    assert "the TrainerObserver Rows would never run" in message
    assert "entry-point group 'prime_rl.trainer'" in message
    project.write_text(right)
    sys.modules.pop("odd_one", None)
    assert failed() == []


def test_a_folder_is_checked_without_being_installed(folder):
    done = shown("check", str(folder), "--json")
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert answer["ok"] is False
    package, algorithm = answer["reports"]
    assert (package["kind"], package["name"]) == ("plugin", "odd")
    failed = [each for each in package["checks"] if each["status"] == "failed"]
    assert [each["check"] for each in failed] == ["documented"]
    assert failed[0]["message"] == "no docstring: class Odd, Config.scale. Put a string below it."
    failed = [each["check"] for each in algorithm["checks"] if each["status"] == "failed"]
    assert failed == ["tied_group", "permutation"]


def test_settings_change_what_is_checked(folder):
    done = shown("check", str(folder), "--json", "--set", "scale=0.0")
    _, algorithm = json.loads(done.stdout)["reports"]
    assert algorithm["ok"] is True


def test_a_heavy_import_is_found(folder, monkeypatch):
    with (folder / "src/odd_one.py").open("a") as file:
        file.write("import verifiers\n")
    (folder / "src/verifiers.py").write_text("")
    monkeypatch.setitem(sys.modules, "verifiers", None)  # restored: other tests have the real one
    del sys.modules["verifiers"]
    done = shown("check", str(folder), "--json")
    (message,) = [
        each["message"]
        for each in json.loads(done.stdout)["reports"][0]["checks"]
        if each["check"] == "light_import"
    ]
    assert message == (
        "importing odd_one imports verifiers. Import it inside the function that needs it."
    )


HANGS = """
import time

@hookimpl
def score_group(group):
    {}
"""


@pytest.mark.parametrize("hang", ["while True: pass", "time.sleep(1e6)"])
def test_a_hook_that_hangs_fails_its_check(folder, hang):
    with (folder / "src/odd_one.py").open("a") as file:
        file.write(HANGS.format(hang))
    done = shown("check", str(folder), "--json", "--limit", "0.5")
    _, hooks, _ = json.loads(done.stdout)["reports"]
    (message,) = [each["message"] for each in hooks["checks"] if each["status"] == "failed"]
    assert "TimeoutError: it did not return within 0.5 s" in message


def test_the_limits_clock_stands_while_the_process_waits_for_a_cpu(monkeypatch):
    """60 s on a busy machine: the thread that works got 2 s; another of its threads waits too."""
    at = [(100.0, {"1": 7.0}), (160.0, {"1": 65.0, "2": 30.0}), (170.0, {"1": 65.0})]
    wall, waited = ([each[i] for each in at] for i in (0, 1))
    monkeypatch.setattr(limits.time, "perf_counter", lambda: wall.pop(0))
    monkeypatch.setattr(limits, "delays", lambda: waited.pop(0))
    clock = limits.OwnTime()
    assert clock.seconds() == 2.0
    assert clock.seconds() == 12.0  # 10 s asleep, which count


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not report")
def test_every_thread_reports_how_long_it_waited_for_a_cpu():
    assert str(os.getpid()) in limits.delays()


def test_an_import_that_hangs_fails_to_load(folder):
    with (folder / "src/odd_one.py").open("a") as file:
        file.write("while True: pass\n")
    done = shown("check", str(folder), "--json", "--limit", "0.2")
    (report,) = json.loads(done.stdout)["reports"]
    assert "failed to import: TimeoutError: it did not return" in report["checks"][0]["message"]


def test_a_slow_import_is_found(folder, monkeypatch):
    monkeypatch.setattr("prime_rl_devkit.check.IMPORT_SECONDS", 0.01)
    with (folder / "src/odd_one.py").open("a") as file:
        file.write("import time; time.sleep(0.02)\n")
    done = shown("check", str(folder), "--json")
    (message,) = [
        each["message"]
        for each in json.loads(done.stdout)["reports"][0]["checks"]
        if each["check"] == "light_import"
    ]
    assert message.endswith(
        "s, expected at most 0.01 s. Do the work in the function that needs it."
    )


def test_an_invalid_default_fails_and_a_missing_setting_does_not(folder):
    code = (folder / "src/odd_one.py").read_text()
    (folder / "src/odd_one.py").write_text(code.replace("float = 1.0", "float = 'much'"))
    done = shown("check", str(folder), "--json")
    (outcome,) = json.loads(done.stdout)["reports"][1]["checks"]
    assert outcome["status"] == "failed" and "scale: Input should be" in outcome["message"]


def test_an_algorithm_that_core_cannot_build_fails(folder):
    with (folder / "src/odd_one.py").open("a") as file:
        file.write("\ndef _init(self): ...\nOdd.__init__ = _init\n")
    done = shown("check", str(folder), "--json")
    (outcome,) = json.loads(done.stdout)["reports"][1]["checks"]
    assert (outcome["check"], outcome["status"]) == ("builds", "failed")
    assert "its __init__ takes (self)" in outcome["message"]


def test_a_broken_plugin_does_not_stop_the_check_of_another(tmp_path, site):
    site("bad", "[prime_rl]\nbad = bad\n", "import sys; sys.exit(3)\n")
    done = prime_rl("plugins", "check", "prime_rl_filters", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("plugin filters  4 passed\n")
    done = prime_rl("plugins", "check", "bad", cwd=tmp_path)
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "failed to import: SystemExit: 3 (line 1 of " in said


OWN_LOSS = """
import prime_rl


class Steady(prime_rl.Loss):
    name = "steady"
    token_wise = True

    def __call__(self, inputs):
        gain = inputs.advantages * inputs.trainer_logprobs * inputs.loss_weights
        return prime_rl.LossOutputs(-gain[inputs.loss_mask].sum(), {})


@prime_rl.hookimpl
def register_losses():
    return [Steady]
"""


def test_an_algorithm_of_a_folder_may_train_the_folders_own_loss(folder):
    sound = BROKEN.replace("index * self.config.scale", "0").replace(
        '"odd"', '"odd"\n    action_loss = "steady"'
    )
    (folder / "src/odd_one.py").write_text(sound)
    (folder / "src/odd_loss.py").write_text(OWN_LOSS)
    both = PROJECT + '[project.entry-points."prime_rl.trainer"]\nodd = "odd_loss"\n'
    (folder / "pyproject.toml").write_text(both)
    found = {
        r["kind"]: r["checks"]
        for r in json.loads(shown("check", str(folder), "--json").stdout)["reports"]
    }
    sys.modules.pop("odd_loss", None)
    status = {each["check"]: each["status"] for each in found["algorithm"]}
    assert status["declared_component"] == status["credit_on_mask"] == "passed"
    assert "failed" not in status.values() and found["loss"]


def test_a_broken_loss_does_not_stop_the_check_of_another_algorithm(tmp_path, site):
    site("bad", "[prime_rl.trainer]\nbad = bad\n", "import sys; sys.exit(3)\n")
    done = prime_rl("plugins", "check", "grpo", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_distribution_may_be_left_out_by_its_name(tmp_path, site):
    site("bad", "[prime_rl]\nworse = bad\n", "import sys; sys.exit(3)\n")
    (row,) = [
        r
        for r in json.loads(prime_rl("plugins", "list", "--json", cwd=tmp_path).stdout)
        if r["error"]
    ]
    done = prime_rl("plugins", "list", "--json", "--without", row["distribution"], cwd=tmp_path)
    assert done.returncode == 0 and not any(r["error"] for r in json.loads(done.stdout))


def test_a_plugin_that_breaks_the_contract_fails_to_load(folder):
    with (folder / "src/odd_one.py").open("a") as file:
        file.write("\n@hookimpl\ndef scor_group(group): ...\n")
    done = shown("check", str(folder))
    assert done.exit_code == 1
    assert "'scor_group' is not a hook; did you mean 'score_group'?" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [("[project]\nname = 'x'\n", "no entry points under 'prime_rl' or 'prime_rl.trainer'"),
     ("[project", "pyproject.toml: ")],
)  # fmt: skip
def test_a_folder_that_is_no_plugin_is_an_error(tmp_path, text, says):
    (tmp_path / "pyproject.toml").write_text(text)
    done = prime_rl("plugins", "check", tmp_path, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr


def test_a_folder_without_a_project_is_an_error(tmp_path):
    done = prime_rl("plugins", "check", f"{tmp_path}/", cwd=tmp_path)
    assert done.returncode == 2
    assert "expected a package folder with a pyproject.toml, found none" in done.stderr
