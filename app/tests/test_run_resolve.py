"""What can be known to fail before a process starts, fails before a process starts."""

import sys
from collections import Counter

import pytest
from resolved_parts import resolved_with

from prime_rl import (
    Algorithm,
    ConfigError,
    Filter,
    Monitor,
    Observer,
    PluginConfig,
    PluginError,
    TrainerObserver,
    hookimpl,
)
from prime_rl.config.run import DeploymentConfig, RunConfig
from prime_rl.registry.components import installed_losses
from prime_rl.registry.import_path import import_function
from prime_rl.registry.manager import Hooks, load_plugins
from prime_rl_app import placement, resolve
from prime_rl_app.config import build_config
from prime_rl_app.env_checks import check_algorithms, check_envs
from prime_rl_app.models import build_model_maker
from prime_rl_app.placement import lay_out
from prime_rl_app.resolve import (
    Resolved,
    build_engine,
    check,
    check_engine,
    check_filters,
)


def config(orchestrator=None, **tables):
    given = {"train": {"env": [{"id": "reverse-text", "name": "a"}]}} | (orchestrator or {})
    tables = {"model": {"name": "owner/model"}, "max_steps": 1} | tables
    return build_config({"orchestrator": given, **tables})


def refusal(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        check(config(*args, **kwargs))
    return str(caught.value)


def test_a_sound_config_passes():
    assert check(config()).hooks.has_plugin("app")


def test_each_part_of_a_run_is_made_once(monkeypatch, tmp_path):
    """From the check to the start: what the check made is handed on."""
    made = Counter()
    monkeypatch.chdir(tmp_path)
    for name in ("build_engine", "build_launcher", "algorithm_of", "make_tuning", "make_optimizer"):
        monkeypatch.setattr(resolve, name, counted(getattr(resolve, name), name, made))
    monkeypatch.setattr(resolve.Components, "load", counted(resolve.Components.load, "load", made))
    monkeypatch.setattr(resolve, "load_plugins", counted(load_plugins, "load_plugins", made))
    envs = [{"id": "reverse-text", "name": "a"}, {"id": "reverse-text", "name": "b"}]
    resolved = check(config({"train": {"env": envs}}))
    layout = lay_out(resolved)
    places = resolved.launcher.place(layout.tasks, tmp_path, print)
    placement.plan(resolved, layout, places)
    assert made == {
        "load_plugins": 2,  # of the orchestrator's side and of the trainer's
        "build_engine": 1,
        "build_launcher": 1,
        "algorithm_of": 2,  # one for each env
        "make_tuning": 1,
        "make_optimizer": 1,
        "load": 1,
    }


def counted(function, name, made):
    def call(*args, **kwargs):
        made[name] += 1
        return function(*args, **kwargs)

    return call


def test_no_training_env():
    assert refusal({"train": {}}) == (
        "orchestrator.train.env: the run has no training environment. Add a table "
        "[[orchestrator.train.env]] with an id."
    )


def test_everything_that_is_wrong_with_plugins_is_reported_at_once():
    lines = refusal(
        {"sampler": {"type": "difficulty_pool"}, "algo": {"type": "grpo", "nope": 1}},
        trainer={"optim": {"type": "adamx"}},
        view={"type": "terminal", "nope": 1},
        ckpt={"best": "eval/a/x"},
    ).splitlines()
    starts = ("env 'a'", "orchestrator.sampler", "ckpt.best", "view", "trainer.optim.type")
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_a_batch_that_groups_do_not_divide():
    assert refusal({"batch_size": 12, "group_size": 8}) == (
        "env 'a': group_size 8 does not divide orchestrator.batch_size 12. Make the batch a "
        "multiple of every group size."
    )
    envs = {"train": {"env": [{"id": "reverse-text", "name": "a"}, {"id": "b", "group_size": 5}]}}
    assert refusal(envs).startswith("env 'b': group_size 5 does not divide")


def test_more_minibatches_than_a_batch_has_groups():
    assert refusal({"batch_size": 32, "group_size": 8}, trainer={"minibatches": 5}) == (
        "trainer.minibatches: a batch of 32 rollouts has at most 4 groups, which are not split, "
        "so it cannot have 5 minibatches. Lower it, or raise orchestrator.batch_size."
    )
    check(config({"batch_size": 32, "group_size": 8}, trainer={"minibatches": 4}))
    source = {"type": "sft", "sampling": {"source": {"type": "dataset", "path": "rollouts.jsonl"}}}
    envs = {"train": {"env": [{"id": "reverse-text", "algo": source}]}}
    check_envs(config({"batch_size": 32, **envs}, trainer={"minibatches": 32}))  # of one rollout


def test_a_group_of_one_under_a_group_relative_algorithm():
    assert refusal({"group_size": 1}) == (
        "env 'a': algorithm 'grpo' credits a rollout relative to its siblings, so with "
        "group_size = 1 every advantage is zero and nothing is learned. Set group_size to 2 or "
        "more."
    )
    envs = {
        "train": {
            "env": [
                {"id": "reverse-text", "name": "a", "group_size": 1, "algo": {"type": "max_rl"}}
            ]
        }
    }
    assert refusal(envs).startswith("env 'a': algorithm 'max_rl' credits")


def test_two_envs_of_one_name():
    twice = [{"id": "reverse-text", "name": "a"}, {"id": "reverse-text", "name": "a"}]
    assert refusal({"train": {"env": twice}}) == (
        "orchestrator.train.env: 2 envs are called 'a'. Give each its own name."
    )
    assert refusal(
        {
            "eval": {
                "env": [{"id": "reverse-text", "name": "a"}, {"id": "reverse-text", "name": "a"}]
            }
        }
    ).startswith("orchestrator.eval.env")


def test_a_training_env_and_a_held_out_one_may_share_a_name():
    check(config({"eval": {"env": [{"id": "reverse-text", "name": "a"}]}}))


@pytest.mark.parametrize("name", ["agg", "all", "effective"])
def test_names_that_metrics_use(name):
    envs = {"train": {"env": [{"id": "reverse-text", "name": name}]}}
    assert refusal(envs) == f"orchestrator.train.env: the name {name!r} is taken by metrics"


def test_an_unknown_algorithm_names_the_installed_ones_and_the_package():
    message = refusal({"algo": {"type": "next_one"}})
    assert message.startswith("env 'a': algo: no installed plugin offers the algorithm 'next_one'")
    assert "max_rl, mt_grpo, online_dpo" in message
    assert message.endswith("(by convention prime-rl-next-one, if there is one).")


def test_an_unknown_key_of_the_algorithm():
    assert refusal({"algo": {"type": "grpo", "beta": 0.1}}) == (
        "env 'a': algo (algorithm 'grpo').beta: unknown key; known here: length_penalty"
    )


def test_an_envs_own_algorithm_counts():
    envs = {
        "train": {
            "env": [
                {"id": "reverse-text", "name": "a"},
                {"id": "reverse-text", "name": "b", "algo": {"type": "grpoo"}},
            ]
        }
    }
    assert refusal(envs).endswith("Did you mean 'grpo'?")


def test_filters_by_slot():
    slot = {"pre_batch_filters": [{"type": "gibberish", "vocab": 3}]}
    assert refusal(slot) == (
        "orchestrator.pre_batch_filters (filter 'gibberish').vocab: unknown key; did you mean "
        "'vocab_size'?"
    )
    unknown = {"post_batch_filters": [{"type": "giberish"}]}
    assert refusal(unknown).startswith(
        "orchestrator.post_batch_filters: no installed plugin offers the filter 'giberish'"
    )
    twice = {"post_batch_filters": [{"type": "gibberish"}, {"type": "gibberish"}]}
    assert refusal(twice) == (
        "orchestrator.post_batch_filters: filter 'gibberish' is listed 2 times"
    )


@pytest.mark.parametrize(
    ("tables", "starts"),
    [
        ({"orchestrator": {"sampler": {"type": "x"}}},
         "orchestrator.sampler.type: no installed plugin offers the sampler 'x'"),
        ({"orchestrator": {"renderer": {"name": "x!"}}},
         "orchestrator.renderer.name: no installed plugin offers the renderer 'x!'"),
        ({"view": {"type": "x"}}, "view: no installed plugin offers the view 'x'"),
        ({"view": {"width": 3}}, "view (view 'terminal').width: unknown key"),
        ({"monitors": {"x": {}}}, "monitors.x: no installed plugin offers the monitor 'x'"),
        ({"observers": {"x": {}}}, "observers.x: no installed plugin offers the observer 'x'"),
        ({"observers": {"evals": {"x": 1}}}, "observers.evals (observer 'evals').x: unknown key"),
        ({"monitors": {"file": {"x": 1}}}, "monitors.file (monitor 'file').x: unknown key"),
        ({"inference": {"engine": "x"}}, "inference.engine: no installed plugin offers the engine"),
        ({"trainer": {"loss": {"type": "x"}}}, "trainer.loss: no installed plugin offers the loss"),
        ({"trainer": {"loss": {"zz": 1}}}, "trainer.loss (loss 'default').zz: unknown key"),
        ({"trainer": {"optm": {}}}, "trainer.optm: unknown key; did you mean 'optim'?"),
        ({"trainer": {"token_exprot": {}}},
         "trainer.token_exprot: no installed plugin offers the trainer_observer 'token_exprot' "
         "(installed: bad_steps, console, device_usage, disk, loss_checks, slow_steps, step_file, "
         "token_export). Did you"),
        ({"trainer": {"token_export": {"zz": 1}}},
         "trainer.token_export (trainer_observer 'token_export').zz: unknown key"),
        ({"trainer": {"token_export": {"enabled": True}},
          "plugins": {"disabled": ["observers"]}},
         "trainer.token_export: no installed plugin offers the trainer_observer 'token_export' "
         "(installed: none). prime-rl-observers is installed and brings it, but is disabled"),
        ({"trainer": {"lora": {"zz": 1}}}, "trainer.lora (tuning 'lora').zz: unknown key"),
        ({"trainer": {"lora": {}}, "plugins": {"disabled": ["lora"]}},
         "trainer.lora: no installed plugin offers the tuning 'lora' (installed: bad_steps, "
         "console, device_usage, disk, loss_checks, slow_steps, step_file, token_export). "
         "prime-rl-lora is installed and brings it, but is disabled"),
        ({"inference": {"portt": 1}},
         "inference.portt: unknown key; the engine's own settings go into [inference.embedded]"),
        ({"inference": {"embedded": {"zz": 1}}}, "inference.embedded (engine 'embedded').zz: unkn"),
        ({"inference": {"vllm": {"zz": 1}}}, "inference.vllm: has the settings"),
        ({"inference": {"embedded": 3}}, "inference.embedded: expected a table, got 3"),
        ({"model": {"name": "owner/model", "zz": 1}}, "model.zz: unknown key of a checkpoint"),
        ({"model": {"name": "tiny-reverse", "zz": 1}}, "model (model 'tiny-reverse').zz: unknown"),
    ],
)  # fmt: skip
def test_names_and_settings_of_every_other_plugin(tables, starts):
    assert refusal(tables.pop("orchestrator", None), **tables).startswith(starts)


@pytest.mark.parametrize(
    ("way", "tables", "where"),
    [
        ("gloo", {"trainer": {"lora": {}}}, "trainer.lora"),
        ("nccl", {"deployment": {"colocated": True}}, "deployment.colocated"),
        ("gloo", {"deployment": {"colocated": True}}, "deployment.colocated"),
        ("ipc", {"trainer": {"lora": {}}}, "trainer.lora"),
        ("nccl", {"trainer": {"device": "cpu"}}, "trainer.device"),
    ],
)
def test_weights_that_cannot_go_from_memory_to_memory(way, tables, where):
    message = refusal(weight_broadcast={"type": way}, **tables)
    assert message.startswith(f"weight_broadcast.type is '{way}', which does not go with {where}: ")


def test_weights_go_through_memory_that_two_processes_on_one_gpu_share():
    tables = {"weight_broadcast": {"type": "ipc"}, "deployment": {"colocated": True}}
    assert check(config(**tables)).hooks.has_plugin("app")


def test_weights_are_not_rounded_for_an_engine_that_would_not_round_them():
    rounded = {"publish_dtype": "bfloat16"}
    assert refusal(trainer=rounded).startswith(
        "trainer.publish_dtype is 'bfloat16', and inference.embedded.dtype is 'float32': "
    )
    in_both = config(trainer=rounded, inference={"embedded": {"dtype": "bfloat16"}})
    assert check(in_both).hooks.has_plugin("app")


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "tiny-revers", "outputs/nope/weights"]
)
def test_no_such_model(name):
    message = refusal(model={"name": name})
    assert message.startswith(
        f"model.name: {name!r} is no folder, no hub id (owner/name), and no model that an "
        "installed plugin makes (those are: "
    )
    assert "tiny-reverse" in message


