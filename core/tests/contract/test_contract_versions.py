"""The contract grows without breaking anyone, and what goes warns first.

A later core is a module of hookspecs put in the place of ours.
"""

from __future__ import annotations

import inspect
import tomllib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import prime_rl
from prime_rl import CONTRACT_VERSION, Algorithm, PluginConfig, PluginError, hookimpl
from prime_rl.entries import entries
from prime_rl.plugins import hookspecs
from prime_rl.plugins.hookspecs import hookspec
from prime_rl.registry import checks, manager
from prime_rl.registry.manager import Hooks, load_plugins
from prime_rl.registry.offers import ALGORITHM, collect
from prime_rl.testing import make_group, score

ROOT = Path(__file__).parents[3]
WHO = "plugin 'demo' (demo-plugin 1.2)"


@pytest.fixture
def specify(monkeypatch):
    """Puts other hookspecs of the same names in the place of ours."""

    def put(*specs):
        later = ModuleType("later_hookspecs")
        vars(later).update(vars(hookspecs))
        for spec in specs:
            setattr(later, spec.__name__, spec)
            monkeypatch.setitem(checks.SPECS, spec.__name__, spec)
        monkeypatch.setattr(manager, "hookspecs", later)

    return put


def warned(action) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught]


# -- a number for the whole ------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["'1'", "1.0", "True", "None"])
def test_a_contract_version_that_is_no_number_is_refused_with_the_one_to_write(install, number):
    install(f"prime_rl_contract = {number}")
    with pytest.raises(PluginError) as caught:
        load_plugins()
    assert str(caught.value) == (
        f"{WHO}: prime_rl_contract is {number}, expected a whole number: the contract version "
        "the plugin was written for, such as 2."
    )


def test_an_offered_class_may_ask_for_a_version_too(install):
    install(
        "class Mine(Algorithm):\n    name = 'mine'\n    prime_rl_contract = 7\n"
        "@hookimpl\ndef register_algorithms():\n    return [Mine]\n"
    )
    with pytest.raises(PluginError, match=r"contract version 7, .* speaks 1 to 2\. Upgrade p"):
        collect(load_plugins(), ALGORITHM)


def test_the_distribution_of_the_contract_has_its_number():
    contract, core = (
        tomllib.loads((ROOT / name / "pyproject.toml").read_text("utf-8"))["project"]
        for name in ("contract", "core")
    )
    number = contract["version"]
    assert number.partition(".")[0] == str(CONTRACT_VERSION)
    assert f"prime-rl-contract>={CONTRACT_VERSION},<{CONTRACT_VERSION + 1}" in core["dependencies"]


@pytest.mark.parametrize(
    ("requires", "fits"),
    [
        ("prime-rl-contract>=2,<4", True),
        ("prime-rl-contract<4,>=2", True),
        ("prime-rl-contract>=3,<5", False),
        ("prime-rl-contract<2", False),
        ("prime-rl-contracts>=9", True),
    ],
)
def test_a_distribution_pins_the_contract(install, caplog, requires, fits):
    pytest.importorskip("packaging")
    install(requires=requires)
    load_plugins()
    said = [line for line in caplog.messages if "it asks for" in line]
    assert said == [] if fits else f"{WHO}: it asks for {requires}; 2.0 is here." in said[0]


def test_the_contract_of_a_plugin_is_what_it_requires_else_what_it_says(install):
    install("prime_rl_contract = 1", requires="prime-rl-contract<4,>=2")
    install("prime_rl_contract = 1", plugin="other", distribution="other", version="1")
    install(plugin="third", distribution="third", version="1")
    found = {
        entry.name: manager.contract_of(entry, entry.load())
        for entry in entries("prime_rl")
        if entry.name in ("demo", "other", "third")
    }
    assert found == {"demo": ">=2,<4", "other": 1, "third": 2}


# -- hooks may gain optional arguments -------------------------------------------------------------


class Old(Algorithm):
    """Written when ``score_group`` had one argument."""

    name = "old"

    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


class OldWatcher:
    def __init__(self):
        self.seen = []

    @hookimpl
    def step_finished(self, step):
        self.seen.append(step)

    @hookimpl(wrapper=True)
    def score_group(self, group):
        yield
        self.seen.append(len(group))


