"""Who samples must fit what is trained; each refusal gives the reason and a way out."""

import pytest
from resolved_parts import resolved_with

from prime_rl import Algorithm, ConfigError, Loss, PluginConfig, RendererOffer, Source, hookimpl
from prime_rl.config.run import RunConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.manager import Hooks, load_plugins
from prime_rl_app.env_checks import check_algorithms, check_tasksets, trained_by

TEACHER = {"name": "teacher", "base_url": "http://127.0.0.1:1/v1"}


def offered(name, **attributes):
    return type(name, (Algorithm,), {"name": name, **attributes})


class Shelf(Source):
    name = "shelf"


class Past(Source):
    name = "past"
    from_policy = True
    feeds = frozenset({"rl", "ce", "ref_kl"})


class Plain(RendererOffer):
    name = "plain"
    gives_attribution = False


class Full(RendererOffer):
    name = "full"


class Average(Loss):
    name = "average"
    reads = ("advantages", "ema_logprobs")


class OfGroups(Loss):
    name = "of_groups"
    scope = "group"


class Grows(Algorithm):
    name = "grows"
    grows_groups = True

    @hookimpl
    def wanted_members(self, progress):
        return progress.max_group_size


class Plugin:
    @hookimpl
    def register_algorithms(self):
        return [
            offered("reward"),
            offered("reference", action_loss="ref_kl"),
            offered("imitate", action_loss="ce", needs_frozen_source=True),
            offered("likelihood", action_loss="ce"),
            offered("observe", needs_attribution=True),
            offered("exact", needs_temperature=1.0),
            offered("anchored", needs_initial=True),
            offered("averaged", needs_ema=True),
            offered("clipped", losses={"ppo_clip"}),
            offered("weighs", losses={"rl", "value_loss"}),
            offered("unknown", losses={"gone"}),
            offered("penalizes", losses={"rl", "ce"}),
            Grows,
        ]

    @hookimpl
    def register_sources(self):
        return [Shelf, Past]

    @hookimpl
    def register_renderers(self):
        return [Plain, Full]


def check(
    algo,
    source=None,
    renderer="full",
    env=None,
    initial=None,
    loss=None,
    ema_decay=None,
    trainer=None,
    tables=None,
    **sampling,
):
    if source is not None:
        sampling["source"] = source
    table = {"type": algo} | ({"sampling": sampling} if sampling else {})
    orchestrator = {
        "train": {"env": [{"id": "reverse-text", "name": "a", "algo": table} | (env or {})]},
        "renderer": {"name": renderer},
        "initial": initial,
    }
    config = {"model": {"name": "m"}, "max_steps": 1, "orchestrator": orchestrator}
    config |= {"trainer": {"ema_decay": ema_decay}, **(tables or {})}
    losses = installed_losses()
    losses = losses if loss is None else losses.with_rl(loss(PluginConfig()))
    hooks = Hooks()
    hooks.register(Plugin(), "plugin")
    if trainer is None:
        checked = RunConfig.model_validate(config)
        algorithms = resolved_with(checked, hooks=hooks).algorithms()
        return check_algorithms(checked, hooks, losses, algorithms)
    checked = RunConfig.model_validate(config | {"trainer": trainer})
    losses = Components.load(checked.trainer, load_plugins(TRAINER_GROUP))
    algorithms = resolved_with(checked, hooks=hooks).algorithms()
    check_algorithms(checked, hooks, losses, algorithms)


def refusal(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("algo", "source"),
    [
        ("reward", None),
        ("reward", "policy"),
        ("reference", None),
        ("imitate", TEACHER),
        ("imitate", {"type": "shelf"}),
        ("likelihood", "policy"),
        ("likelihood", TEACHER),
        ("reward", {"type": "past"}),
        ("reference", {"type": "past"}),
        ("observe", None),
    ],
)
def test_what_fits(algo, source):
    check(algo, source)


