"""Hooks that pluggy would never call are errors with plugin, distribution, fault and fix."""

import re

import numpy as np
import pytest

from prime_rl import ConfigError, PluginError, hookimpl
from prime_rl.entries import OF_OURS, OF_PLUGINS, group_meant, misspelt_groups
from prime_rl.registry.manager import Hooks, load_plugins, scope
from prime_rl.registry.offers import ALGORITHM, FILTER, LOSS, collect, select
from prime_rl.testing import make_sample

WHO = "plugin 'demo' (demo-plugin 1.2)"


def refusal(group: str = "prime_rl") -> str:
    with pytest.raises(PluginError) as caught:
        load_plugins(group)
    return str(caught.value)


def refused_offer(kind=ALGORITHM, group: str = "prime_rl") -> str:
    hooks = load_plugins(group)
    with pytest.raises(PluginError) as caught:
        collect(hooks, kind)
    return str(caught.value)


def test_a_well_behaved_plugin_loads_and_is_known_by_its_distribution(install):
    install(
        """
        @hookimpl
        def weights_published(version):
            seen.append(version)
        seen = []
        """
    )
    hooks = load_plugins()
    hooks.weights_published(3)
    assert hooks.get_plugin("demo").seen == [3]
    assert str(hooks.sources["demo"]) == "'demo' (demo-plugin 1.2)"


def test_a_hook_without_its_mark(install):
    install("def score_group(group): ...")
    assert refusal() == (
        f"{WHO}: 'score_group' has a hook's name but no @hookimpl, so it would never be called. "
        "Decorate it (an override needs it too) or rename it."
    )


def test_a_misspelled_hook(install):
    install("@hookimpl\ndef score_grup(group): ...")
    assert refusal() == f"{WHO}: 'score_grup' is not a hook; did you mean 'score_group'?"


def test_a_name_like_no_hook_lists_the_hooks(install):
    install("@hookimpl\ndef zzz(): ...")
    message = refusal()
    assert message.startswith(f"{WHO}: 'zzz' is not a hook. Hooks: register_algorithms,")
    assert "score_rollout" in message and message.endswith("weights_published.")


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        ("filter_rollout", "rollout"),
        ("observation_weights", "rollout"),
        ("batch_packed", "step"),
        ("register_algorithms", ""),
    ],
)
def test_an_async_implementation_of_a_sync_hook(install, hook, arguments):
    install(f"@hookimpl\nasync def {hook}({arguments}): ...")
    assert refusal() == (
        f"{WHO}: {hook!r} is a sync hook, so an 'async def' would never be awaited. "
        "Do model I/O in 'score_rollout' or 'score_group', which are async."
    )


@pytest.mark.parametrize("hook", ["score_rollout(rollout)", "score_group(group)"])
@pytest.mark.parametrize("word", ["def", "async def"])
def test_async_hooks_may_be_sync_or_async(install, hook, word):
    install(f"@hookimpl\n{word} {hook}: ...")
    assert load_plugins().get_plugin("demo") is not None


def test_an_argument_with_a_default(install):
    install("@hookimpl\ndef step_finished(step, metrics=None): ...")
    assert refusal() == (
        f"{WHO}: argument 'metrics' of 'step_finished' has a default, and pluggy then never passes "
        "it. Remove the default."
    )


def test_an_argument_that_the_hook_does_not_have(install):
    install("@hookimpl\ndef score_group(group, reward): ...")
    message = refusal()
    assert message.startswith(f"{WHO}: ")
    assert "score_group" in message and "reward" in message


@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_generator_that_is_no_wrapper(install, word):
    install(f"@hookimpl\n{word} score_group(group):\n    yield")
    assert refusal() == (
        f"{WHO}: 'score_group' has a 'yield', so its body would never run. A wrapper needs "
        "@hookimpl(wrapper=True). Any other hook returns its result."
    )


def test_a_wrapper_that_never_yields(install):
    install("@hookimpl(wrapper=True)\ndef score_group(group): ...")
    message = refusal()
    assert message.startswith(f"{WHO}: ") and "not a generator function" in message


def test_an_old_style_wrapper(install):
    install("@hookimpl(hookwrapper=True)\ndef score_group(group):\n    yield")
    assert refusal() == (
        f"{WHO}: 'score_group' is an old-style wrapper. Use @hookimpl(wrapper=True): its 'yield' "
        "gives the result itself."
    )


