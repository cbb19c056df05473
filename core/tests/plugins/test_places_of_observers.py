"""``register_observers`` takes whatever sees a run; the base class says where it runs."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl import Monitor, Observer, PluginError, RunObserver, TrainerObserver, hookimpl
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import MONITOR, OBSERVER, TRAINER_OBSERVER, collect
from prime_rl.registry.offers import unreached_observers as unreached


class Loop(Observer):
    name = "loop"


class Rows(TrainerObserver):
    name = "rows"


class Lines(Monitor):
    name = "lines"

    def log(self, step: int, metrics: Any) -> None: ...


class Watching:
    """One plugin with an observer for each place."""

    @hookimpl
    def register_observers(self) -> list[type[RunObserver]]:
        return [Loop, Rows, Lines]


class Early:
    """The same by the hooks of contract 2, of the orchestrator."""

    @hookimpl
    def register_observers(self) -> list[type[Observer]]:
        return [Loop]

    @hookimpl
    def register_monitors(self) -> list[type[Monitor]]:
        return [Lines]


class EarlyTrainer:
    @hookimpl
    def register_trainer_observers(self) -> list[type[TrainerObserver]]:
        return [Rows]


def loaded(plugin: object, group: str) -> Hooks:
    hooks = Hooks(group)
    hooks.register(plugin, "watching")
    return hooks


def names(hooks: Hooks) -> dict[str, list[str]]:
    kinds = (OBSERVER, MONITOR, TRAINER_OBSERVER)
    return {kind.name: list(collect(hooks, kind)) for kind in kinds}


def check_places(orchestrator: Hooks, trainer: Hooks) -> None:
    """Each class is in the process in which it runs, and none is left over."""
    assert names(orchestrator) == {
        "observer": ["loop"],
        "monitor": ["lines"],
        "trainer_observer": [],
    }
    assert names(trainer) == {"observer": [], "monitor": [], "trainer_observer": ["rows"]}
    assert unreached(orchestrator, trainer) == []


def test_each_process_has_the_observers_that_run_in_it() -> None:
    orchestrator = loaded(Watching(), PROJECT)
    trainer = loaded(Watching(), TRAINER_GROUP)
    check_places(orchestrator, trainer)


def test_the_hooks_of_contract_2_give_the_same_with_a_note_each() -> None:
    with pytest.warns(FutureWarning, match="'register_monitors' goes with contract version 4"):
        orchestrator = loaded(Early(), PROJECT)
    note = "'register_trainer_observers' goes with contract version 4; use register_observers"
    with pytest.warns(FutureWarning, match=note):
        trainer = loaded(EarlyTrainer(), TRAINER_GROUP)
    check_places(orchestrator, trainer)


def test_an_observer_that_its_process_does_not_load_is_named() -> None:
    (problem,) = unreached(loaded(Watching(), PROJECT), Hooks(TRAINER_GROUP))
    assert problem == (
        "plugin 'watching' (not installed): the TrainerObserver Rows would never run. Its process "
        "loads the entry-point group 'prime_rl.trainer': name the plugin's module there too."
    )
    problems = unreached(Hooks(PROJECT), loaded(Watching(), TRAINER_GROUP))
    assert [problem.partition(": the ")[2][:12] for problem in problems] == [
        "Observer Loo",
        "Monitor Line",
    ]
    assert "entry-point group 'prime_rl':" in problems[0]


def test_a_class_of_two_places_is_refused() -> None:
    class Both(Observer, TrainerObserver):
        name = "both"

    class Plugin:
        @hookimpl
        def register_observers(self) -> list[type[RunObserver]]:
            return [Both]

    with pytest.raises(PluginError, match=r"Both is Observer and TrainerObserver, .* a class for"):
        collect(loaded(Plugin(), PROJECT), OBSERVER)


@pytest.mark.parametrize("group", [PROJECT, TRAINER_GROUP])
def test_a_class_of_no_place_is_refused(group: str) -> None:
    class Nowhere(RunObserver):
        name = "nowhere"

    class Plugin:
        @hookimpl
        def register_observers(self) -> list[type[RunObserver]]:
            return [Nowhere]

    said = "must give subclasses of Monitor, Observer or TrainerObserver, got <class .*Nowhere'>"
    kind = OBSERVER if group == PROJECT else TRAINER_OBSERVER
    with pytest.raises(PluginError, match=said):
        collect(loaded(Plugin(), group), kind)


def test_a_hook_of_contract_2_still_takes_its_own_sort_only() -> None:
    class Plugin:
        @hookimpl
        def register_trainer_observers(self) -> list[Any]:
            return [Loop]

    with pytest.warns(FutureWarning, match="register_trainer_observers"):
        hooks = loaded(Plugin(), TRAINER_GROUP)
    with pytest.raises(
        PluginError, match="register_trainer_observers must give subclasses of TrainerObserver, got"
    ):
        collect(hooks, TRAINER_OBSERVER)
