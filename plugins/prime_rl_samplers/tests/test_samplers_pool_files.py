"""The pools on disk: exact, found again after a shuffle, with errors where they do not fit."""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl import ConfigError, SampledEnv
from prime_rl.testing import make_rollout
from prime_rl_samplers import DifficultyPools
from prime_rl_samplers.pool_settings import DifficultyPoolsConfig

property_test = settings(deadline=None, derandomize=True, max_examples=40)

THRESHOLDS = {"easy_threshold": 1.0, "hard_threshold": 0.0}


def env(name="a", prompts="pqrst", ratio=None, **fields):
    return SampledEnv(
        name=name,
        num_examples=len(prompts),
        ratio=ratio,
        task=lambda index: {"prompt": prompts[index], "index": index, **fields},
    )


def pools(*envs, seed=0, **config):
    return DifficultyPools(DifficultyPoolsConfig(**(THRESHOLDS | config)), envs, seed)


def group(example, reward, name="a"):
    rollout = make_rollout(reward, env=name)
    rollout.example_id = example
    return [rollout]


def members(sampler):
    return {
        (env.name, env.task(example)["prompt"]): pool
        for env, rotation in zip(sampler.envs, sampler._rotations, strict=True)
        for example, pool in rotation.retired.items()
    }


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- resume ------------------------------------------------------------------------------------

STEP = st.one_of(
    st.just(("next",)),
    st.just(("metrics",)),
    st.tuples(
        st.just("back"),
        st.integers(0, 1),
        st.integers(0, 4),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
)


def act(sampler, steps):
    """All results of the sampler."""
    answers = []
    for kind, *rest in steps:
        if kind == "next" and any(sampler._weight(index) for index in range(2)):
            answers.append(sampler.next_example())
        elif kind == "metrics":
            answers.append(sampler.metrics())
        elif kind == "back":
            index, example, reward = rest
            sampler.observe(group(example, reward, "ab"[index]))
            answers.append(sampler.reject(group(example, reward, "ab"[index])))
    return answers


@given(
    before=st.lists(STEP, max_size=25),
    after=st.lists(STEP, max_size=25),
    ratios=st.sampled_from([(None, None), (1.0, 3.0)]),
    prompts=st.sampled_from(["pqrst", "ppqqq"]),  # the second: examples with equal hashes
)
@property_test
def test_saving_and_loading_changes_nothing(before, after, ratios, prompts):
    envs = [env(n, prompts, ratio) for n, ratio in zip("ab", ratios, strict=True)]
    going_on = pools(*envs, seed=3, online_difficulty_filtering=True)
    act(going_on, before)
    with tempfile.TemporaryDirectory() as folder:
        going_on.save(Path(folder))
        loaded = pools(*envs, seed=3, online_difficulty_filtering=True)
        act(
            loaded, [("next",), ("back", 1, 3, 1.0), ("back", 0, 2, 0.0)]
        )  # load replaces this state
        loaded.load(Path(folder))
    rest = [*after, ("metrics",), *[("next",)] * 5]
    assert act(loaded, rest) == act(going_on, rest)


def test_the_files_have_the_documented_contents(tmp_path):
    sampler = pools(env("a", "pqr"))
    sampler.next_example()
    sampler.observe(group(0, 1.0))
    sampler.observe(group(2, 0.0))
    sampler.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "easy_examples.jsonl",
        "hard_examples.jsonl",
        "rollout_buffer.jsonl",
    }
    digest = hashlib.sha256(b'{"env_name": "a", "prompt": "p"}').hexdigest()
    assert lines(tmp_path / "easy_examples.jsonl") == [
        {
            "hash": digest,
            "env_name": "a",
            "example_id": 0,
            "fields": {"env_name": "a", "prompt": "p"},
        }
    ]
    assert [row["example_id"] for row in lines(tmp_path / "hard_examples.jsonl")] == [2]
    own, standing = lines(tmp_path / "rollout_buffer.jsonl")
    assert own["hash_keys"] == ["env_name", "prompt"]
    assert standing == {
        "env_name": "a",
        "cursor": 1,
        "groups": 2,
        "rollouts": 2,
        "evicted": {"easy": 1, "hard": 1},
        "filtered": {},
    }


