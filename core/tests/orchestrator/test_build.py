"""Builders: sampling settings, filters, monitors, observers."""

from types import SimpleNamespace

from prime_rl import Filter, Observer, PluginConfig, hookimpl
from prime_rl.config.contract import SamplingConfig
from prime_rl.config.orchestrator import FilterConfig
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.build import (
    build_filters,
    build_monitors,
    build_observers,
)
from prime_rl.orchestrator.sources import train_sampling
from prime_rl.registry.manager import Hooks, load_plugins
from prime_rl_app.config import build_config


def test_training_sends_the_whole_distribution():
    train = train_sampling(SamplingConfig(temperature=0.7))
    assert (train.temperature, train.top_p, train.top_k, train.min_p) == (0.7, 1.0, -1, 0.0)


def test_the_file_monitor_is_always_there(tmp_path):
    config = build_config({"model": {"name": "m/m"}, "max_steps": 1})
    monitors = build_monitors(config, load_plugins(), tmp_path)
    assert [monitor.name for monitor in monitors] == ["file"]
    for monitor in monitors:
        monitor.close()


def test_filters_are_built_with_their_settings_and_their_flag():
    class Level(PluginConfig):
        level: int = 0

    class Leveled(Filter):
        name = "leveled"
        config_class = Level

    class Plugin:
        @hookimpl
        def register_filters(self):
            return [Leveled]

    hooks = Hooks()
    hooks.register(Plugin(), "x")
    configs = [FilterConfig.model_validate({"type": "leveled", "enforce": False, "level": 3})]
    ((built, enforce),) = build_filters(hooks, configs, "slot")
    assert isinstance(built, Leveled) and built.config == Level(level=3) and enforce is False


def test_every_installed_observer_is_built_by_name_with_its_settings():
    class Level(PluginConfig):
        level: int = 0

    class Second(Observer):
        name = "second"
        config_class = Level

    class First(Observer):
        name = "first"

    class Plugin:
        @hookimpl
        def register_observers(self):
            return [Second, First]

    hooks, host = Hooks(), object()
    hooks.register(Plugin(), "x")
    table = {"model": {"name": "m"}, "max_steps": 1, "observers": {"second": {"level": 3}}}
    run = SimpleNamespace(config=RunConfig.model_validate(table), hooks=hooks)
    first, second = build_observers(run, host)
    assert isinstance(first, First) and isinstance(second, Second)
    assert second.config == Level(level=3) and second.host is host
