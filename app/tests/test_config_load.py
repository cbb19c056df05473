"""TOML files and overrides to a frozen config, or to an error that says what to do."""

import tomllib

import pytest

from prime_rl import ConfigError, Filter, Monitor, Observer, PluginConfig, hookimpl
from prime_rl.config.run import RunConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import ALGORITHM, ENGINE, FILTER, LOSS, MODEL, SOURCE, TUNING
from prime_rl_app.config import (
    build_config,
    fitted,
    load_config,
    merge,
    parse_overrides,
    parse_value,
    read_toml,
    set_at,
)

LEAST = "max_steps = 3\n[model]\nname = 'm/m'\n"


@pytest.fixture
def toml(tmp_path):
    def write(text, name="run.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_files_compose_left_to_right_key_by_key(toml):
    one = toml(LEAST + "[orchestrator]\nbatch_size = 8\ngroup_size = 4\n", "one.toml")
    two = toml("[orchestrator]\ngroup_size = 2\n[trainer.optim]\nlr = 0.5\n", "two.toml")
    config = load_config([one, two])
    assert (config.orchestrator.batch_size, config.orchestrator.group_size) == (8, 2)
    assert config.trainer.optim.lr == 0.5
    assert load_config([two, one]).orchestrator.group_size == 4


def test_a_checkpoint_where_the_run_ends_is_the_default_and_can_be_turned_off(toml):
    assert load_config([toml(LEAST)]).ckpt.is_due(3, 3)
    assert not load_config([toml(LEAST + "[ckpt]\nenabled = false\n")]).ckpt.is_due(3, 3)
    old = load_config([toml(LEAST)]).model_dump(mode="json") | {"ckpt": None}  # of version 0.1
    assert not RunConfig.model_validate(old).ckpt.enabled


def test_lists_are_replaced_whole(toml):
    one = toml(LEAST + "[[orchestrator.train.env]]\nid = 'a'\n[[orchestrator.train.env]]\nid = 'b'")
    two = toml("[[orchestrator.train.env]]\nid = 'c'\n", "two.toml")
    assert [env.id for env in load_config([one, two]).orchestrator.train.env] == ["c"]


def test_merging_leaves_its_arguments_alone():
    below = {"a": {"b": 1}}
    assert merge(below, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert below == {"a": {"b": 1}}


def test_a_table_over_a_value_replaces_it():
    assert merge({"a": 1}, {"a": {"b": 2}}) == {"a": {"b": 2}}
    assert merge({"a": {"b": 2}}, {"a": 1}) == {"a": 1}


def test_overrides_come_last(toml):
    overrides = ["--max-steps", "7", "--orchestrator.batch-size=16", "--trainer.optim.lr", "1e-4"]
    config = load_config([toml(LEAST)], overrides)
    assert (config.max_steps, config.orchestrator.batch_size) == (7, 16)
    assert config.trainer.optim.lr == 1e-4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--a.b-c", "3"], (["a", "b_c"], 3)),
        (["--a=3"], (["a"], 3)),
        (["--a=b=c"], (["a"], "b=c")),
        (["--flag"], (["flag"], "true")),
        (["--no-flag"], (["flag"], "false")),
        (["--no-a.flag"], (["a", "flag"], "false")),
        (["--a", "-1.5"], (["a"], -1.5)),
        (["--a", "None"], (["a"], None)),
        (["--a", "[1, 2]"], (["a"], [1, 2])),
        (["--a", "{ b = 1 }"], (["a"], {"b": 1})),
        (["--a", "true"], (["a"], True)),
        (["--a", "hello world"], (["a"], "hello world")),
    ],
)
def test_forms_of_an_override(arguments, expected):
    assert parse_overrides(arguments) == [expected]


def test_several_overrides():
    assert parse_overrides(["--a", "--b", "1", "--c=x"]) == [
        (["a"], "true"),
        (["b"], 1),
        (["c"], "x"),
    ]