@pytest.mark.parametrize(("algo", "component"), [("reward", "rl"), ("reference", "ref_kl")])
def test_a_frozen_model_cannot_feed_a_ratio(algo, component):
    assert refusal(algo, TEACHER) == (
        f"env 'a': algorithm {algo!r} trains the {component} component, whose importance ratio "
        "needs the policy's own sampling logprobs, and sampling.source is the frozen model "
        "'teacher'. Leave sampling.source at 'policy', or use an algorithm that imitates, such as "
        "supervised fine-tuning."
    )


@pytest.mark.parametrize("source", [None, "policy"])
def test_an_algorithm_that_imitates_the_policy_itself_is_refused(source):
    assert refusal("imitate", source) == (
        "env 'a': algorithm 'imitate' imitates its source, and sampling.source is 'policy': "
        "training on the policy's own tokens would teach it nothing. Set sampling.source to a "
        "frozen model (name and base_url) or to a source of demonstrations "
        '({ type = "dataset", ... }).'
    )


def test_imitating_past_rollouts_of_the_policy_is_refused_too():
    assert refusal("imitate", {"type": "past"}) == (
        "env 'a': algorithm 'imitate' imitates its source, and source 'past' gives rollouts "
        "of the policy itself. Use a source of demonstrations or a frozen model."
    )


def test_a_temperature_that_the_algorithm_cannot_learn_at():
    check("exact")
    assert refusal("exact", env={"sampling": {"temperature": 0.7}}) == (
        "env 'a': algorithm 'exact' can learn at a sampling temperature of 1 only, got 0.7. Set "
        "orchestrator.train.sampling.temperature, or the env's own."
    )


@pytest.mark.parametrize("key", ["group_size", "max_turns"])
def test_keys_without_effect_beside_a_source_are_refused(key):
    assert f"{key} is set, and this env samples nothing" in refusal(
        "imitate", {"type": "shelf"}, env={key: 4}
    )


def test_demonstrations_feed_ce_only():
    assert refusal("reward", {"type": "shelf"}) == (
        "env 'a': algorithm 'reward' trains the rl component, which compares with sampling "
        "logprobs, and source 'shelf' has none: its tokens were not sampled from the policy. Use "
        "an algorithm that imitates, such as supervised fine-tuning, or another source."
    )


def test_attribution_that_the_renderer_does_not_give():
    check("reward", renderer="plain")
    assert refusal("observe", renderer="plain") == (
        "env 'a': algorithm 'observe' tells tokens apart by their message's role and body, and "
        "renderer 'plain' does not tell it. Set orchestrator.renderer.name to the renderer of the "
        "model's family."
    )


def test_a_source_that_nobody_offers():
    assert refusal("imitate", {"type": "shelff"}).endswith("Did you mean 'shelf'?")


def test_settings_of_a_source():
    assert "env 'a': algorithm 'imitate': sampling.source (source 'shelf').zz: unknown key" in (
        refusal("imitate", {"type": "shelf", "zz": 1})
    )


def test_how_to_ask_needs_somebody_to_ask():
    assert "sampling.source is none. Leave it out." in refusal("reward", client="chat")


def test_the_settings_class_is_the_default_one():
    assert Shelf.config_class is PluginConfig


COLOCATED = {"deployment": {"colocated": True}}
ELSEWHERE = {"inference": {"base_url": "http://127.0.0.1:1/v1"}}


@pytest.mark.parametrize(
    ("tables", "key"),
    [(COLOCATED, "deployment.colocated"), (ELSEWHERE, "inference.base_url")],
)
def test_first_weights_where_the_run_starts_no_engine_for_them(tables, key):
    check("anchored")
    check("anchored", initial=TEACHER, tables=tables)
    assert refusal("anchored", tables=tables) == (
        "env 'a': algorithm 'anchored' asks an engine with the weights that the run began with, "
        f"and with {key} the run starts none. Serve them (prime-rl serve m), and set "
        "orchestrator.initial to the model's name and base_url."
    )


def test_an_endpoint_of_the_first_weights_that_nothing_reads_is_refused():
    assert refusal("reward", initial=TEACHER) == (
        "orchestrator.initial: no env's algorithm reads it. Leave it out."
    )


