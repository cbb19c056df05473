"""``--dry-run`` builds what a run builds, and shows what it will do."""

import asyncio
from collections.abc import Generator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from resolved_parts import resolved_with

from prime_rl import ConfigError, Group, Monitor, PluginError, hookimpl
from prime_rl.env.environment import ExampleFailed
from prime_rl.registry.manager import Hooks, load_plugins, wrappers
from prime_rl_app.config import build_config
from prime_rl_app.resolve import Resolved
from prime_rl_tools import dry_run
from prime_rl_tools.dry_run import build_parts, call_orders, changed_keys, describe, prompt_lines

TABLE = {
    "model": {"name": "tiny-reverse"},
    "max_steps": 3,
    "seq_len": 64,
    "orchestrator": {
        "batch_size": 16,
        "group_size": 8,
        "train": {"env": [{"id": "reverse-text"}]},
    },
}


class Clip:
    @hookimpl(wrapper=True)
    def score_group(self, group: Group) -> Generator[None, None, None]:
        yield


class Broken(Monitor):
    name = "broken"

    def __init__(self, config, run_dir):
        raise KeyError("in the constructor")

    def log(self, step, metrics):
        raise AssertionError("it was never made")


def test_the_keys_that_differ_from_the_defaults():
    changed = dict(changed_keys(build_config(TABLE)))
    assert changed == {
        "model.name": "tiny-reverse",
        "max_steps": 3,
        "seq_len": 64,
        "orchestrator.batch_size": 16,
        "orchestrator.train.env": [{"id": "reverse-text"}],
    }


def test_wrappers_are_named_the_outermost_first():
    hooks = Hooks()
    hooks.register(Clip(), "first")
    hooks.register(Clip(), "second")
    assert wrappers(hooks) == ["score_group wrapped by second", "score_group wrapped by first"]


def test_the_order_of_a_hooks_plugins_is_that_of_the_calls_and_rivals_for_a_place_are_named():
    """Each plugin here notes its call, and the order is that of the notes."""
    calls = []

    def noting(name, **options):
        def around(self, group):
            calls.append(name)
            yield

        def inside(self, group):
            calls.append(name)

        function = hookimpl(**options)(around if "wrapper" in options else inside)
        return type(name, (), {"score_group": function})()

    hooks = Hooks()
    for name, options in [
        ("a", {"wrapper": True, "tryfirst": True}),
        ("late", {"trylast": True}),
        ("b", {"wrapper": True}),
        ("c", {"wrapper": True, "tryfirst": True}),
        ("last", {"trylast": True}),
    ]:
        hooks.register(noting(name, **options), name)
    hooks.label = "env x"
    assert call_orders([(hooks, {"score_group"})]) == [
        "order      score_group: 'c' around 'a' around 'b' around 'late', then 'last' (env x)",
        "conflict   score_group: more than one plugin asks for tryfirst: 'c', 'a'; 'c' gets it "
        "(env x)",
        "conflict   score_group: more than one plugin asks for trylast: 'late', 'last'; 'last' "
        "gets it (env x)",
    ]
    asyncio.run(hooks.score_group([]))
    assert calls == ["c", "a", "b", "late", "last"]


def test_a_quick_dry_run_shows_processes_batch_and_wrappers_and_builds_no_environment(monkeypatch):
    monkeypatch.setattr(dry_run, "Environment", None)
    hooks = load_plugins()
    hooks.register(Clip(), "clip")
    lines = [*describe(build_config(TABLE), hooks, quick=True)]
    assert "process    orchestrator: no GPU of its own" in lines
    batch = "batch      16 rollouts, at most 1,024 tokens per step, in rows of 64"
    assert batch in lines and "wrapper    score_group wrapped by clip" in lines
    assert "order      score_group: 'clip' around 'grpo' (env reverse-text)" in lines
    assert any(line.startswith("env        reverse-text: ") for line in lines)