@pytest.mark.parametrize("text", ["'open", "2026-13-45", "a=b"])
def test_what_is_no_toml_value_is_a_string(text):
    assert parse_value(text) == text


NUMBERS = ("7", "-7", "1e5", "1E5", "nan", "inf", "+inf", "true", "0x10", "1_000", "007", "1.50")
DATES = ("2026-11-25", "2026-11-25T10:00:00Z", "10:30:00", "2026-11-25 10:00:00")


@pytest.mark.parametrize("text", NUMBERS + DATES)
def test_a_text_that_reads_as_another_toml_value_stays_what_was_typed(toml, text):
    entries = "[[orchestrator.train.env]]\nid = 'a'\nname = 'first'\n"
    names = {"model.name": text}
    if text[0] not in "+-":  # which no name of an env begins with
        names["orchestrator.train.env.0.name"] = text
    overrides = [f"--{key}={value}" for key, value in names.items()]
    config = load_config([toml(LEAST + entries)], [*overrides, "--max-steps", "7"])
    (env,) = config.orchestrator.train.env
    assert (config.model.name, config.max_steps) == (text, 7)
    assert env.name == names.get("orchestrator.train.env.0.name", "first")


def test_a_number_in_a_file_where_a_text_belongs_says_to_quote_it(toml):
    with pytest.raises(ConfigError, match=r"^model.name: .* \(got 7\). Write it in quotes: \"7\""):
        load_config([toml(LEAST.replace("'m/m'", "7"))])


def test_a_file_of_a_windows_editor_is_read(toml, tmp_path):
    """With a byte-order mark, CR LF, and characters at which ``splitlines`` splits."""
    text = LEAST + "[[orchestrator.train.env]]\nid = 'a'\nargs.text = 'ü\u2028\u0085'\n"
    path = tmp_path / "windows.toml"
    path.write_bytes(("\ufeff" + text.replace("\n", "\r\n")).encode())
    assert load_config([path]).orchestrator.train.env[0].args == {"text": "ü\u2028\u0085"}


HABITS = [
    ("--ckpt", "ckpt", {"enabled": True}),
    ("--no-ckpt", "ckpt", {"enabled": False}),
    ("--trainer.lora", "trainer.lora", {}),
    ("--monitors.wandb", "monitors.wandb", {}),
    ("--trainer.lora.target-modules q v", "trainer.lora.target_modules", ["q", "v"]),
    ("--plugins.disabled a 7", "plugins.disabled", ["a", 7]),
    ("--deployment.trainer-gpus 0 1", "deployment.trainer_gpus", [0, 1]),
    ("""--monitors.wandb {"project":"a","tags":["x",null]}""", "monitors.wandb",
     {"project": "a", "tags": ["x", None]}),
    ("""--trainer.optim {"lr":1}""", "trainer.optim", {"lr": 1}),
    ("--model.name {a:b", "model.name", "{a:b"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "key", "value"), HABITS)
def test_habits_of_upstreams_command_line(words, key, value):
    assert parse_overrides(words.split(" ")) == [(key.split("."), value)]


def test_a_table_of_the_command_line_replaces_that_of_the_file_and_a_switch_keeps_it(toml):
    file = toml(LEAST + "[trainer.optim]\nlr = 1.0\n[ckpt]\ninterval = 3\n")
    config = load_config(
        [file],
        ["--trainer.optim", '{"weight_decay": 0.5}', "--no-ckpt", "--plugins.disabled", "a", "7"],
    )
    optim = config.trainer.optim
    assert (optim.lr, optim.weight_decay) == (load_config([toml(LEAST)]).trainer.optim.lr, 0.5)
    assert (config.ckpt.enabled, config.ckpt.interval) == (False, 3)
    assert config.plugins.disabled == ("a", "7")


def test_a_tuning_that_is_switched_on_keeps_its_settings(toml):
    file = toml(LEAST + "[trainer.lora]\nrank = 4\n")
    config = load_config([file], ["--trainer.lora"])
    assert config.trainer.settings["lora"]["rank"] == 4


