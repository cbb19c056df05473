"""The standard sampler: examples in order, envs by their ratio, the same for the same seed."""

import pytest

from prime_rl import ConfigError, PluginConfig, SampledEnv
from prime_rl_samplers.standard import StandardSampler


def sampler(*envs, seed=0):
    return StandardSampler(PluginConfig(), [SampledEnv(*env) for env in envs], seed)


def test_examples_in_order_starting_over():
    one = sampler(("a", 3, None))
    assert [one.next_example() for _ in range(5)] == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]


def test_an_endless_env_never_starts_over():
    one = sampler(("a", None, None))
    assert [one.next_example()[1] for _ in range(100)] == list(range(100))


def test_envs_by_their_ratio():
    one = sampler(("a", 5, 3.0), ("b", 5, 1.0))
    picks = [one.next_example()[0] for _ in range(4000)]
    assert picks.count(0) / 4000 == pytest.approx(0.75, abs=0.03)
    even = sampler(("a", 5, None), ("b", 5, None))
    assert [even.next_example()[0] for _ in range(4000)].count(0) / 4000 == pytest.approx(
        0.5, abs=0.03
    )


def test_one_seed_one_order():
    envs = (("a", 5, None), ("b", 5, None))
    drawn = {
        seed: [sampler_.next_example() for _ in range(50)]
        for seed, sampler_ in ((s, sampler(*envs, seed=s)) for s in (0, 1))
    }
    again = sampler(*envs, seed=0)
    assert [again.next_example() for _ in range(50)] == drawn[0] != drawn[1]


def test_a_restored_sampler_continues_exactly(tmp_path):
    first, second = (sampler(("a", 3, 1.0), ("b", None, 2.0), seed=1) for _ in range(2))
    for _ in range(10):
        first.next_example()
    first.save(tmp_path)
    second.load(tmp_path)
    assert [first.next_example() for _ in range(20)] == [second.next_example() for _ in range(20)]


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "sampler.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"sampler\.json: not what the sampler 'standard'"):
        sampler(("a", 3, None)).load(tmp_path)