@pytest.mark.parametrize("gpus, noted", [([], True), (["0"], False)])
def test_a_trainer_on_cuda_is_noted_on_a_machine_without_a_gpu(monkeypatch, gpus, noted):
    """A note, since a dry run of a cluster's config may run on a login node."""
    monkeypatch.setattr("prime_rl_app.children.visible_gpus", lambda: gpus)
    table = {**TABLE, "trainer": {"device": "cuda"}}
    lines = [*describe(build_config(table), load_plugins(), quick=True)]
    assert any(line.startswith("note       trainer.device is 'cuda'") for line in lines) is noted


def test_a_constructor_that_fails_is_found():
    class Plugin:
        @hookimpl
        def register_observers(self):
            return [Broken]

    hooks = load_plugins()
    hooks.register(Plugin(), "broken")
    asked = build_config(TABLE | {"monitors": {"broken": {}}})
    with pytest.raises(
        PluginError, match=r"plugin 'broken'.*, Broken.__init__: KeyError: 'in the"
    ) as caught:
        build_parts(resolved_with(asked, hooks=hooks), {})
    assert str(caught.value).count("File ") == 1 and "test_dry_run.py" in str(caught.value)


def test_a_sampler_that_looks_at_the_examples_is_built_with_those_of_the_environment():
    buffer = {"sampler": {"type": "difficulty_pools", "easy_threshold": 0.9}}
    config = build_config(TABLE | {"orchestrator": TABLE["orchestrator"] | buffer})
    (label,) = (env.label for env in config.orchestrator.train.env)
    for prompt, quick in (("prompt", False), ("question", False), ("question", True)):
        fields = SimpleNamespace(fields={prompt: "abc"})
        found = {} if quick else {label: SimpleNamespace(num_examples=1, examples=[fields])}
        refused = prompt == "question" and not quick
        with pytest.raises(ConfigError, match="no field 'prompt'") if refused else nullcontext():
            build_parts(Resolved(config), found)


def test_a_prompt_that_leaves_no_token_for_a_reply_is_a_warning():
    assert [*prompt_lines(7, "abc", 8)] == ["prompt     7 tokens: 'abc'"]
    _, *warning = prompt_lines(8, "abc", 8)
    assert "seq_len = 8 this prompt leaves no token for a reply" in warning[0]


def test_an_endless_env_that_cannot_make_its_first_example_is_an_error_with_its_name():
    class Examples:
        def __getitem__(self, index):
            raise ExampleFailed("the environment cannot make example 0: SystemExit: 0")

    endless = SimpleNamespace(examples=Examples(), settings=SimpleNamespace(label="mine"))
    with pytest.raises(ConfigError, match="env 'mine': the environment cannot make example 0: Sys"):
        [*dry_run._prompt(Resolved(build_config(TABLE)), endless)]


@pytest.mark.slow
def test_args_are_checked_by_the_tasksets_own_class_and_a_prompt_is_shown():
    config = build_config(TABLE)
    assert any(
        "reverse-text: grpo, 2000 examples" in line
        for line in describe(config, load_plugins(), False)
    )
    own = {"model": "x"}
    alone = {"train": {"env": [{"id": "propose-solve", "args": {"proposer": own, "solver": own}}]}}
    with pytest.raises(ConfigError, match=r"every agent \(proposer, solver\) has a model of its"):
        [
            *describe(
                build_config(TABLE | {"orchestrator": TABLE["orchestrator"] | alone}),
                load_plugins(),
                False,
            )
        ]
    wrong = {"train": {"env": [{"id": "reverse-text", "args": {"splitt": "x"}}]}}
    with pytest.raises(ConfigError, match=r"env 'reverse-text': args .*args\.splitt"):
        [
            *describe(
                build_config(TABLE | {"orchestrator": TABLE["orchestrator"] | wrong}),
                load_plugins(),
                False,
            )
        ]