@pytest.mark.parametrize("words", ["--seed 1 2", "--plugins.disabled a b.toml", "--ckpt true x"])
def test_words_where_no_list_belongs_are_refused(words):
    with pytest.raises(ConfigError, match="Config files come before the overrides"):
        parse_overrides(words.split())


@pytest.mark.parametrize("argument", ["stray", "-x", "--"])
def test_a_stray_argument(argument):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["--a", "1", argument])
    assert str(caught.value) == (
        f"{argument!r}: expected --dotted.key value. Config files come before the overrides."
    )


def test_a_number_in_the_path_is_an_entry_of_a_list(toml):
    path = toml(LEAST + "[[orchestrator.train.env]]\nid = 'a'\n")
    config = load_config([path], ["--orchestrator.train.env.0.group_size", "4"])
    assert config.orchestrator.train.env[0].group_size == 4


@pytest.mark.parametrize("part", ["1", "x"])
def test_an_entry_that_is_not_there(part):
    with pytest.raises(ConfigError) as caught:
        set_at({"env": [{}]}, ["env", part, "id"], "a")
    assert str(caught.value) == (
        f"--env.{part}: expected the number of an entry, 0 to 0, got {part!r}"
    )


def test_a_path_through_a_value():
    with pytest.raises(ConfigError) as caught:
        set_at({"seed": 3}, ["seed", "x"], 1)
    assert str(caught.value) == "--seed.x: seed is not a table"


def message(toml, text, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config([toml(text)], overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--orchestrator.bach_size=8",
         "orchestrator.bach_size: unknown key; did you mean 'batch_size'?"),
        ("--sede=8", "sede: unknown key; did you mean 'seed'?"),
        ("--trainer.scheduler.qqq=8",
         "trainer.scheduler.qqq: unknown key; known here: decay_steps, min_lr, type, "
         "warmup_steps"),
        ("--trainer.dtyp=bfloat16", "trainer.dtyp: unknown key; did you mean 'dtype'?"),
        ("--max_steps=0", "max_steps: Input should be greater than 0 (got 0)"),
        ("--trainer.dtype=fp16",
         "trainer.dtype: Input should be 'auto', 'float32' or 'bfloat16' (got 'fp16')"),
        ("--deployment.trainer_gpus=x", "deployment.trainer_gpus: expected a list (got 'x')"),
        (
            "--deployment.trainer_gpus=4",
            "deployment.trainer_gpus: expected a list (got 4). Write it in brackets: [4]",
        ),
        ("--trainer.optim=true", "trainer.optim: expected a table of keys (got True)"),
        ("--inference.base_url=here:80", "inference.base_url: 'here:80' is no URL of an engine: "
         "expected http:// or https://, a host and perhaps a port and a path, without spaces, such "
         "as 'http://10.0.0.5:8000/v1' (got 'here:80')"),
        ("--orchestrator.train.sampling.top_p=0.5",
         "orchestrator.train.sampling.top_p: unknown key; known here: extra_body, "
         "max_completion_tokens, temperature"),
    ],
)  # fmt: skip
def test_a_wrong_key_or_value_says_where_and_what(toml, override, expected):
    assert message(toml, LEAST, [override]) == expected


def test_a_wrong_key_inside_a_list_of_tables(toml):
    text = LEAST + "[[orchestrator.train.env]]\nid = 'a'\n[[orchestrator.train.env]]\nidd = 'b'\n"
    assert message(toml, text).splitlines() == [
        "orchestrator.train.env.1.id: required, and nothing was given",
        "orchestrator.train.env.1.idd: unknown key; did you mean 'id'?",
    ]


def test_a_table_in_place_of_a_list_of_tables_says_how_to_write_one(toml):
    assert message(toml, LEAST + "[orchestrator.train.env]\nid = 'a'\n") == (
        "orchestrator.train.env: expected a list, got a table. Write [[orchestrator.train.env]]"
    )