@pytest.mark.parametrize("hook", ["score_group(group): yield", "score_batch(groups): ..."])
def test_first_and_last_at_once(install, hook):
    wraps = "yield" in hook
    install(f"@hookimpl(wrapper={wraps}, tryfirst=True, trylast=True)\ndef {hook}")
    name = hook.partition("(")[0]
    assert refusal() == (
        f"{WHO}: {name!r} asks to run first and last. Leave out tryfirst or trylast."
    )


def test_a_failing_import(install):
    module = install("import no_such_thing_at_all")
    file = install.folder / "demo-plugin" / f"{module}.py"
    assert refusal() == (
        f"{WHO} failed to import: ModuleNotFoundError: No module named 'no_such_thing_at_all' "
        f"(line 2 of {file}). Fix or uninstall demo-plugin, or list 'demo' under plugins.disabled."
    )


def test_an_error_at_import_names_the_plugins_line_and_none_of_a_library(install):
    module = install("import json\njson.loads('')")
    file = install.folder / "demo-plugin" / f"{module}.py"
    message = refusal()
    assert message.startswith(f"{WHO} failed to import: JSONDecodeError: ")
    assert f" (line 3 of {file}). Fix or uninstall" in message  # line 1 is the installer's


def test_an_exit_at_import(install):
    install("import sys; sys.exit(3)")
    assert refusal().startswith(f"{WHO} failed to import: SystemExit: 3 (line 2 of ")


def test_an_exit_while_registering(install):
    install("@hookimpl\ndef register_algorithms(): raise SystemExit(3)")
    message = refused_offer()
    assert message.startswith(f"{WHO}: register_algorithms failed: SystemExit: 3 (line 3 of ")


def test_an_entry_point_to_a_missing_module(install):
    install(value="demo_plugin:missing")
    message = refusal()
    assert message.startswith(f"{WHO} failed to import: AttributeError: ")
    assert message.endswith("list 'demo' under plugins.disabled.")


@pytest.mark.parametrize("value", [" ", "demo_plugin:a b c", "demo plugin", ":name", "demo-plugin"])
def test_an_entry_point_that_can_name_nothing(install, value):
    install(value=value)
    assert refusal() == (
        f"{WHO}: its entry point in the group 'prime_rl' is {value.strip()!r}, expected a module, "
        "or a module and a name in it: my_module:my_name. Fix or uninstall demo-plugin, or list "
        "'demo' under plugins.disabled."
    )


GROUPS_MEANT = {
    "prime-rl": "prime_rl",
    "Prime_RL": "prime_rl",
    "prime_rl.plugins": "prime_rl",
    "prime_rl.command": "prime_rl.commands",
    "prime-rl.commands": "prime_rl.commands",
    "prime_rl_commands": "prime_rl.commands",
    "prime_rl.train": "prime_rl.trainer",
    "prime-rl-trainer": "prime_rl.trainer",
    **dict.fromkeys((*OF_PLUGINS, *OF_OURS, "prime_rl_mine.extensions", "console_scripts"), None),
}


@pytest.mark.parametrize("group", GROUPS_MEANT)
def test_a_group_that_nothing_reads_is_named_with_the_one_that_was_meant(install, group):
    meant = GROUPS_MEANT[group]
    assert group_meant(group) == meant
    install(group=group)
    named = [str(each) for each in misspelt_groups() if "demo-plugin" in str(each)]
    expected = (
        f"demo-plugin 1.2 has the entry point 'demo' in the group {group!r}, which nothing reads; "
        f"did you mean {meant!r}?"
    )
    assert named == ([] if meant is None else [expected])


def test_an_algorithm_in_a_group_that_nothing_reads_is_not_found_and_the_group_is_named(install):
    install(group="prime-rl")
    with pytest.raises(
        ConfigError, match=r"offers the algorithm 'mine' .* did you mean 'prime_rl'"
    ):
        select(ALGORITHM, "mine", offers={}, where="x")


def test_two_distributions_of_one_plugin_name(install):
    install(distribution="demo-one", version="1.0")
    install(distribution="demo-two", version="2.0")
    message = refusal()
    assert message.startswith("two distributions name a plugin 'demo': ")
    assert "demo-one 1.0" in message and "demo-two 2.0" in message
    assert message.endswith("Uninstall one, or list 'demo-one' under plugins.disabled.")
    plugins = load_plugins(disabled=["demo-one"])
    assert plugins.sources["demo"].distribution == "demo-two"


