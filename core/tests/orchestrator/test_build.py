"""Builders: engines, sampling settings, filters, observers."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from prime_rl import Filter, Observer, PluginConfig, hookimpl
from prime_rl.config.contract import SamplingConfig
from prime_rl.config.orchestrator import FilterConfig
from prime_rl.config.run import RunConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator import build
from prime_rl.orchestrator.build import (
    build_filters,
    build_observers,
)
from prime_rl.orchestrator.sources import train_sampling
from prime_rl.registry.manager import Hooks
from prime_rl.weights.versions import Weights


def test_training_sends_the_whole_distribution():
    train = train_sampling(SamplingConfig(temperature=0.7))
    assert (train.temperature, train.top_p, train.top_k, train.min_p) == (0.7, 1.0, -1, 0.0)


def test_filters_are_built_with_their_settings_and_their_flag():
    class Level(PluginConfig):
        level: int = 0

    class Leveled(Filter):
        name = "leveled"
        config_class = Level

        @hookimpl
        def filter_rollout(self, rollout, group):
            return None

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


class Fleet:
    """Keeps what it is built from."""

    def __init__(self, urls, admin_key, first, options, delivery=None):
        self.urls, self.key, self.weights = urls, admin_key, first
        self.options, self.delivery = options, delivery
        self.on_waiting = None


@pytest.mark.parametrize(
    ("first_step", "engine_version", "kept", "has_first", "average_has_first"),
    [
        (1, 0, False, True, True),  # a new run: the engines began with the first weights
        (1, 0, True, False, False),  # kept from the last attempt: which ones is not known
        (4, 3, False, True, False),  # resumed: the average began with the run's first weights
        (4, 0, False, False, False),
    ],
)
def test_engines_are_asked_for_the_weights_that_they_may_lack(
    monkeypatch, tmp_path, first_step, engine_version, kept, has_first, average_has_first
):
    monkeypatch.setattr(build, "Fleet", Fleet)
    monkeypatch.setattr(build, "report_engines", lambda fleet, status: reported.append(fleet))
    monkeypatch.setenv("PRIME_RL_ADMIN_KEY", "secret")
    reported = []
    launch = SimpleNamespace(
        first_step=first_step,
        engine_version=engine_version,
        engines_kept=kept,
        engine_urls=["http://a:1", "http://b:2"],
        engine_names=["inference", "inference_1"],
        first_weights=Path("first"),
        initial=Path("initial"),
        served_model_name="m",
        reference_urls={"initial": "http://i:3", "ema": "http://e:4"},
        checkpoint=None,
    )
    config = RunConfig.model_validate({"model": {"name": "m"}, "max_steps": 9})
    run = SimpleNamespace(config=config, launch=launch, run_dir=tmp_path, hooks=Hooks())
    engines = build.build_engines(run)

    fleet = engines.fleet
    assert engines.policy.version == first_step - 1
    assert (fleet.urls, fleet.key, fleet.delivery) == (launch.engine_urls, "secret", None)
    assert (fleet.weights.directory, fleet.weights.version) == (Path("first"), first_step - 1)
    assert fleet.options.have_first is has_first
    assert fleet.names == {"http://a:1": "inference", "http://b:2": "inference_1"}
    assert reported == [fleet]

    # A fleet looks at its engines, so no request to them has a time limit of its own.
    assert engines.earlier.keys() == {"initial", "ema"}
    reference = engines.earlier["initial"].fleet
    assert (reference.urls, reference.weights) == (["http://i:3"], Weights(Path("initial"), 0))
    assert reference.options.have_first  # it loads no others
    assert reference.on_waiting is not None

    average = engines.earlier["ema"].fleet
    assert average.urls == ["http://e:4"]
    assert average.options.have_first is average_has_first
    of_average = tmp_path / "averages" / f"step_{first_step - 1}"
    assert average.weights.directory == (of_average if first_step > 1 else Path("initial"))
    assert fleet.on_waiting is not None and average.on_waiting is not None


@pytest.mark.parametrize(
    ("whole_group", "of_env", "size"), [(True, 4, 1), (False, 4, 4), (False, None, 8)]
)
def test_a_group_has_the_size_of_its_env_or_is_what_its_source_gives(
    monkeypatch, whole_group, of_env, size
):
    source = SimpleNamespace(whole_group=whole_group)
    algorithm = SimpleNamespace(name="plain", needs_attribution=False)
    monkeypatch.setattr(build, "make_algorithm", lambda *arguments, **named: algorithm)
    monkeypatch.setattr(
        build, "_environment", lambda *arguments: SimpleNamespace(agents=("agent",))
    )
    monkeypatch.setattr(build, "build_source", lambda *arguments: source)
    monkeypatch.setattr(build, "EnvHost", lambda *arguments: "host")
    monkeypatch.setattr(build, "env_hooks", lambda *arguments: [])
    hooks = SimpleNamespace(decides_sizes=False)
    scopes = []

    def scope_of(label, shared, plugins):
        scopes.append((label, plugins))
        return hooks

    monkeypatch.setattr(build, "scope", scope_of)
    monkeypatch.setattr(build, "collect", lambda hooks, kind: {})
    algo = SimpleNamespace(type="a", settings={})
    config = SimpleNamespace(algo=algo, group_size=8, train=SimpleNamespace(harness=None))
    run = SimpleNamespace(config=SimpleNamespace(orchestrator=config), hooks=None)
    env = SimpleNamespace(label="e", id="e", args={}, algo=None, group_size=of_env)
    shared = SimpleNamespace(run=run, renderer=SimpleNamespace(name="r"))
    built = build.build_train_env(shared, env)
    assert (built.name, built.group_size, built.source) == ("e", size, source)
    assert built.hooks is hooks and scopes == [("e", [algorithm])]
    assert built.limits is None


def test_an_env_with_measure_every_is_measured_and_not_sampled(monkeypatch):
    def nothing(*arguments, **named):
        return SimpleNamespace(take_metrics=dict, sources=[], log=None, dispatcher=None)

    sampled = []

    def sampling(run, engines, envs, **named):
        sampled.extend(env.name for env in envs)
        return nothing()

    for name in (
        *("Reporter", "build_sampler", "build_buffer", "Checkpointing", "EngineKeeper", "Packer"),
        *("WeightWatcher", "ObserverHost"),
    ):
        monkeypatch.setattr(build, name, nothing)
    monkeypatch.setattr(build, "Sampling", sampling)
    monkeypatch.setattr(build, "compared_by", lambda run, envs, **named: {"a": [], "v": []})
    monkeypatch.setattr(build, "build_observers", lambda run, host: [])
    measurements = []

    def measurement(run, envs):
        measurements.append(envs)
        return nothing()

    monkeypatch.setattr(build, "Measurement", measurement)
    monkeypatch.setattr(
        build, "Orchestrator", lambda run, sampling, **named: SimpleNamespace(**named)
    )

    class Env(SimpleNamespace):
        __hash__ = object.__hash__

    trained, held_out = (
        Env(name=name, host=nothing(), environment=nothing()) for name in ("a", "v")
    )
    table = [SimpleNamespace(label="a", measure_every=None, weight=None, opens=None)]
    table.append(SimpleNamespace(label="v", measure_every=5))
    config = SimpleNamespace(
        orchestrator=SimpleNamespace(
            train=SimpleNamespace(env=table), batch_size=8, token_batch_size=None
        ),
        trainer=TrainerConfig(),
        plugins=SimpleNamespace(disabled=()),
        observers={},
        seq_len=64,
    )
    run = SimpleNamespace(
        config=config,
        hooks=None,
        launch=SimpleNamespace(num_ranks=1, checkpoint=None),
        losses=None,
        run_dir=None,
        waited=SimpleNamespace(take=dict),
    )
    engines = SimpleNamespace(policy=None, fleet=None, past=None)
    shared = SimpleNamespace(run=run, engines=engines)
    loop = build.build_orchestrator(
        shared, [trained, held_out], [], SimpleNamespace(announced=None)
    )
    assert sampled == ["a"]
    assert measurements == [{held_out: 5}] and len(loop.observers) == 5