def test_a_folder_that_is_no_model(tmp_path):
    assert refusal({"renderer": {"name": "qwen3"}}, model={"name": str(tmp_path)}) == (
        f"model.name: {tmp_path} has no config.json; expected a Hugging Face folder"
    )
    (tmp_path / "config.json").write_text("{}")
    assert build_model_maker(config(model={"name": str(tmp_path)}), Hooks()) is None


class Loop(Observer):
    name = "loop"

    @staticmethod
    def check(config):
        raise ConfigError(f"loop saw {config.max_steps} step")


class Lines(Monitor):
    name = "lines"

    @staticmethod
    def check(config):
        raise ConfigError(f"lines saw {config.max_steps} step")

    def log(self, step, metrics): ...


class Rows(TrainerObserver):
    name = "rows"

    @staticmethod
    def check(config):
        raise ConfigError(f"rows saw {config.max_steps} step")


class Watching:
    @hookimpl
    def register_observers(self):
        return [Loop, Lines, Rows]


@pytest.fixture
def watching(monkeypatch):
    """Names the plugin of the three classes above under the given entry-point groups."""

    def install(*groups):
        def load(group="prime_rl", *, disabled=()):
            hooks = Hooks(group)
            installed = load_plugins(group, disabled=disabled)
            hooks.sources |= installed.sources
            for name, plugin in installed.list_name_plugin():
                hooks.register(plugin, name)
            if group in groups:
                hooks.register(Watching(), "watching")
            return hooks

        monkeypatch.setattr(resolve, "load_plugins", load)

    return install


