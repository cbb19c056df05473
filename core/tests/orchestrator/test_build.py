"""Builders: sampling settings, filters, monitors."""

from prime_rl import Filter, PluginConfig, hookimpl
from prime_rl.config.orchestrator import EvalSamplingConfig, FilterConfig, SamplingConfig
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.build import (
    build_filters,
    build_monitors,
    eval_sampling,
    train_sampling,
)
from prime_rl.plugins.manager import Hooks, load_plugins


def test_training_sends_the_whole_distribution_and_evaluation_what_is_set():
    train = train_sampling(SamplingConfig(temperature=0.7))
    assert (train.temperature, train.top_p, train.top_k, train.min_p) == (0.7, 1.0, -1, 0.0)
    held_out = eval_sampling(EvalSamplingConfig(top_p=0.9))
    assert (held_out.temperature, held_out.top_p, held_out.top_k) == (None, 0.9, None)


def test_the_file_monitor_is_always_there(tmp_path):
    config = RunConfig.model_validate({"model": {"name": "m"}, "max_steps": 1})
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