def test_a_disabled_plugin_is_not_even_imported(install):
    install("raise RuntimeError")
    assert load_plugins(disabled=["demo"]).get_plugin("demo") is None


@pytest.mark.parametrize(
    ("asked", "way_out"), [(0, "Upgrade the plugin"), (3, "Upgrade prime-rl-core")]
)
def test_another_contract_version(install, asked, way_out):
    install(f"prime_rl_contract = {asked}")
    assert refusal() == (
        f"{WHO} asks for contract version {asked}, this prime-rl-core speaks 1 to 2. "
        f"{way_out}, or list the plugin under plugins.disabled."
    )


@pytest.mark.parametrize("number", [1, 2])
def test_this_contract_version_and_the_one_before_load(install, number):
    install(f"prime_rl_contract = {number}")
    assert load_plugins().get_plugin("demo") is not None


def test_a_loss_in_the_orchestrators_group(install):
    install("@hookimpl\ndef register_losses(): return []")
    assert refusal() == (
        f"{WHO}: 'register_losses' is never called from the entry-point group 'prime_rl'. "
        'Offer it under [project.entry-points."prime_rl.trainer"].'
    )


def test_an_algorithm_in_the_trainers_group(install):
    install("@hookimpl\ndef register_algorithms(): return []", group="prime_rl.trainer")
    assert refusal("prime_rl.trainer") == (
        f"{WHO}: 'register_algorithms' is never called from the entry-point group "
        "'prime_rl.trainer'. Offer it under [project.entry-points.\"prime_rl\"]."
    )


# -- what a plugin offers -----------------------------------------------------------------


def offer(body: str) -> str:
    return body + "\n@hookimpl\ndef register_algorithms():\n    return [Mine]\n"


def test_two_classes_of_one_name_name_both_distributions(install):
    source = offer("class Mine(Algorithm):\n    name = 'mine'")
    install(source, plugin="one", distribution="demo-one", version="1.0")
    install(source, plugin="two", distribution="demo-two", version="2.0")
    message = refused_offer()
    assert message.startswith("algorithm 'mine' is registered twice: by plugin ")
    assert "'one' (demo-one 1.0)" in message and "'two' (demo-two 2.0)" in message
    assert message.endswith("Uninstall one, or list its plugin under plugins.disabled.")


def test_one_class_offered_twice_is_no_clash(install):
    install(
        "class Mine(Algorithm):\n    name = 'mine'\n"
        "@hookimpl\ndef register_algorithms():\n    return [Mine, Mine]\n"
    )
    assert collect(load_plugins(), ALGORITHM)["mine"].source.distribution == "demo-plugin"


def test_not_a_subclass(install):
    install(offer("Mine = dict"))
    assert refused_offer() == (
        f"{WHO}: register_algorithms must give subclasses of Algorithm, got <class 'dict'>"
    )


def test_an_instance_instead_of_a_class(install):
    install(
        "class F(Filter):\n    name = 'f'\n"
        "@hookimpl\ndef register_filters():\n    return [F(PluginConfig())]\n"
    )
    message = refused_offer(FILTER)
    assert re.fullmatch(
        re.escape(WHO) + r": register_filters must give subclasses of Filter, got <.*F object.*>",
        message,
    )


@pytest.mark.parametrize("body", ["pass", "name = ''", "name = 3"])
def test_no_name(install, body):
    install(offer(f"class Mine(Algorithm):\n    {body}"))
    assert refused_offer() == f"{WHO}: class Mine needs a class attribute 'name'"


def test_a_config_class_that_is_no_plugin_config(install):
    install(offer("class Mine(Algorithm):\n    name = 'mine'\n    config_class = dict"))
    assert refused_offer() == (
        f"{WHO}: Mine.config_class must be a subclass of PluginConfig, got <class 'dict'>"
    )


@pytest.mark.parametrize(("kind", "key"), [("algorithm", "sampling"), ("filter", "enforce")])
def test_a_setting_that_is_core_s_key(install, kind, key):
    install(
        f"class Config(PluginConfig):\n    {key}: int = 1\n"
        f"class Mine({kind.title()}):\n    name = 'mine'\n    config_class = Config\n"
        f"@hookimpl\ndef register_{kind}s():\n    return [Mine]\n"
    )
    assert refused_offer(ALGORITHM if kind == "algorithm" else FILTER) == (
        f"{WHO}: Config has a setting {key!r}, which no TOML can set: the key is core's in the "
        f"table of {kind}s. Rename it."
    )