def test_every_observer_that_takes_part_may_refuse_the_config(watching):
    watching("prime_rl", "prime_rl.trainer")
    assert refusal().splitlines() == ["loop saw 1 step", "rows saw 1 step"]
    with_monitor = refusal(monitors={"lines": {}}).splitlines()
    assert with_monitor == ["lines saw 1 step", "loop saw 1 step", "rows saw 1 step"]


def test_an_observer_that_no_process_would_load_is_refused(watching):
    watching("prime_rl")
    with pytest.raises(PluginError, match="the TrainerObserver Rows would never run"):
        check(config())
    with pytest.raises(PluginError, match="the TrainerObserver Rows would never run"):
        check(config(plugins={"disabled": ["wandb"]}))  # of another distribution


def test_a_disabled_plugin_offers_nothing():
    message = refusal(plugins={"disabled": ["grpo"]})
    assert message.startswith("env 'a': algo: no installed plugin offers the algorithm 'grpo'")


# -- with plugins of our own ------------------------------------------------------------------


class Lone(Algorithm):
    name = "lone"


class Level(PluginConfig):
    level: int = 0


class Noisy(Filter):
    name = "noisy"
    config_class = Level

    @hookimpl
    def filter_rollout(self, rollout, group):
        return None


class Brings:
    @hookimpl
    def register_algorithms(self):
        return [Lone]

    @hookimpl
    def register_filters(self):
        return [Noisy]