def test_an_average_of_the_weights_needs_a_decay_and_a_loss_that_reads_it():
    check("reward", loss=Average, ema_decay=0.9)
    assert refusal("reward", loss=Average) == (
        "env 'a': algorithm 'reward' trains the loss 'average', which reads ema_logprobs, and "
        "trainer.ema_decay is not set. Set it, 0.99 for example."
    )
    assert refusal("reward", ema_decay=0.9) == (
        "trainer.ema_decay: no env reads ema_logprobs or host.ema. Leave it out."
    )


def test_a_loss_that_an_algorithm_names_beside_its_own_may_read_the_average(monkeypatch):
    monkeypatch.setattr(installed_losses()["ce"].cls, "reads", ("ema_logprobs",))
    trainer = {"loss": {"type": "default"}}
    check("penalizes", trainer=trainer | {"ema_decay": 0.9})
    assert refusal("penalizes", trainer=trainer) == (
        "env 'a': algorithm 'penalizes' trains the loss 'ce', which reads ema_logprobs, "
        "and trainer.ema_decay is not set. Set it, 0.99 for example."
    )


@pytest.mark.parametrize(
    ("declared", "action_loss", "trained"),
    [
        ((), "rl", ["rl"]),
        (("rl", "b", "a"), "rl", ["rl", "a", "b"]),
        (("c", "b"), "c", ["c", "b"]),
        (("b", "a"), "rl", ["rl"]),  # written for [trainer.loss] type b or a
    ],
)
def test_what_an_algorithm_trains(declared, action_loss, trained):
    algorithm = offered("any", losses=declared, action_loss=action_loss)(PluginConfig())
    assert trained_by(algorithm) == trained


@pytest.mark.parametrize("key", ["inference.base_url", "deployment.colocated"])
def test_an_algorithm_that_reads_the_average_needs_a_decay_and_an_engine_of_the_run(key):
    check("averaged", ema_decay=0.9)
    assert refusal("averaged") == (
        "env 'a': algorithm 'averaged' reads host.ema, and trainer.ema_decay is not set. Set it, "
        "0.99 for example."
    )
    table, name = key.split(".")
    value = True if name == "colocated" else ["http://a:1"]
    assert refusal("averaged", ema_decay=0.9, tables={table: {name: value}}) == (
        f"env 'a': algorithm 'averaged' reads host.ema. A run with {key} starts no engine for it."
    )


def test_an_algorithm_that_needs_a_loss_does_not_train_with_another():
    check("clipped", trainer={"loss": {"type": "ppo_clip"}})
    said = refusal("clipped", trainer={"loss": {"type": "default"}})
    assert "'clipped' needs the loss ppo_clip, and trainer.loss.type is 'default'" in said
    assert "Set trainer.loss.type to 'ppo_clip'" in said
    check("weighs", trainer={"loss": {"type": "default"}})
    assert "trains the loss 'gone'." in refusal("unknown", trainer={"loss": {"type": "default"}})


@pytest.mark.parametrize(
    ("algo", "loss", "is_read"),
    [
        ("weighs", "value_loss", True),
        ("reference", "ref_kl", True),
        ("reward", "ppo_clip", False),
        ("reward", "ce", False),
        ("reference", "value_loss", False),
    ],
)
def test_a_table_of_a_loss_that_no_algorithm_trains_is_refused(algo, loss, is_read):
    trainer = {"loss": {"type": "default"}, "losses": {loss: {}}}
    if is_read:
        return check(algo, trainer=trainer)
    assert f"trainer.losses.{loss}: no env's algorithm trains this" in refusal(
        algo, trainer=trainer
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            {"judge": {"harness": {"id": "in-proces"}}},
            "args.judge.harness.id: no harness 'in-proces': there is no module 'in_proces'. "
            "Did you mean 'in-process'?",
        ),
        (
            {"critic": {"harness": {"id": "nowhere"}}},
            "args.critic.harness.id: no harness 'nowhere'",
        ),
        ({"critic": {"harness": {"id": 7}}}, "args.critic.harness: expected a table with the id"),
        ({"critic": {"harness": {"id": ""}}}, "args.critic.harness: expected a table with the id"),
        (
            {"judges": [{}, {"agent": {"harness": {"id": "no where"}}}]},
            "args.judges.1.agent.harness.id: no harness 'no where'",
        ),
        ({"judge": {"harness": {"id": "in-process"}}}, None),
        ({"judge": {"harness": "wood"}, "harness": {"weight": 3}}, None),  # of another kind
    ],
)
@pytest.mark.parametrize("part", ["train", "eval"])
def test_the_harness_of_an_env_s_agent_is_looked_for_before_the_start(part, args, said):
    table = {"train": {"env": [{"id": "reverse-text"}]}}
    table |= {part: {"env": [{"id": "reverse-text", "args": args}]}}
    run = {"model": {"name": "tiny"}, "max_steps": 1, "orchestrator": table}
    config = RunConfig.model_validate(run)
    if said is None:
        check_tasksets(config, [])
        return
    with pytest.raises(ConfigError) as error:
        check_tasksets(config, [])
    assert str(error.value).startswith(f"orchestrator.{part}.env.0.{said}"), error.value