# -- identity of examples ----------------------------------------------------------------------


def saved(tmp_path, sampler):
    sampler.save(tmp_path)
    return tmp_path


@given(
    order=st.permutations(list("pqrst")), verdicts=st.dictionaries(st.integers(0, 4), st.booleans())
)
@property_test
def test_examples_are_found_in_any_order(order, verdicts):
    first = pools(env(), seed=1)
    for example, solved in verdicts.items():
        first.observe(group(example, float(solved)))
    with tempfile.TemporaryDirectory() as folder:
        first.save(Path(folder))
        second = pools(env(prompts="".join(order)), seed=1)
        second.load(Path(folder))
    assert members(second) == members(first)


def test_equal_hashes_retire_as_many_examples_as_were_saved(tmp_path):
    first = pools(env(prompts="ppp"))
    first.observe(group(1, 1.0))
    first.observe(group(2, 0.0))
    second = pools(env(prompts="qpp"))
    second.load(saved(tmp_path, first))
    assert second._rotations[0].retired == {1: "easy", 2: "hard"}  # 0 is another example now
    third = pools(env(prompts="pqq"))
    third.load(tmp_path)
    assert third._rotations[0].retired == {0: "easy"}


def test_equal_hashes_prefer_the_same_place(tmp_path):
    first = pools(env("a", "ppp"), env("b", "ppp"), hash_keys=["prompt"])
    first.observe(group(2, 1.0, "a"))
    first.observe(group(1, 0.0, "b"))
    second = pools(env("a", "ppp"), env("b", "ppp"), hash_keys=["prompt"])
    second.load(saved(tmp_path, first))
    assert [each.retired for each in second._rotations] == [{2: "easy"}, {1: "hard"}]


def test_the_name_of_the_env_is_part_of_an_examples_hash_by_default(tmp_path, caplog):
    first = pools(env("old"), hash_keys=["prompt"])
    first.observe(group(3, 1.0, "old"))
    renamed = pools(env("new"), hash_keys=["prompt"])
    renamed.load(saved(tmp_path, first))
    assert members(renamed) == {("new", "s"): "easy"}

    named = pools(env("old"))
    named.observe(group(3, 1.0, "old"))
    other = pools(env("new"))
    other.load(saved(tmp_path, named))
    assert members(other) == {}
    assert "1 pooled examples" in caplog.text


def test_a_new_env_starts_at_its_first_example(tmp_path):
    first = pools(env("a", ratio=1.0))
    first.next_example()
    second = pools(env("b", ratio=1e-9), env("a", ratio=1e9))
    second.load(saved(tmp_path, first))
    assert second.next_example() == (1, 1)
    assert second._rotations[0].cursor == 0


def test_a_cursor_beyond_the_end_starts_over(tmp_path):
    first = pools(env(prompts="pqrst"))
    for _ in range(4):
        first.next_example()
    second = pools(env(prompts="pqr"))
    second.load(saved(tmp_path, first))
    assert [second.next_example()[1] for _ in range(4)] == [0, 1, 2, 0]


def test_the_order_of_a_messages_keys_does_not_matter(tmp_path):
    def asked(*keys):
        message = {"role": "user", "content": "p"}
        return env(prompts=[[{key: message[key] for key in keys}], "other"])

    first = pools(asked("role", "content"))
    first.observe(group(0, 1.0))
    second = pools(asked("content", "role"))
    second.load(saved(tmp_path, first))
    assert second._rotations[0].retired == {0: "easy"}