@pytest.fixture
def hooks():
    hooks = Hooks()
    hooks.register(Brings(), "brings")
    return hooks


def test_a_group_of_one_is_fine_where_credit_is_not_relative(hooks):
    asked = config({"group_size": 1, "algo": {"type": "lone"}})
    algorithms = resolved_with(asked, hooks=hooks).algorithms()
    check_algorithms(asked, hooks, installed_losses(), algorithms)


def test_enforce_is_cores_and_the_rest_the_filters(hooks):
    slots = {"pre_batch_filters": [{"type": "noisy", "enforce": False, "level": 3}]}
    check_filters(config(slots | {"post_batch_filters": []}), hooks)


def test_an_engine_that_is_not_installed(hooks):
    with pytest.raises(ConfigError, match=r"the engine 'embedded' \(installed: none\)"):
        build_engine(config(), hooks)


def test_a_row_that_cannot_hold_a_sample():
    assert refusal(trainer={"micro_batch_tokens": 100}, seq_len=128) == (
        "trainer.micro_batch_tokens: a row of 100 tokens cannot hold a sample of seq_len = 128. "
        "Raise it to seq_len or more, or leave it out."
    )


def test_a_bound_that_cannot_hold_a_group():
    assert refusal({"max_inflight_rollouts": 4}) == (
        "orchestrator.max_inflight_rollouts: 4 cannot hold one group of 8. Raise it, or lower "
        "group_size."
    )


