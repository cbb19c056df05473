"""The shipped filters, with hand-computed numbers (reference: semantics 2.6)."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from prime_rl import PluginConfig, Rollout, Sample
from prime_rl_filters import Gibberish, Repetition, ZeroAdvantage
from prime_rl_filters.gibberish import GibberishConfig
from prime_rl_filters.repetition import RepetitionConfig

# log(1/151936) - 2: the reference's threshold
THRESHOLD = -13.9312


def rollout(*samples: Sample, reward: float = 0.0) -> Rollout:
    return Rollout(env="e", example_id=0, group_id=0, reward=reward, samples=list(samples))


def tokens(ids, logprobs, mask=None, **streams) -> Sample:
    mask = [True] * len(ids) if mask is None else mask
    return Sample(token_ids=ids, loss_mask=mask, inference_logprobs=logprobs, **streams)


# -- gibberish --------------------------------------------------------------------------------


def gibberish(*samples, **settings):
    return Gibberish(GibberishConfig(**settings)).filter_rollout(rollout(*samples))


def test_gibberish_threshold_equals_the_reference():
    assert -math.log(151_936) - 2.0 == pytest.approx(THRESHOLD, abs=1e-4)
    assert gibberish(tokens([100_001], [THRESHOLD - 1e-3]))
    assert gibberish(tokens([100_001], [THRESHOLD + 1e-3])) is None


def test_gibberish_names_the_token():
    sample = tokens([5, 100_001, 120_000], [-1.0, -13.0, -14.5])
    assert gibberish(sample) == "token 120000 at position 2 has logprob -14.50 < -13.93"


def test_gibberish_needs_a_token_that_is_both_rare_and_improbable():
    assert gibberish(tokens([100_000], [-20.0])) is None  # the id must be above the threshold
    assert gibberish(tokens([100_001, 5], [-1.0, -20.0])) is None


def test_gibberish_checks_only_sampled_tokens_of_every_sample():
    bad = {"ids": [1, 150_000], "logprobs": [0.0, -20.0]}
    assert gibberish(tokens(**bad, mask=[True, False])) is None
    assert gibberish(tokens([1], [-1.0]), tokens(**bad, mask=[False, True]))


def test_gibberish_settings_move_the_threshold():
    # log(1/10) - 1 = -3.3026
    small = {"token_id_threshold": 3, "vocab_size": 10, "logprob_offset": 1.0}
    assert gibberish(tokens([4], [-3.31]), **small)
    assert gibberish(tokens([4], [-3.30]), **small) is None
    assert gibberish(tokens([3], [-3.31]), **small) is None


# -- repetition -------------------------------------------------------------------------------


def repetition(*samples, **settings):
    return Repetition(RepetitionConfig(**settings)).filter_rollout(rollout(*samples))


SURE, UNSURE = -0.01, -0.0101  # log(0.99) = -0.01005


def run(*logprobs, mask=None):
    return tokens(list(range(len(logprobs))), list(logprobs), mask)


def test_repetition_defaults():
    config = RepetitionConfig()
    assert (config.window, config.prob_threshold, config.ngram_threshold) == (3000, 0.99, None)
    assert repetition(run(*[SURE] * 3000)) == "3000 sampled tokens in a row with p > 0.99"
    assert repetition(run(*[SURE] * 2999)) is None


def test_repetition_counts_the_longest_unbroken_run():
    assert repetition(run(SURE, SURE, SURE), window=3)
    assert repetition(run(SURE, SURE, UNSURE, SURE, SURE), window=3) is None
    assert repetition(run(UNSURE, SURE, SURE, SURE, SURE, UNSURE), window=3) == (
        "4 sampled tokens in a row with p > 0.99"
    )


def test_a_token_at_the_threshold_breaks_the_run():
    at = float(np.float32(math.log(0.5)))
    assert repetition(run(at, at), window=2, prob_threshold=0.5) is None


def test_tokens_that_the_policy_did_not_sample_do_not_end_a_run():
    mask = [True, False, False, True, True]
    assert repetition(run(SURE, -9.0, -9.0, SURE, SURE, mask=mask), window=3)


def test_a_run_restarts_with_each_sample():
    assert repetition(run(SURE, SURE), run(SURE, SURE), window=3) is None
    assert repetition(run(UNSURE), run(SURE, SURE, SURE), window=3)


def fork(shared, *tails):
    """Samples of ``(token id, log μ)``. All but the first repeat the sampled prefix."""
    for number, tail in enumerate(tails):
        ids, logprobs = zip(*shared, *tail, strict=True)
        repeat = [bool(number) and place < len(shared) for place in range(len(ids))]
        mask = [not repeated for repeated in repeat]
        logprobs = [logprob * own for logprob, own in zip(logprobs, mask, strict=True)]
        yield tokens(ids, logprobs, mask, is_repeat=repeat)


def test_a_run_continues_across_a_fork():
    # 2 shared tokens, then 1 on the second branch: 3 in a row there, 2 on the first.
    branches = fork([(1, SURE)] * 2, [(2, UNSURE)], [(3, SURE)])
    assert repetition(*branches, window=3) == "3 sampled tokens in a row with p > 0.99"


def test_repeated_tokens_count_with_their_sampling_logprob():
    """Where they are masked, their logprob is 0.0, which would be certain."""
    branches = fork([(1, UNSURE)] * 3, [(2, UNSURE)], [(3, SURE)])
    assert repetition(*branches, window=2) is None


def test_branches_of_a_fork_have_separate_runs():
    branches = fork([(1, UNSURE)], [(2, SURE)] * 2, [(3, SURE)] * 2)
    assert repetition(*branches, window=3) is None


def test_ngrams_are_counted_across_a_fork():
    # The second branch is 1 2 | 1 2: 12, 21, 12. One of three occurred before.
    branches = list(fork([(1, -1.0), (2, -1.0)], [(3, -1.0)], [(1, -1.0), (2, -1.0)]))
    assert repetition(*branches, ngram_threshold=0.33, ngram_size=2) == (
        "0.33 of its 2-grams are repeated, more than 0.33"
    )


def ngrams(ids, threshold, size=2, mask=None):
    sample = tokens(ids, [-1.0] * len(ids), mask)
    return repetition(sample, ngram_threshold=threshold, ngram_size=size)


def test_repeated_ngrams_equal_hand_computed_shares():
    # 1212 -> 12, 21, 12: one of three 2-grams occurred before.
    assert ngrams([1, 2, 1, 2], 0.33) == "0.33 of its 2-grams are repeated, more than 0.33"
    assert ngrams([1, 2, 1, 2], 0.34) is None
    # 7777 -> 77 three times: two of three.
    assert ngrams([7, 7, 7, 7], 0.66)
    assert ngrams([1, 2, 3, 4], 0.01) is None


def test_ngrams_use_sampled_tokens_and_are_off_by_default():
    assert ngrams([1, 2, 1, 2], 0.1, mask=[True, True, False, False]) is None
    assert ngrams([7], 0.1) is None
    assert repetition(tokens([7] * 50, [-1.0] * 50)) is None


# -- zero advantage ---------------------------------------------------------------------------


def zero_advantage(*samples):
    return ZeroAdvantage(PluginConfig()).filter_rollout(rollout(*samples))


def credited(*advantages, **streams):
    count = len(advantages)
    return tokens([1] * count, [0.0] * count, advantages=list(advantages), **streams)


def test_zero_advantage_drops_rollouts_with_zero_credit():
    assert zero_advantage(credited(0.0, 0.0)) == "every advantage is zero"
    assert zero_advantage(credited(0.0), credited(0.0)) == "every advantage is zero"


def test_one_token_with_credit_keeps_the_rollout():
    assert zero_advantage(credited(0.0, 1e-9)) is None
    assert zero_advantage(credited(0.0), credited(-0.5)) is None


def test_rollouts_without_assigned_credit_stay():
    assert zero_advantage(tokens([1], [0.0])) is None


def test_rollouts_that_another_component_trains_stay():
    assert zero_advantage(credited(0.0, 0.0, ce_weights=[0.0, 0.1])) is None
    assert zero_advantage(credited(0.0, 0.0, ref_kl_weights=[0.0, 1.0])) is None
    assert zero_advantage(credited(0.0, 0.0, ce_weights=[0.0, 0.0])) == "every advantage is zero"


# -- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (GibberishConfig, {"logprob_offset": -1}),
        (GibberishConfig, {"vocab_size": 0}),
        (GibberishConfig, {"threshold": 1}),
        (RepetitionConfig, {"window": 0}),
        (RepetitionConfig, {"prob_threshold": 1.0}),
        (
            RepetitionConfig,
            {"threshold": 0.5},
        ),  # the documented key is ngram_threshold: not ignored
    ],
)
def test_invalid_settings_are_refused(config, setting):
    with pytest.raises(ValidationError):
        config(**setting)


def test_a_demonstration_without_sampling_logprobs_stays():
    demonstration = rollout(tokens([1] * 6, [0.0] * 6))
    repetition = Repetition(RepetitionConfig(window=3))
    assert repetition.filter_rollout(demonstration) is not None
    demonstration.has_logprobs = False
    assert repetition.filter_rollout(demonstration) is None
    gibberish = Gibberish(GibberishConfig(token_id_threshold=0, vocab_size=2))
    demonstration.samples[0].inference_logprobs[:] = -50.0
    assert gibberish.filter_rollout(demonstration) is None
    demonstration.has_logprobs = True
    assert gibberish.filter_rollout(demonstration) is not None


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e5 / 7])
def test_zero_advantage_takes_the_rounding_of_a_mean_for_zero(reward):
    """The plain mean of ten equal rewards differs from them in the last bits."""
    mean = sum([reward] * 10) / 10
    found = credited(reward - mean, mean - reward)
    of_rewards = rollout(found, reward=reward)
    assert ZeroAdvantage(PluginConfig()).filter_rollout(of_rewards) == "every advantage is zero"


@pytest.mark.parametrize("reward", [1e15, -1e18])
def test_credit_that_was_divided_by_a_deviation_stays_however_large_the_rewards_are(reward):
    standardized = rollout(credited(1.0, 1.0), reward=reward)
    assert ZeroAdvantage(PluginConfig()).filter_rollout(standardized) is None