def test_held_out_envs_take_no_keys_that_only_training_reads(toml):
    for key in ("algo = { type = 'grpo' }", "ratio = 2.0"):
        text = LEAST + f"[[orchestrator.eval.env]]\nid = 'a'\n{key}\n"
        assert message(toml, text).startswith(f"orchestrator.eval.env.0.{key.split()[0]}: unknown")


def test_every_problem_has_its_line(toml):
    lines = message(toml, "sede = 1\n").splitlines()
    assert "model: required, and nothing was given" in lines
    assert "max_steps: required, and nothing was given" in lines
    assert "sede: unknown key; did you mean 'seed'?" in lines


def test_files_that_cannot_be_read(toml, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: no such file. Give the path of a TOML"):
        load_config([tmp_path / "nowhere.toml"])
    with pytest.raises(ConfigError, match=r"run\.toml: not a TOML file: .*line 1"):
        load_config([toml("= 3")])
    with pytest.raises(ConfigError, match=r"a folder\. Give the path of a TOML config in it"):
        load_config([tmp_path])
    with pytest.raises(ConfigError, match=r"below\.toml: cannot be read: Not a directory"):
        load_config([toml(LEAST) / "below.toml"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trainer.optim", '{"lr": 1e-4, "lr": 1e-5}'], "trainer.optim: the key 'lr' stands tw"),
        (
            ["--orchestrator.train.env", '[{"id": "a", "args": {"n": 1, "n": 2}}]'],
            "orchestrator.train.env: the key 'n' stands twice in a table",
        ),
        (['--a.b=[[], {"x": {"y": 1, "y": 1}}]'], "a.b: the key 'y' stands twice"),
    ],
)
def test_json_with_a_key_twice_is_refused_with_the_key_that_it_sets(words, says):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(words)
    assert str(caught.value).startswith(says)


def test_a_json_file_with_a_key_twice_is_refused(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"max_steps": 2, "model": {"name": "a"}, "max_steps": 3}')
    with pytest.raises(ConfigError, match="not a JSON file: the key 'max_steps' stands twice"):
        read_toml(file)


def test_a_config_is_frozen(toml):
    config = load_config([toml(LEAST)])
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.orchestrator.algo.type = "x"  # type: ignore[misc]


def test_a_resolved_config_reads_back_equal(toml):
    text = LEAST + "[orchestrator.algo]\ntype = 'x'\nalpha = 0.5\n[inference.embedded]\nslots = 4\n"
    config = load_config([toml(text)])
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert again.orchestrator.algo.settings == {"alpha": 0.5}
    assert again.inference.settings == {"slots": 4}


def test_the_default_filter_slots_monitor_before_and_enforce_after(toml):
    orchestrator = load_config([toml(LEAST)]).orchestrator
    slots = (orchestrator.pre_batch_filters, orchestrator.post_batch_filters)
    assert [{f.type: f.enforce for f in slot} for slot in slots] == [
        {"gibberish": False, "repetition": False, "zero_advantage": False},
        {"gibberish": False, "repetition": False, "zero_advantage": True},
    ]


READ_BY_PLUGINS = {
    "orchestrator.eval.max_hold_seconds": "prime_rl_evals",
    "orchestrator.workers.max_memory": "prime_rl_env_workers",
    "orchestrator.workers.start_timeout": "prime_rl_env_workers",
    # Core hands on by name what a kernel's settings have.
    "trainer.keep_attention": "prime_rl_kernels",
    "trainer.offload_activations": "prime_rl_kernels",
    "trainer.share_prompts": "prime_rl_kernels",
    "trainer.triton_kernels": "prime_rl_kernels",
}
"""Keys of core's classes that nothing in core or the application reads, and who does."""


def test_each_key_has_a_reader():
    """A key that nothing reads must not exist: each name occurs as an attribute."""
    import re
    from importlib import import_module
    from pathlib import Path
    from typing import get_args

    from pydantic import BaseModel

    import prime_rl
    import prime_rl_app

    def text_of(folder, but=""):
        files = folder.rglob("*.py")
        kept = [file for file in files if but not in file.relative_to(folder).parts[:1]]
        return "\n".join(file.read_text() for file in kept)

    core = Path(prime_rl.__file__).parent
    text = text_of(core, but="config") + text_of(Path(prime_rl_app.__file__).parent)
    config = text_of(core / "config")

    def tables(annotation):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [annotation]
        return [table for each in get_args(annotation) for table in tables(each)]

    def unread(table, place):
        for name, info in table.model_fields.items():
            if not re.search(rf"\.{name}\b", text) and not re.search(rf"self\.{name}\b", config):
                yield f"{place}{name}"
            for inner in tables(info.annotation):
                yield from unread(inner, f"{place}{name}.")

    assert set(unread(RunConfig, "")) == set(READ_BY_PLUGINS)
    for key, plugin in READ_BY_PLUGINS.items():
        name = key.rpartition(".")[2]
        assert re.search(rf"\.{name}\b", text_of(Path(import_module(plugin).__file__).parent)), key


def test_a_number_without_a_value_is_refused(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('max_steps = 3\n[model]\nname = "m"\n')
    with pytest.raises(ConfigError, match=r"max_steps: .*\(got 'true'\)"):
        load_config([file], ["--max-steps"])
    switched = load_config([file], ["--no-orchestrator.save_rollouts"])
    assert switched.orchestrator.save_rollouts is False


def test_a_config_that_version_0_1_wrote_without_lora_is_read():
    trainer = TrainerConfig.model_validate({"lora": None, "loss": {"type": "default"}})
    assert trainer.settings == {}


ENV = LEAST + "[[orchestrator.train.env]]\nid = 'a/b@1'\n"
PATHS = ["../../../x", "/etc/x", "a/../../x", "..", ".hidden", "a\\b", "a\0b", "a\n", "", "x" * 300]


@pytest.mark.parametrize("key", ["id", "name"])
@pytest.mark.parametrize("name", PATHS)
def test_a_name_that_is_a_path_is_refused(key, name):
    table = merge(tomllib.loads(ENV), {})
    table["orchestrator"]["train"]["env"][0][key] = name
    with pytest.raises(ConfigError, match=rf"^orchestrator\.train\.env\.0\.{key}: String should"):
        build_config(table)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("key", ["trainer.optim.lr", "orchestrator.train.env.0.args.a"])
def test_a_number_that_json_cannot_hold_is_refused(toml, key, value):
    with pytest.raises(ConfigError, match=rf"^{key}: expected a finite number, got {value}"):
        load_config([toml(ENV)], [f"--{key}={value}"])


def test_a_short_run_keeps_the_schedule_that_was_asked_for() -> None:
    """Resumed with more steps it has the whole warm-up."""
    table = {"type": "linear", "warmup_steps": 10, "decay_steps": 30}
    whole = {"model": {"name": "m"}, "max_steps": 3, "trainer": {"scheduler": table}}
    whole["orchestrator"] = {"train": {"env": [{"id": "e"}]}}
    given = build_config(whole)
    config, notices = fitted(given)
    assert config.trainer.scheduler == given.trainer.scheduler
    assert any("max_steps 3 shortens warmup_steps to 0" in notice for notice in notices)
    longer, quiet = fitted(config.model_copy(update={"max_steps": 40}))
    assert longer.trainer.scheduler.warmup_steps == 10
    assert not any("scheduler" in notice for notice in quiet)


TYPED = [*NUMBERS, *DATES, "0b1", "1e400", "False", "1."]
KEYS = ("project", "entity", "name", "group")


@pytest.mark.parametrize("first", range(0, len(TYPED), len(KEYS)))
def test_a_text_of_a_plugin_s_table_keeps_what_was_typed(toml, first):
    """Only the plugin's class knows which of its keys are texts."""
    texts = dict(zip(KEYS, TYPED[first:], strict=False))
    overrides = [f"--monitors.wandb.{key}={text}" for key, text in texts.items()]
    overrides.append("--monitors.wandb.table_rows=7")
    table = load_config([toml(LEAST)], overrides).monitors["wandb"]
    assert table == {**texts, "table_rows": 7}


def test_several_words_of_a_plugin_s_list_of_texts_keep_what_was_typed(toml):
    words = ["--monitors.wandb.tags", "7", "true", "1e5", "x"]
    assert load_config([toml(LEAST)], words).monitors["wandb"]["tags"] == ["7", "true", "1e5", "x"]


@pytest.mark.parametrize(
    "words",
    [
        ["--monitors.wandb.name", "[1]", "--monitors.wandb.project", "7"],
        ["--monitors.wandb.name.x", "1", "--monitors.wandb.project", "7"],
        ["--monitors.nothing.project", "1", "--monitors.wandb.project", "7"],
        ["--trainer.loss.type", "7", "--monitors.wandb.project", "7"],
    ],
)
def test_wrong_values_beside_a_text_are_no_traceback(toml, words):
    try:
        table = load_config([toml(LEAST)], words).monitors["wandb"]
    except ConfigError:
        return
    assert table["project"] == "7"


def test_only_the_class_that_a_table_selects_says_which_of_its_keys_are_texts(toml, monkeypatch):
    """Classes of several kinds may have one name."""

    class Text(PluginConfig):
        level: str = ""

    class Either(PluginConfig):
        level: int | str = 0

    class Watches(Observer):
        name = "twin"
        config_class = Text

    class Receives(Monitor):
        name = "twin"
        config_class = Either

        def log(self, step, metrics):
            """Nothing."""

    class Drops(Filter):
        name = "twin"
        config_class = Text

        @hookimpl
        def filter_rollout(self, rollout, group):
            return None

    class Offers:
        @hookimpl
        def register_observers(self):
            return [Watches, Receives]

        @hookimpl
        def register_filters(self):
            return [Drops]

    hooks = Hooks()
    hooks.register(Offers(), "offers")
    monkeypatch.setattr("prime_rl_app.config.load_plugins", lambda group, disabled: hooks)

    filters = "[[orchestrator.pre_batch_filters]]\ntype = 'twin'\n"
    config = load_config(
        [toml(LEAST + filters)],
        [
            "--observers.twin.level=7",
            "--monitors.twin.level=7",
            "--orchestrator.pre_batch_filters.0.level=7",
        ],
    )
    assert config.observers["twin"] == {"level": "7"}
    assert config.monitors["twin"] == {"level": 7}
    assert config.orchestrator.pre_batch_filters[0].settings == {"level": "7"}


@pytest.mark.parametrize(
    ("kind", "place", "settings", "name"),
    [
        (ALGORITHM, "orchestrator.train.env.3.algo", {"type": "a"}, "a"),
        (ALGORITHM, "orchestrator.eval.env.3.algo", {"type": "a"}, None),
        (SOURCE, "orchestrator.train.env.0.algo.sampling.source", {"type": "a"}, "a"),
        (SOURCE, "orchestrator.algo.sampling.source", {"name": "a"}, None),
        (FILTER, "orchestrator.post_batch_filters.0", {"type": "a"}, "a"),
        (ENGINE, "inference.a", {"type": "b"}, "a"),
        (MODEL, "model", {"name": "a"}, "a"),
        (LOSS, "trainer.loss", {"type": "a"}, "a"),
        (LOSS, "trainer.losses.a", {}, "a"),
        (TUNING, "trainer.a", {}, "a"),
        (TUNING, "trainer.losses.a", {}, None),
        (MODEL, "model", {"name": 7}, None),
    ],
)
def test_where_the_settings_of_a_kind_stand(kind, place, settings, name):
    assert kind.selected_at(place.split("."), settings) == name