def test_a_key_that_asks_for_an_observer_names_its_package():
    without = {"plugins": {"disabled": ["evals", "tools"]}, "view": {"type": "lines"}}
    held_out = {"eval": {"env": [{"id": "reverse-text", "name": "a"}]}}
    assert refusal(held_out, **without) == (
        "orchestrator.eval.env: no installed observer reads it (installed: batch_metrics, "
        "checkpoint_metrics, engine_metrics, heartbeat, hook_watch, save_rollouts, watchdog). "
        "Install the package that brings one: pip install prime-rl-evals"
    )
    check(config(**without))
    without["plugins"] = {"disabled": ["app"]}
    message = refusal({"save_rollouts": True}, **without)
    assert message.startswith("orchestrator.save_rollouts: no installed observer reads it")
    assert "the package that brings one: pip install prime-rl-app" in message


def test_the_package_of_the_defaults_can_be_disabled_and_core_cannot(monkeypatch):
    check(config(plugins={"disabled": ["prime-rl"]}))  # its defaults were taken before
    monkeypatch.setenv("PRIME_RL_DISABLE", "prime-rl")
    message = refusal()
    assert "inference.engine: no engine is set" in message
    assert "Set inference.engine (installed: " in message
    monkeypatch.delenv("PRIME_RL_DISABLE")
    message = refusal(plugins={"disabled": ["prime-rl-core"]})
    assert message.startswith("plugins.disabled: no installed plugin is called 'prime-rl-core'")


def test_a_disabled_plugin_that_is_not_there():
    message = refusal(plugins={"disabled": ["cor"]})
    assert message.startswith("plugins.disabled: no installed plugin is called 'cor' (installed: ")
    assert "app" in message


SHAPING = """
temperature top_k top_p min_p seed max_tokens max_completion_tokens n best_of min_tokens logit_bias
logits_processors bad_words allowed_token_ids stop stop_token_ids frequency_penalty presence_penalty
repetition_penalty length_penalty response_format guided_decoding guided_json guided_regex
guided_choice guided_grammar guided_whitespace_pattern guided_decoding_backend structured_outputs
json_schema regex ebnf grammar use_beam_search thinking_token_budget truncate_prompt_tokens
structural_tag lora_request stop_regex
repetition_detection tool_choice tools typical_p top_a epsilon_cutoff mirostat_tau dynatemp_range
no_repeat_ngram_size suppress_tokens forced_eos_token_id min_new_tokens custom_logit_processor
vllm_xargs extra_args sampling_params extra_body logprobs top_logprobs Top-P
"""


@pytest.mark.parametrize("key", SHAPING.split())
def test_training_samples_the_whole_distribution(key):
    with pytest.raises(ValueError, match=f"{key} would shape or replace the distribution"):
        config(
            {
                "train": {
                    "env": [{"id": "reverse-text", "name": "a"}],
                    "sampling": {"extra_body": {key: 1}},
                }
            }
        )


def test_what_would_shape_the_distribution_is_named_with_the_place_to_set_it():
    body = {"response_format": {"type": "json_object"}, "ignore_eos": True, "max_tokens": 5}
    sampling = {"extra_body": body}
    with pytest.raises(ValueError) as caught:
        config({"train": {"env": [{"id": "reverse-text", "sampling": sampling}]}})
    assert (
        "max_tokens, response_format would shape or replace the distribution that the trainer has "
        "to reproduce. Instead of max_tokens: set sampling.max_completion_tokens; Instead of "
        "response_format: ask for the format in the prompt, and reward it"
    ) in str(caught.value)


@pytest.mark.parametrize(
    "key",
    ["ignore_eos", "skip_special_tokens", "chat_template_kwargs", "reasoning_effort", "priority",
     "request_id", "service_tier", "provider", "user", "return_token_ids"],
)  # fmt: skip
def test_what_leaves_the_distribution_alone_is_passed_on(key):
    sampling = {"extra_body": {key: 1}}
    made = config({"train": {"env": [{"id": "reverse-text", "sampling": sampling}]}})
    assert made.orchestrator.train.env[0].sampling.extra_body == {key: 1}


