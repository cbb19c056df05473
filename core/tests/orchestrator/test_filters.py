"""A slot calls every filter, counts every objection, and drops for the enforcing ones only."""

import pytest

from prime_rl import Filter, PluginConfig, PluginError, hookimpl
from prime_rl.orchestrator.buffer import FilterSlot
from prime_rl.registry.manager import Hooks
from prime_rl.testing import make_rollout


class Named(Filter):
    """Objects to some rewards; remembers the rewards that it saw."""

    def __init__(self, name, *rewards):
        super().__init__(PluginConfig())
        self.name, self.rewards, self.asked = name, rewards, []

    @hookimpl
    def filter_rollout(self, rollout):
        self.asked.append(rollout.reward)
        return f"reward {rollout.reward}" if rollout.reward in self.rewards else None


def slot(*filters, shared=()):
    hooks = Hooks()
    for index, plugin in enumerate(shared):
        hooks.register(plugin, f"shared{index}")
    return FilterSlot("slot", hooks, filters)


def objections(one, *rewards):
    return [bool(one.objectors(make_rollout(reward))) for reward in rewards]


def test_an_enforcing_filter_drops():
    one = slot((Named("low", 0.0), True))
    assert objections(one, 0.0, 1.0) == [True, False]


def test_every_enforcing_objector_is_named_and_no_other():
    one = slot((Named("a", 0.0), True), (Named("b", 0.0), True), (Named("watch", 0.0), False))
    assert sorted(one.objectors(make_rollout(0.0))) == ["a", "b"]


def test_a_monitoring_filter_counts_and_drops_nothing():
    one = slot((Named("low", 0.0), False))
    assert objections(one, 0.0, 1.0) == [False, False]
    assert one.take_metrics() == {"filters/slot/low": 0.5, "filters/slot/dropped": 0.0}


@pytest.mark.parametrize("order", [1, -1])
def test_a_monitoring_filter_never_hides_an_enforcing_one(order):
    filters = [(Named("watch", 0.0), False), (Named("drop", 0.0), True)][::order]
    assert objections(slot(*filters), 0.0) == [True]


def test_every_filter_is_called_even_after_an_objection():
    filters = [Named("a", 0.0), Named("b", 0.0), Named("c")]
    one = slot(*((each, True) for each in filters))
    objections(one, 0.0, 1.0)
    assert [each.asked for each in filters] == [[0.0, 1.0]] * 3


def test_shares_in_numbers_and_counters_that_are_reset():
    one = slot((Named("a", 0.0, 1.0), True), (Named("b", 1.0), True), (Named("c", 2.0), False))
    objections(one, 0.0, 1.0, 2.0, 3.0)
    assert one.take_metrics() == {
        "filters/slot/a": 0.5,
        "filters/slot/b": 0.25,
        "filters/slot/c": 0.25,
        "filters/slot/dropped": 0.5,
    }
    assert set(one.take_metrics().values()) == {0.0}


def test_an_installed_plugin_objects_in_every_slot_and_counts_under_its_name():
    plugin = Named("third_party", 0.0)
    one = slot(shared=[plugin])
    assert objections(one, 0.0, 1.0) == [True, False]
    assert one.take_metrics()["filters/slot/third_party"] == 0.5


def test_an_installed_plugin_is_called_once_per_rollout():
    plugin = Named("third_party")
    one = slot((Named("a"), True), (Named("b"), True), shared=[plugin])
    objections(one, 0.0)
    assert plugin.asked == [0.0]


def test_a_wrapper_wraps_every_filter_of_the_slot():
    class Forgive:
        @hookimpl(wrapper=True)
        def filter_rollout(self, rollout):
            reasons = yield
            return [] if rollout.reward == 0.0 else reasons

    one = slot((Named("a", 0.0, 1.0), True), (Named("b", 0.0), True), shared=[Forgive()])
    assert objections(one, 0.0, 1.0) == [False, True]


def test_an_empty_slot_keeps_everything():
    one = slot()
    assert objections(one, 0.0) == [False]
    assert one.take_metrics() == {"filters/slot/dropped": 0.0}


@pytest.mark.parametrize("answer", [False, True, 0])
def test_an_answer_that_is_not_a_reason_is_an_error(answer):
    class Boolean(Named):
        @hookimpl
        def filter_rollout(self, rollout):
            return answer

    with pytest.raises(PluginError) as caught:
        objections(slot((Boolean("yes_no"), True)), 0.0)
    assert str(caught.value) == (
        f"filter 'yes_no': filter_rollout gave {answer!r}, expected the reason to drop the "
        "rollout, or None to keep it"
    )