def test_a_harness_that_is_not_installed_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("prime_rl_app.env_checks.find_spec", lambda module: None)
    env = {"id": "reverse-text", "harness": {"id": "program"}}
    run = {"model": {"name": "tiny"}, "max_steps": 1, "orchestrator": {"train": {"env": [env]}}}
    with pytest.raises(ConfigError, match=r"no module 'program'\. pip install prime-rl-agents"):
        check_tasksets(RunConfig.model_validate(run), [])


@pytest.mark.parametrize(
    ("algo", "env", "tables", "said"),
    [
        ("grows", {}, {}, "group_size = 8 is the limit. Set max_group_size to more, such as 32"),
        ("grows", {"group_size": 4}, {}, "group_size = 4 is the limit"),
        ("grows", {"max_group_size": 4}, {}, "max_group_size = 4 is less than group_size = 8"),
        ("grows", {"max_group_size": 8}, {}, "group_size = 8 is the limit"),
        ("reward", {"max_group_size": 16}, {}, "env 'a': max_group_size = 16 is read by no plugin"),
    ],
)
def test_a_limit_of_groups_that_cannot_be_meant(algo, env, tables, said):
    assert said in refusal(algo, env=env, tables=tables)


def test_a_limit_of_all_groups_that_nothing_reads():
    table = {"id": "reverse-text", "name": "a", "algo": {"type": "reward"}}
    orchestrator = {"train": {"env": [table]}, "max_group_size": 16, "renderer": {"name": "full"}}
    with pytest.raises(ConfigError, match="max_group_size = 16 is read by no plugin"):
        check("reward", tables={"orchestrator": orchestrator})
    table["algo"] = {"type": "grows"}
    check("grows", tables={"orchestrator": orchestrator})


def test_a_group_may_grow_up_to_a_limit():
    check("grows", env={"max_group_size": 9})
    check("grows", env={"group_size": 2, "max_group_size": 4096})


def test_groups_that_may_not_be_divided_are_refused_before_the_run():
    def run_with(algo):
        env = {"id": "reverse-text", "name": "a", "algo": {"type": algo}, "max_group_size": 16}
        if algo != "grows":
            del env["max_group_size"]
        partial = {"partial_groups": {"at_least": 2}}
        orchestrator = {"train": {"env": [env]}, "renderer": {"name": "full"}} | partial
        return {"orchestrator": orchestrator, "trainer": {"micro_batch_tokens": 16384}}

    check("reward", tables=run_with("reward"))
    said = refusal("grows", tables=run_with("grows"))
    assert "env 'a': a plugin decides how many members a group has" in said
    said = refusal("reward", tables=run_with("reward"), loss=OfGroups)
    assert "trains the loss 'of_groups', which compares whole groups" in said


def test_a_server_elsewhere_does_not_know_the_engine_of_earlier_versions():
    duel = {"id": "reversal-duel", "agents": {"black": {"model": "past"}}}
    check("reward", env=duel)
    assert refusal("reward", env=duel | {"address": ["tcp://127.0.0.1:5999"]}) == (
        "env 'a': an earlier version plays agent 'black', and a server of serve-env does not know "
        "its engine, which this run starts. Leave address out."
    )