def test_a_source_may_have_more_demonstrations_than_its_env_has_tasks(tmp_path):
    def task(index):
        if index >= 2:
            raise IndexError(index)
        return {"prompt": str(index)}

    demonstrations = SampledEnv("demos", 50, None, task=task)
    first = pools(env("a"), demonstrations)
    first.observe(group(3, 1.0))
    second = pools(env("a"), demonstrations)
    second.load(saved(tmp_path, first))
    assert members(second) == {("a", "s"): "easy"}


# -- returning examples ------------------------------------------------------------------------


@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    fractions=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 5),
)
@property_test
def test_the_fractions_return_that_share_of_each_pool(sizes, fractions, seed):
    letters = "abcdefghijklmnopqr"
    first = pools(env(prompts=letters))
    for example in range(sizes[0]):
        first.observe(group(example, 1.0))
    for example in range(9, 9 + sizes[1]):
        first.observe(group(example, 0.0))
    with tempfile.TemporaryDirectory() as folder:
        first.save(Path(folder))
        loaded = [
            pools(
                env(prompts=letters),
                seed=seed,
                easy_fraction=fractions[0],
                hard_fraction=fractions[1],
                load_from=folder,
            )
            for _ in range(2)
        ]
    rotation = loaded[0]._rotations[0]
    assert len(rotation.in_pool("easy")) == sizes[0] - round(sizes[0] * fractions[0])
    assert len(rotation.in_pool("hard")) == sizes[1] - round(sizes[1] * fractions[1])
    assert rotation.retired.items() <= first._rotations[0].retired.items()
    assert rotation.retired == loaded[1]._rotations[0].retired  # the same seed, the same examples


def test_returned_examples_are_random(tmp_path):
    first = pools(env(prompts="abcdefghij"))
    for example in range(10):
        first.observe(group(example, 0.0))
    saved(tmp_path, first)
    config = {"hard_fraction": 0.5, "load_from": tmp_path}
    left = {
        frozenset(pools(env(prompts="abcdefghij"), seed=seed, **config)._rotations[0].retired)
        for seed in range(10)
    }
    assert {len(each) for each in left} == {5}
    assert len(left) > 5


def test_load_from_takes_the_pools_and_starts_at_the_first_example(tmp_path, monkeypatch):
    first = pools(env())
    for _ in range(3):
        first.next_example()
    first.observe(group(1, 1.0))
    (tmp_path / "old").mkdir()
    saved(tmp_path / "old", first)
    monkeypatch.chdir(tmp_path)
    second = DifficultyPools(DifficultyPoolsConfig(load_from="old"), [env()], 0)
    assert [second.next_example()[1] for _ in range(5)] == [0, 2, 3, 4, 0]


# -- bad input ---------------------------------------------------------------------------------


def test_a_folder_without_saved_pools_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*rollout_buffer\.jsonl: No such file"):
        pools(env(), load_from=tmp_path)


def test_other_hash_keys_are_refused(tmp_path):
    saved(tmp_path, pools(env()))
    with pytest.raises(
        ConfigError, match=r"hash_keys = \['env_name', 'prompt'\], but .* \['index'\]"
    ):
        pools(env(), hash_keys=["index"]).load(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("easy_examples.jsonl", '{"hash": "x"}\n', r"easy_examples\.jsonl:1: expected an example"),
        ("hard_examples.jsonl", '{"ha', r"hard_examples\.jsonl:1: expected JSON, got b'{\"ha'"),
        ("hard_examples.jsonl", "3\n", r"hard_examples\.jsonl:1: expected a JSON object, got b'3'"),
        ("rollout_buffer.jsonl", "", r"expected the state .* got 'no hash_keys in its first line'"),
        (
            "rollout_buffer.jsonl",
            '{"hash_keys": ["env_name", "prompt"]}\n',
            r"expected the state .* KeyError\('random_state'\)",
        ),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, name, text, message):
    saved(tmp_path, pools(env()))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        pools(env()).load(tmp_path)