def test_a_taskset_that_is_not_there_is_named_with_the_nearest():
    assert refusal({"train": {"env": [{"id": "reverse-txt"}]}}) == (
        "orchestrator.train.env.0.id: no taskset 'reverse-txt': there is no module 'reverse_txt'. "
        "Did you mean 'reverse-text'?"
    )
    assert refusal({"train": {"env": [{"id": "nope"}]}}).endswith("Install its package.")


def test_a_run_name_is_no_path():
    with pytest.raises(ValueError, match=r"run\.name"):
        config(run={"name": "../elsewhere"})


def seated(*agents, id="propose-solve", **env):
    algo = {"type": "hierarchical_grpo", "episode_agents": agents}
    return {"train": {"env": [{"id": id, "name": "a", "algo": algo} | env]}}


def test_an_agent_that_the_env_lacks():
    assert refusal(seated("solver", id="reverse-text")) == (
        "env 'a': algo 'hierarchical_grpo': episode_agents names 'solver', and the env has "
        "'agent'. Name agents of the env, or use grpo if it has only one."
    )
    fixed = {"solver": {"model": "other"}}
    assert "and the env has 'proposer'." in refusal(seated("solver", args=fixed))
    assert check(config(seated("proposer", "solver"))).hooks.has_plugin("app")


def test_algorithms_that_check_no_agents_import_no_taskset(monkeypatch):
    monkeypatch.setattr("prime_rl_app.env_checks.find_agents", pytest.fail)
    check(config())


def test_a_launcher_of_one_machine_refuses_several_nodes_of_the_trainer():
    text = refusal(deployment={"trainer_nodes": 2}, trainer={"num_ranks": 2})
    assert "deployment.trainer_nodes is 2, and launcher 'local' starts processes on this" in text


@pytest.mark.parametrize("seed", [2**63, 2**64, -1])
def test_a_seed_that_no_generator_takes_is_refused(seed):
    with pytest.raises(ConfigError, match=r"^seed: Input should be"):
        config(seed=seed)
    assert config(seed=2**63 - 1).seed == 2**63 - 1


@pytest.fixture
def beside_script(tmp_path, monkeypatch):
    """A folder with modules that is on the path of this process only, as that of a script is."""
    (tmp_path / "letters_beside.py").write_text("")
    (tmp_path / "harness_beside").mkdir()  # without __init__.py: a namespace package
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("table", "where", "module"),
    [
        ({"train": {"env": [{"id": "letters-beside"}]}}, "train.env.0.id", "letters_beside"),
        (
            {"train": {"env": [{"id": "reverse-text", "harness": {"id": "harness-beside"}}]}},
            "train.env.0.harness.id",
            "harness_beside",
        ),
        (
            {
                "train": {
                    "env": [{"id": "reverse-text"}],
                    "harness": {"id": "owner/harness-beside@1"},
                }
            },
            "train.harness.id",
            "harness_beside",
        ),
    ],
)
def test_a_module_that_the_processes_of_the_run_would_not_find_is_refused(
    beside_script, table, where, module
):
    text = refusal(table)
    assert text.startswith(f"orchestrator.{where}: module '{module}' of ")
    assert f"is in {beside_script}, which is on the path of this process only" in text
    assert text.endswith(f"(pip install -e), or start the run with PYTHONPATH={beside_script}.")


def test_a_module_in_a_folder_of_pythonpath_is_found_by_all(beside_script, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(beside_script))
    check(config({"train": {"env": [{"id": "letters-beside"}]}}))


def test_a_function_in_the_folder_of_a_script_is_refused_and_in_the_working_directory_is_not(
    beside_script, monkeypatch
):
    path = "letters_beside.loss"
    (beside_script / "letters_beside.py").write_text("def loss(inputs): ...")
    with pytest.raises(ConfigError, match=rf"'letters_beside' is in {beside_script}, which is"):
        import_function(path, {}, "inputs")
    monkeypatch.chdir(beside_script)
    assert import_function(path, {}, "inputs").__name__ == "loss"
    del sys.modules["letters_beside"]