def test_an_async_method_that_core_calls_without_await(install):
    body = "name = 'mine'\n    async def save(self, directory): ..."
    install(offer(f"class Mine(Algorithm):\n    {body}"))
    assert refused_offer() == (
        f"{WHO}: Mine.save is 'async def' and core calls it without 'await', so its body would "
        "never run. Make it a plain 'def'."
    )


def test_a_plugin_that_requires_another_core_is_flagged_once_and_loads(install, caplog):
    pytest.importorskip("packaging")
    install(requires="prime-rl-core>=7")
    for _ in range(2):
        assert "demo" in load_plugins().sources
    (line,) = caplog.messages
    assert line.startswith(f"{WHO}: it asks for prime-rl-core>=7; ") and "\n" not in line


def test_a_plugin_that_requires_this_core_is_not_flagged(install):
    install(requires="prime-rl-core[run]>=0.1; python_version > '3'")
    assert "demo" in load_plugins().sources


def test_a_registration_that_fails_is_named(install):
    module = install("@hookimpl\ndef register_algorithms():\n    raise KeyError('x')")
    file = install.folder / "demo-plugin" / f"{module}.py"
    assert refused_offer() == (
        f"{WHO}: register_algorithms failed: KeyError: 'x' (line 4 of {file}). It must give a list "
        "of subclasses of Algorithm."
    )


def test_a_registration_that_returns_nothing_is_named(install):
    install("@hookimpl\ndef register_algorithms(): ...")
    assert refused_offer().startswith(f"{WHO}: register_algorithms failed: TypeError: ")


def test_a_registration_may_be_a_generator(install):
    install(
        "class Mine(Algorithm):\n    name = 'mine'\n"
        "@hookimpl\ndef register_algorithms():\n    yield Mine\n"
    )
    assert "mine" in collect(load_plugins(), ALGORITHM)


def test_an_offered_class_is_checked_like_a_plugin_and_named_by_its_distribution(install):
    body = "def score_group(self, group): ..."
    install(offer(f"class Mine(Algorithm):\n    name = 'mine'\n    {body}"))
    assert refused_offer().startswith(f"{WHO}: 'score_group' has a hook's name but no @hookimpl")


def test_an_override_needs_the_mark_too(install):
    install(
        offer(
            "class Base(Algorithm):\n    @hookimpl\n    def score_group(self, group): ...\n"
            "class Mine(Base):\n    name = 'mine'\n    def score_group(self, group): ..."
        )
    )
    assert "(an override needs it too)" in refused_offer()


def test_losses_are_collected_from_the_trainers_group_only(install):
    install(
        "class Mine(Loss):\n    name = 'mine'\n"
        "@hookimpl\ndef register_losses():\n    return [Mine]\n",
        group="prime_rl.trainer",
    )
    assert "mine" in collect(load_plugins("prime_rl.trainer"), LOSS)
    assert "mine" not in collect(load_plugins(), LOSS)


# -- plugins that are not installed: an env's own algorithm ---------------------------------


@pytest.mark.parametrize("stream", ["advantages", "mine"])
def test_a_packed_batch_is_read_only(stream):
    class Rebinds:
        @hookimpl
        def batch_packed(self, samples):
            samples[0].set_stream(stream, np.zeros(len(samples[0]), np.float32))

    hooks = Hooks()
    hooks.register(Rebinds(), "rebinds")
    with pytest.raises(PluginError, match=f"batch_packed of rebinds replaced {stream} of a sample"):
        hooks.batch_packed(1, [make_sample()])


def test_a_scopes_own_plugin_is_checked_too():
    class Bad:
        name = "bad"

        def score_group(self, group): ...

    with pytest.raises(PluginError, match=r"plugin 'env:bad': 'score_group' has a hook's name"):
        scope("env", Hooks(), [Bad()])


def test_two_plugins_of_one_name_in_a_scope():
    class Good:
        name = "good"

    with pytest.raises(PluginError, match="env:good"):
        scope("env", Hooks(), [Good(), Good()])