def test_an_old_plugin_works_with_a_hook_that_gained_an_argument(specify, monkeypatch):
    given = []

    @hookspec
    async def score_group(group, step): ...

    @hookspec
    def step_finished(step, metrics, seconds): ...

    class New:
        @hookimpl
        def score_group(self, group, step):
            given.append(step)

    async def call_score_group(self, group):
        await manager._call_async(self.hook.score_group, group=group, step=4)

    specify(score_group, step_finished)
    monkeypatch.setattr(Hooks, "score_group", call_score_group)
    watcher, group = OldWatcher(), make_group([1.0, 0.5])
    score(Old(PluginConfig()), group, watcher, New())
    assert [float(rollout.advantages[0]) for rollout in group] == [1.0, 0.5]
    hooks = Hooks()
    hooks.register(watcher)
    hooks.hook.step_finished(step=3, metrics={}, seconds=0.5)
    assert (watcher.seen, given) == ([2, 3], [4])


def test_a_new_plugin_on_an_old_core_gets_an_error_with_the_argument():
    class New:
        @hookimpl
        def score_group(self, group, step): ...

    with pytest.raises(PluginError, match=r"takes an argument 'step', which the hook does not"):
        Hooks().register(New(), "new")


# -- removals warn first ---------------------------------------------------------------------------


@pytest.fixture
def deprecate(monkeypatch):
    """Puts entries into the table of what goes."""
    return lambda key, instead: monkeypatch.setitem(checks.DEPRECATED, key, (instead, 3))


def test_a_deprecated_hook_warns_with_plugin_distribution_and_replacement(deprecate, install):
    deprecate("score_group", "'score_rollout'")
    module = install("@hookimpl\ndef score_group(group): ...")
    with pytest.warns(FutureWarning) as caught:
        load_plugins()
    (warning,) = (each for each in caught if str(each.message).startswith(WHO))
    assert str(warning.message) == (
        f"{WHO}: 'score_group' goes with contract version 3; use 'score_rollout'. Upgrade the "
        "plugin, or report it to its author."
    )
    assert warning.filename.endswith(f"{module}.py")


def test_an_algorithm_with_a_deprecated_hook_warns_and_works(deprecate):
    deprecate("score_group", "'score_rollout'")
    group = make_group([1.0])
    with pytest.warns(FutureWarning, match="'score_group' goes with contract version 3"):
        score(Old(PluginConfig()), group)
    assert group[0].advantages.tolist() == [1.0, 1.0, 1.0]


def test_taking_a_deprecated_argument_warns(deprecate):
    deprecate("filter_rollout.group", "the group of 'score_group'")

    class Takes:
        @hookimpl
        def filter_rollout(self, group): ...

    class Leaves:
        @hookimpl
        def filter_rollout(self, rollout): ...

    assert warned(lambda: Hooks().register(Takes(), "takes")) == [
        "plugin 'takes': 'filter_rollout.group' goes with contract version 3; use the group of "
        "'score_group'. Upgrade the plugin, or report it to its author."
    ]
    assert warned(lambda: Hooks().register(Leaves(), "leaves")) == []


def test_overriding_a_deprecated_method_of_a_base_class_warns(deprecate, install):
    deprecate("Algorithm.close", "'stop'")
    install(
        "class Mine(Algorithm):\n    name = 'mine'\n    async def close(self): ...\n"
        "class Other(Algorithm):\n    name = 'other'\n"
        "@hookimpl\ndef register_algorithms():\n    return [Mine, Other]\n"
    )
    hooks = load_plugins()
    assert warned(lambda: collect(hooks, ALGORITHM)) == [
        f"{WHO}: 'Algorithm.close' goes with contract version 3; use 'stop'. Upgrade the plugin, "
        "or report it to its author."
    ]


def test_what_goes_is_there_and_goes_with_a_later_version():
    assert all(gone_in > CONTRACT_VERSION for _, gone_in in checks.DEPRECATED.values())
    for key in checks.DEPRECATED:
        name, _, part = key.partition(".")
        spec = checks.SPECS.get(name)
        known = inspect.signature(spec).parameters if spec else dir(getattr(prime_rl, name))
        assert not part or part in known, key