FROZEN = {"name": "m", "base_url": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"orchestrator": {"eval": {"sampling": {"top_k": 0}}}}, "expected 1 or more, or -1"),
        ({"orchestrator": {"eval": {"sampling": {"top_k": -5}}}}, "expected 1 or more, or -1"),
        (
            {"trainer": {"scheduler": {"type": "cosine", "decay_steps": 1}}},
            "trainer.scheduler.decay_steps is 1, and no schedule 'cosine' reads it, only linear",
        ),
        (
            {"trainer": {"scheduler": {"type": "constant", "min_lr": 1e-9}}},
            "trainer.scheduler.min_lr is 1e-09, and no schedule 'constant' reads it, only linear",
        ),
        ({"ckpt": {"enabled": False, "interval": 1, "best": "eval/a/x"}}, "enabled is false"),
        ({"trainer": {"fused_lm_head": False, "dtype": "bfloat16"}}, "it is always on with"),
        ({"deployment": {"pass_env": ["A=B"]}}, "expected the name of an environment variable"),
        ({"inference": {"admin_key_var": ""}}, "expected the name of an environment variable"),
        ({"rollout_transport": {"host": "not a host"}}, "expected an IP address"),
        ({"inference": {"host": "http://127.0.0.1"}}, "expected an IP address"),
        (
            {"inference": {"port": 65535, "replicas": 2}},
            "inference.port is the first of 2 ports, and 65535 leaves only 1. Set it to 65534",
        ),
        (
            {
                "rollout_transport": {"type": "zmq", "port": 65534},
                "trainer": {"num_ranks": 4, "device": "cpu"},
            },
            "rollout_transport.port is the first of 4 ports, and 65534 leaves only 2.",
        ),
        (
            {
                "rollout_transport": {"type": "zmq", "port": 5002},
                "inference": {"port": 5000, "replicas": 3},
            },
            "rollout_transport.port: port 5002 is that of inference.port too",
        ),
    ],
)
def test_a_limit_that_the_docs_state_is_refused_before_the_start(tables, says):
    with pytest.raises(ConfigError) as caught:
        check(config(**tables))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "env",
    [
        {"address": ["10.0.0.1:5000"]},
        {"address": ["http://10.0.0.1:5000"]},
        {"address": ["tcp://10.0.0.1"]},
        {"address": ["tcp://10.0.0.1:0"]},
        {"address": ["tcp://10.0.0.1:99999"]},
        {"address": ["tcp://10.0.0.1:5000", "tcp://10.0.0.1:5000"]},
        {"address": ["tcp://10.0.0.1:5000"], "env_workers": "auto"},
        {"harness": {"max_turns": 3}},
        {"harness": {"id": "in-procss"}},
    ],
)
def test_what_an_env_cannot_have_is_refused_before_the_start(env):
    key = next(iter(env))
    text = f"{key}|env_workers"
    with pytest.raises(ConfigError, match=rf"orchestrator\.train\.env.*({text})"):
        check(config({"train": {"env": [{"id": "reverse-text", "name": "a"} | env]}}))


def test_addresses_of_servers_may_be_names_and_ipv6():
    addresses = ["tcp://node-1.cluster:5000", "tcp://[fe80::1]:5001", "tcp://10.0.0.1:65535"]
    check(config({"train": {"env": [{"id": "reverse-text", "name": "a", "address": addresses}]}}))


def test_a_frozen_models_key_that_is_not_set_is_refused_before_the_start(monkeypatch):
    model = FROZEN | {"api_key_var": "KEY_OF_A_TEACHER"}
    table = {"algo": {"type": "sft", "sampling": {"source": model}}}
    assert "api_key_var is 'KEY_OF_A_TEACHER', and the environment has no such" in refusal(table)
    assert "env 'a': algo.teacher: api_key_var is 'KEY_OF_A_TEACHER'" in refusal(
        {"algo": {"type": "opd", "teacher": model}}
    )
    monkeypatch.setenv("KEY_OF_A_TEACHER", "x")
    check(config(table))


def test_engines_elsewhere_need_a_key_and_a_gpu_of_their_own(monkeypatch):
    inference = {"base_url": "http://a:1", "admin_key_var": "ENGINES"}
    monkeypatch.delenv("ENGINES", raising=False)
    table = {"model": {"name": "m"}, "max_steps": 1, "inference": inference}
    run = RunConfig.model_validate(table)
    with pytest.raises(ConfigError, match=r"environment variable ENGINES .* is not set"):
        check_engine(Resolved(run))
    monkeypatch.setenv("ENGINES", "key")
    check_engine(Resolved(run))
    shared = run.model_copy(update={"deployment": DeploymentConfig(colocated=True)})
    with pytest.raises(ConfigError, match=r"deployment\.colocated .* inference\.base_url"):
        check_engine(Resolved(shared))
