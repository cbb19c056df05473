"""The estimator lab: known estimators come out as theory says, and planted faults are called.

The algorithms here are the textbook's, in a few lines each; the oracle is theory, not the library.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from math import comb
from statistics import fmean, median, pstdev

import numpy as np
import pytest
from typer.testing import CliRunner

from prime_rl import Algorithm, Loss, LossOutputs, PluginConfig, hookimpl
from prime_rl.config.orchestrator import PartialGroupsConfig
from prime_rl.errors import ConfigError, PluginError
from prime_rl.rollout import TURN_REWARDS
from prime_rl.testing import prove
from prime_rl_app.cli.app import app

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from prime_rl_devkit.lab.estimate import rloo_square  # noqa: E402
from prime_rl_devkit.lab.problem import (  # noqa: E402
    LONGEST,
    B,
    Problem,
    make_question,
    plain_replies,
    shipped,
    solved,
)
from prime_rl_devkit.lab.prove import SHIPPED  # noqa: E402

CONFIG = PluginConfig()

SMALL = Problem(
    "small",
    "replies of at most two tokens",
    tuple(
        make_question(name, plain_replies(solved, longest=2), seed, skill)
        for seed, (name, skill) in enumerate((("hard", -0.5), ("easy", 1.8)))
    ),
)
"""7 replies instead of 15: a proof in a fraction of a second."""
FAILED = replace(SMALL, name="failed", failing=0.2)
GRADED = Problem(
    "graded", "", (make_question("graded", plain_replies(lambda r: len(r) / 2, longest=2), 3),)
)


class Credit(Algorithm):
    """Credit is a function of the group's rewards."""

    group_relative = True

    def credit(self, r):
        raise NotImplementedError

    @hookimpl
    def score_group(self, group):
        found = self.credit([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, found, strict=True):
            rollout.assign_advantages(advantage)


class Reinforce(Credit):
    name = "lab_reinforce"

    def credit(self, r):
        return r


class RLOO(Credit):
    name = "lab_rloo"

    def credit(self, r):
        return [x - (sum(r) - x) / (len(r) - 1) if len(r) > 1 else 0.0 for x in r]


class MeanBaseline(Credit):
    name = "lab_mean"

    def credit(self, r):
        return [x - fmean(r) for x in r]


class Std(Credit):
    name = "lab_std"

    def credit(self, r):
        return [(x - fmean(r)) / (pstdev(r) + 1e-4) for x in r]


class PassAtK(Credit):
    """Credit is that of pass@2 for a group of 2: 1 if any solves it."""

    name = "lab_pass_at_k"

    def objective(self, outcomes):
        return 1 - (1 - outcomes.mean_reward) ** outcomes.group_size

    def credit(self, r):
        return [max(r)] * len(r)


@cache
def proof(cls, **options):
    options = {"normalize_by": "constant", "staleness": (0,), "problems": (SMALL,)} | options
    options = {"group_size": 2} | options
    return prove(cls(CONFIG), **options)


# -- what theory says ------------------------------------------------------------------------------


def test_reinforce_and_rloo_are_the_gradient_of_the_expected_reward():
    for cls in (Reinforce, RLOO):
        found = proof(cls, problems=("plain", "graded", "two-turn"))
        assert found.residual < 1e-7, cls
        assert found.is_unbiased
        assert all(abs(each.one.scale - 1) < 1e-6 for each in found.estimates)


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_baseline_takes_1_of_g(size):
    found = proof(MeanBaseline, group_size=size)
    assert found.residual < 1e-7
    assert found.estimate("small").one.scale == pytest.approx(1 - 1 / size, abs=1e-7)
    assert "times 1 - 1/G" in found.verdict


def test_dividing_by_the_standard_deviation_weighs_questions_by_difficulty():
    """E of the normalized credit given one right reply, minus that given a wrong one: the weight of
    a question whose success rate is p, by the binomial weights of its two siblings."""
    found = proof(Std, group_size=4)
    assert "difficulty" in found.codes
    estimate = found.estimate("small")
    for p, (scale, residual) in zip(
        estimate.rewards.values(), estimate.one.by_question, strict=True
    ):
        assert residual < 1e-6  # every question alone is estimated without bias
        siblings = [comb(3, k) * p**k * (1 - p) ** (3 - k) for k in range(4)]

        def credit(right, k, p=p):
            rewards = [1.0] * (k + right) + [0.0] * (4 - k - right)
            return (right - fmean(rewards)) / (pstdev(rewards) + 1e-4)

        gaps = [credit(True, k) - credit(False, k) for k in range(4)]
        assert scale == pytest.approx(np.dot(siblings, gaps), rel=1e-5)


def test_dividing_by_the_standard_deviation_does_not_count_rewards_in_proportion():
    found = proof(Std, problems=("two-turn",))
    assert "rewards" in found.codes
    assert "length" not in found.codes
    assert "rewards" not in proof(Std, group_size=4).codes  # 0 and 1 differ by one number


def test_averaging_over_sequences_favors_short_right_and_long_wrong_replies():
    found = proof(MeanBaseline, normalize_by="sequences", problems=("plain",))
    assert "length" in found.codes
    assert "short replies when right and long replies when wrong" in found.verdict


def test_the_mean_over_tokens_is_biased_in_a_step_of_one_group_only():
    found = proof(MeanBaseline, normalize_by="tokens")
    assert {(f.code, f.when) for f in found.findings} == {("unbiased", ""), ("divisor", "one")}
    assert found.is_unbiased
    estimate = found.estimate("small")
    assert estimate.many.residual < 1e-7
    assert 0.05 < estimate.one.residual < 0.2


def test_max_rl_is_the_gradient_of_its_own_objective_and_not_of_the_expected_reward():
    grpo = pytest.importorskip("prime_rl_grpo")
    found = proof(grpo.MaxRL, group_size=3, problems=(SMALL, GRADED, FAILED))
    assert found.residual < 1e-6
    assert {f.code for f in found.findings if f.problem != "graded"} == {"unbiased"}
    assert {f.code for f in found.findings if f.problem == "graded"} == {"undeclared"}

    class Claims(grpo.MaxRL):
        objective = "expected_reward"

    assert "difficulty" in proof(Claims, group_size=3).codes


def test_pass_at_k_is_proved_against_its_own_function():
    """Every rollout has the group's best reward: the gradient of pass@G, divided by G."""
    estimate = proof(PassAtK).estimate("small")
    assert estimate.one.residual < 1e-7
    assert estimate.one.scale == pytest.approx(1 / 2)


def test_nothing_is_proved_where_nothing_is_declared():
    class Undeclared(Std):
        objective = "none"

    found = proof(Undeclared)
    assert found.codes == {"undeclared"}
    assert found.objective == "none"


def test_a_turn_baseline_over_those_who_reach_the_turn_is_biased():
    class Turns(Algorithm):
        """Credit of a turn: the turn's own return minus the mean of those that reach it."""

        name = "lab_turns"
        group_relative = True

        @hookimpl
        def score_group(self, group):
            mean = fmean(rollout.reward for rollout in group)
            later = [rollout.reward for rollout in group if rollout.num_turns > 1]
            for rollout in group:
                credit = [rollout.reward - mean]
                if rollout.num_turns > 1:
                    credit.append(rollout.reward - fmean(later))
                rollout.assign_advantages(credit)

    found = proof(Turns, problems=("two-turn",))
    assert "turns" in found.codes
    assert proof(MeanBaseline, problems=("two-turn",)).codes == {"unbiased"}


BATCH = Problem(
    "batch",
    "replies of one token, b is right",
    tuple(
        make_question(name, plain_replies(lambda r: float(B in r), longest=1), seed, skill)
        for seed, (name, skill) in enumerate((("hard", -0.8), ("easy", 1.8)))
    ),
    groups=2,
)


class BatchMean(Algorithm):
    """Credit is the reward above the mean of the whole batch."""

    name = "lab_batch_mean"

    @hookimpl
    def score_batch(self, groups):
        every = [rollout for group in groups for rollout in group]
        for rollout in every:
            rollout.assign_advantages(rollout.reward - fmean(each.reward for each in every))


def test_a_batch_of_two_groups_is_modeled_where_groups_depend_on_one_another():
    """The others' rewards say nothing about a reply: the mean takes 1 of 4 rollouts."""
    (estimate,) = proof(BatchMean, problems=(BATCH,)).estimates
    assert estimate.many.residual < 1e-6 and estimate.one.residual < 1e-6
    assert estimate.many.scale == pytest.approx(3 / 4, abs=1e-6)
    assert estimate.one.scale == pytest.approx(3 / 4, abs=1e-6)

    class Whitened(BatchMean):
        @hookimpl
        def score_batch(self, groups):
            every = [rollout for group in groups for rollout in group]
            rewards = [rollout.reward for rollout in every]
            for rollout in every:
                credit = (rollout.reward - fmean(rewards)) / (pstdev(rewards) + 1e-4)
                rollout.assign_advantages(credit)

    (estimate,) = proof(Whitened, problems=(BATCH,)).estimates
    rates = [*estimate.rewards.values()]
    for p, (scale, residual) in zip(rates, estimate.many.by_question, strict=True):
        assert residual < 1e-5
        assert scale == pytest.approx(weight_in_a_batch(p, rates), rel=1e-5)

    class Alone(MeanBaseline):
        @hookimpl
        def score_batch(self, groups): ...

    assert proof(Alone, problems=(BATCH,)).estimates == ()


def weight_in_a_batch(p, rates):
    """E of the whitened credit of a right reply minus that of a wrong one, over its sibling and the
    two of the other group, whose question is either."""
    found = 0.0
    for q, rest in itertools.product(rates, itertools.product((0, 1), repeat=3)):
        chance = np.prod([rate if r else 1 - rate for r, rate in zip(rest, (p, q, q), strict=True)])
        right, wrong = [(own, *rest) for own in (1, 0)]
        gap = (1 - fmean(right)) / (pstdev(right) + 1e-4)
        gap -= (0 - fmean(wrong)) / (pstdev(wrong) + 1e-4)
        found += chance * gap / len(rates)
    return found


def test_the_variance_of_rloo_is_its_closed_form():
    """Two ways to the same number: all groups through the trainer, and E over pairs of rollouts."""
    for size in (2, 3):
        for estimate in proof(RLOO, group_size=size, problems=(SMALL, "two-turn")).estimates:
            assert estimate.against["rloo"] == pytest.approx(1, rel=1e-5)
    estimate = proof(Reinforce).estimate("small")
    assert estimate.against["reinforce"] == pytest.approx(1, rel=1e-5)
    question = shipped()["plain"].questions[1]
    p, r, scores = (
        question.probabilities(question.logits),
        question.rewards,
        question.scores(question.logits),
    )
    pairs = [
        p[i] * p[j] * np.square((r[i] - r[j]) * (scores[i] - scores[j]) / 2).sum()
        for i in range(len(p))
        for j in range(len(p))
    ]
    assert rloo_square(p, r, scores, 2) == pytest.approx(sum(pairs), rel=1e-12)


# -- partial groups --------------------------------------------------------------------------------


SAME_LENGTH = Problem(
    "same length", "", (make_question("same length", plain_replies(lambda r: B in r, 1), 3),)
)


EASY = replace(SMALL, name="easy", questions=SMALL.questions[1:])


def divided(rest, at_least=2):
    return PartialGroupsConfig(at_least=at_least, rest=rest)


@pytest.mark.parametrize("rest", ["group", "cancel"])
def test_the_first_to_end_are_a_group_by_enumeration(rest):
    """Groups of 3, of which the two shortest are compared: the sum over all groups, worked out
    without the lab. A rest of one has no sibling, and gets nothing."""
    (question,) = EASY.questions
    p = question.probabilities(question.logits)
    r = question.rewards
    scores = question.scores(question.logits)
    update = np.zeros(scores.shape[1])
    for group in itertools.product(range(len(p)), repeat=3):
        first, second, _ = sorted(group, key=lambda k: question.lengths[k])
        step = (r[first] - r[second]) * (scores[first] - scores[second])
        update += np.prod(p[[*group]]) * step
    update /= 2 if rest == "cancel" else 3
    goal = (p * r) @ scores
    scale = update @ goal / (goal @ goal)
    bias = np.linalg.norm(update - scale * goal) / np.linalg.norm(update)

    options = {"group_size": 3, "problems": (EASY,)}
    found = proof(RLOO, partial_groups=divided(rest), **options)
    assert not found.is_unbiased and "towards" in found.verdict
    estimate = found.estimate("easy")
    assert estimate.many.scale == pytest.approx(scale, rel=1e-5)
    assert estimate.many.residual == pytest.approx(bias, rel=1e-4) and bias > 0.01
    assert estimate.group_size == 3


@pytest.mark.parametrize("rest", ["group", "cancel"])
def test_a_partial_group_is_unbiased_where_all_take_equally_long(rest):
    options = {"group_size": 4, "problems": (SAME_LENGTH,)}
    found = proof(RLOO, partial_groups=divided(rest), **options)
    assert found.is_unbiased and found.residual < 1e-6


def test_a_group_larger_than_its_part_is_proved():
    with pytest.raises(ConfigError, match="at_least = 3 and a group of 2: expected larger groups"):
        prove(RLOO(CONFIG), group_size=2, partial_groups=divided("group", at_least=3))


def test_the_problems_are_distributions_of_short_replies():
    for problem in (*shipped().values(), SMALL):
        for question in problem.questions:
            p = question.probabilities(question.logits)
            assert p.sum() == pytest.approx(1, abs=1e-12)
            assert np.allclose(p @ question.scores(question.logits), 0, atol=1e-12)
            assert max(len(reply.tokens) for reply in question.replies) <= LONGEST


# -- staleness -------------------------------------------------------------------------------------


class Ratio(Loss):
    name = "ratio"
    token_wise = True

    def weight(self, inputs):
        return (inputs.trainer_logprobs - inputs.inference_logprobs).exp()

    def __call__(self, inputs):
        mask = self.mask(inputs)
        terms = -inputs.advantages * self.weight(inputs)
        return LossOutputs(torch.where(mask, terms, 0.0).sum(), {})

    def mask(self, inputs):
        return inputs.loss_mask


class SequenceRatio(Ratio):
    """The exact correction: the product of all ratios of the sequence."""

    name = "sequence_ratio"
    token_wise = False
    scope = "sequence"
    normalize_by = "sequences"

    def __call__(self, inputs):
        gap = torch.where(inputs.loss_mask, inputs.trainer_logprobs - inputs.inference_logprobs, 0)
        credit = inputs.advantages[inputs.loss_mask][0]
        return LossOutputs(-credit * gap.sum().exp(), {})


def test_the_exact_ratio_is_unbiased_at_any_staleness_and_the_ratio_of_tokens_is_not():
    found = proof(
        Reinforce, group_size=1, loss=SequenceRatio(CONFIG), staleness=(0, 1, 2), normalize_by=None
    )
    own = [each for each in found.estimates if each.loss == "own"]
    assert [each.staleness for each in own] == [0, 1, 2]
    assert all(each.one.residual < 1e-6 for each in own)
    assert found.codes == {"unbiased"}
    by_kind = {e.loss: e.many.residual for e in found.estimates if e.staleness == 2}
    assert by_kind["own"] < 1e-6 < 0.05 < by_kind["ratio"] < by_kind["no_ratio"]


def test_what_a_clip_removes_is_reported():
    clip = pytest.importorskip("prime_rl_clip_losses")
    found = proof(MeanBaseline, loss="ppo_clip", staleness=(0, 2))
    assert clip.PPOClipLoss.name == found.loss
    by = {(e.staleness, e.loss): e for e in found.estimates}
    assert by[0, "own"].metrics["is_masked"] == 0
    assert by[2, "own"].metrics["is_masked"] > 0.05
    assert by[2, "own"].many.scale < by[2, "ratio"].many.scale


# -- planted faults --------------------------------------------------------------------------------


class Sign(RLOO):
    name = "sign"

    def credit(self, r):
        return [-x for x in super().credit(r)]


class OffByOneBaseline(Credit):
    """The sum of all, divided by the number of the others."""

    name = "off_by_one"

    def credit(self, r):
        return [x - sum(r) / (len(r) - 1) for x in r]


class StdWithoutEpsilon(Credit):
    name = "std_without_epsilon"

    def credit(self, r):
        with np.errstate(invalid="ignore"):
            return (np.array(r) - np.mean(r)) / np.std(r)


class WrongAxis(Algorithm):
    """Reward on the last token, minus the mean over the reply's tokens, not over the group."""

    name = "wrong_axis"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            credit = np.zeros(rollout.num_trainable_tokens)
            credit[-1] = rollout.reward
            rollout.assign_advantages(credit - credit.mean())


class DropsZeroAdvantages(Reinforce):
    """Rollouts without credit count in no mean: the divisor is the number of the solved ones."""

    name = "drops_zero"

    @hookimpl
    def score_group(self, group):
        super().score_group(group)
        for rollout in group:
            rollout.assign_weights("rl", float(rollout.reward != 0))


class TimesGroupSize(RLOO):
    name = "times_group_size"

    def credit(self, r):
        return [len(r) * x for x in super().credit(r)]


class ObservationCredit(RLOO):
    """Declares the environment's answers to be the policy's own tokens."""

    name = "observation_credit"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            for sample in rollout.samples:
                sample.loss_mask[1:] = True
        super().score_group(group)


class Detached(Ratio):
    name = "detached"

    def weight(self, inputs):
        return super().weight(inputs).detach()


class Inverted(Ratio):
    name = "inverted"

    def weight(self, inputs):
        return (inputs.inference_logprobs - inputs.trainer_logprobs).exp()


class ShiftedMask(Ratio):
    name = "shifted"

    def mask(self, inputs):
        return inputs.loss_mask.roll(-1)


class IgnoredMask(Ratio):
    """Trains observations, with the credit of the token before."""

    name = "ignored_mask"

    def __call__(self, inputs):
        credit = torch.where(inputs.loss_mask, inputs.advantages, inputs.advantages.roll(1))
        return super().__call__(replace(inputs, advantages=credit))

    def mask(self, inputs):
        return torch.ones_like(inputs.loss_mask)


TWO_TURNS = {"problems": ("two-turn",)}
FAULTS = {
    "sign": (Sign, None, {}, ("opposite", "")),
    "off-by-one baseline": (OffByOneBaseline, None, {"group_size": 3}, ("scaled", "")),
    "off-by-one baseline of two": (OffByOneBaseline, None, {}, ("zero", "")),
    "std without epsilon": (StdWithoutEpsilon, None, {}, ("refused", "")),
    "mean over the wrong axis": (WrongAxis, None, {}, ("place", "")),
    "dropped zero advantages": (
        DropsZeroAdvantages,
        SequenceRatio,
        {"normalize_by": None},
        ("difficulty", "one"),
    ),
    "ratio inverted": (RLOO, Inverted, {}, ("opposite", "")),
    "mask shifted": (RLOO, ShiftedMask, {}, ("place", "")),
    "reward scaled by group size": (TimesGroupSize, None, {}, ("scaled", "")),
    "credit on observations": (ObservationCredit, None, TWO_TURNS, ("off_mask", "")),
    "gradient on observations": (RLOO, IgnoredMask, TWO_TURNS, ("off_mask", "")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_called(fault):
    cls, loss, options, code = FAULTS[fault]
    found = proof(cls, loss=loss and loss(CONFIG), **options)
    assert code in {(finding.code, finding.when) for finding in found.findings}
    assert not found.is_unbiased


def test_a_ratio_without_a_gradient_is_called_by_the_trainer_itself():
    with pytest.raises(PluginError, match=r"loss 'detached': .* has no gradient"):
        proof(RLOO, loss=Detached(CONFIG))


def test_the_sound_losses_beside_the_faults_are_not_called():
    assert proof(RLOO, loss=Ratio(CONFIG), problems=(SMALL, "two-turn")).is_unbiased
    assert proof(Reinforce, loss=SequenceRatio(CONFIG), normalize_by=None).is_unbiased


# -- causes ----------------------------------------------------------------------------------------


FEW = shipped(longest=2)
CREDIT = (
    SMALL,
    replace(FEW["graded"], questions=FEW["graded"].questions[:1]),
    FEW["signed"],
    FEW["two-turn"],
)


def quickly(names, quick):
    """All of ``names`` as parameters; those that are not in ``quick`` are slow together."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Weighted(RLOO):
    """RLOO, times a weight of each token."""

    @hookimpl
    def score_group(self, group):
        credit = self.credit([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, credit, strict=True):
            weights = self.weights(rollout.num_trainable_tokens)
            rollout.assign_advantages(advantage * np.array(weights, float))


class PerLength(Weighted):
    name = "per_length"

    def weights(self, length):
        return [1 / length] * length


class LastToken(Weighted):
    name = "last_token"

    def weights(self, length):
        return [0.0] * (length - 1) + [1.0]


class FirstTokens(Weighted):
    name = "first_tokens"

    def weights(self, length):
        return [0.5**t for t in range(length)]


class OtherTurns(Algorithm):
    """The reward of a turn is the credit of the next one."""

    name = "other_turns"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            rewards = [*rollout.info.get(TURN_REWARDS, {}).values()]
            later = [0.0, *rewards[:-1]]
            rollout.assign_advantages(later if len(later) > 1 else rollout.reward)


class SignFlip(RLOO):
    """The credit of negative rewards has the wrong sign."""

    name = "sign_flip"

    def credit(self, r):
        return [a if x >= 0 else -a for a, x in zip(super().credit(r), r, strict=True)]


class Best(Credit):
    """Homogeneous, equal at every level of rewards, and not linear."""

    name = "best"

    def credit(self, r):
        return [x - max(r) for x in r]


class OfTheLengths(RLOO):
    """A reward that is not the objective's."""

    name = "of_the_lengths"

    @hookimpl
    def score_group(self, group):
        rewards = [each.reward - each.num_trainable_tokens / 8 for each in group]
        for rollout, advantage in zip(group, self.credit(rewards), strict=True):
            rollout.assign_advantages(advantage)


class ByLikelihood(RLOO):
    """A token counts by minus the log of its probability."""

    name = "by_likelihood"

    @hookimpl
    def score_group(self, group):
        credit = self.credit([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, credit, strict=True):
            (sample,) = rollout.samples
            surprise = -sample.inference_logprobs[sample.loss_mask]
            rollout.assign_advantages(advantage * surprise)


class CutOffIsNothing(RLOO):
    """Replies without a stop token get no credit."""

    name = "cut_off_is_nothing"

    @hookimpl
    def score_group(self, group):
        credit = self.credit([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, credit, strict=True):
            rollout.assign_advantages(0.0 if rollout.is_truncated else advantage)


CAUSES = {
    PerLength: {"length"},
    ByLikelihood: {"likelihood"},
    CutOffIsNothing: {"cut_off"},
    LastToken: {"place"},
    FirstTokens: {"place"},
    OtherTurns: {"turns", "opposite"},
    SignFlip: {"opposite", "rewards"},
    Std: {"rewards", "difficulty"},
    Best: {"rewards", "difficulty"},
    OfTheLengths: {"length"},
}


@pytest.mark.parametrize("cls", quickly(CAUSES, [PerLength]))
def test_the_cause_of_a_bias_is_named_and_no_other(cls):
    found = proof(cls, problems=CREDIT)
    assert not found.is_unbiased
    assert found.codes - {"unbiased", "scaled"} <= CAUSES[cls]
    said = "standard deviation" in found.verdict
    assert said == (cls is Std), found.verdict
    assert found.headline in found.verdict and "unbiased" not in found.headline


class Median(Credit):
    """In a group of two, the median is the mean: only larger groups show what it is."""

    name = "median"

    def credit(self, r):
        return [x - median(r) for x in r]


class ByToken(RLOO):
    """A token counts by its id, whatever its place, its likelihood and the length of the reply."""

    name = "by_token"

    @hookimpl
    def score_group(self, group):
        credit = self.credit([rollout.reward for rollout in group])
        for rollout, advantage in zip(group, credit, strict=True):
            (sample,) = rollout.samples
            tokens = np.asarray(sample.token_ids)[sample.loss_mask]
            rollout.assign_advantages(advantage * (1.0 + 0.5 * (tokens == tokens[0])))


def test_no_cause_is_named_that_does_not_explain_the_bias():
    found = proof(ByToken, problems=(SMALL, FEW["two-turn"]))
    assert found.codes == {"other"}, found.verdict
    assert "no cause that the lab knows" in found.headline


@pytest.mark.slow
def test_credit_that_is_linear_in_pairs_only_is_not_called_linear():
    found = proof(Median, group_size=3, problems=CREDIT[1:3])
    assert found.codes == {"rewards"}, found.verdict
    assert proof(MeanBaseline, group_size=3, problems=CREDIT[1:3]).is_unbiased
    assert proof(OfTheLengths, group_size=3, problems=CREDIT[1:3]).codes == {"length"}


def test_negative_rewards_are_asked_for():
    assert "signed" in SHIPPED
    found = proof(SignFlip, problems=(SMALL, FEW["signed"]))
    assert {f.problem for f in found.findings if f.code == "unbiased"} == {"small"}
    assert "signed" in found.headline
    rewards = FEW["signed"].questions[0].rewards
    assert min(rewards) < 0 < max(rewards) and -max(rewards) in rewards


def test_an_algorithm_that_remembers_is_called_and_its_estimates_are_not_read():
    class Remembers(RLOO):
        name = "remembers"

        def credit(self, r):
            before = getattr(self, "before", 0.0)
            self.before = fmean(r)
            return [x - before for x in r]

    class Shares(Remembers):
        name = "shares"
        kept = [0.0]

        def credit(self, r):
            before, self.kept[0] = self.kept[0], fmean(r)
            return [x - before for x in r]

    assert proof(Remembers).codes == {"memory"}
    assert "rewards of other envs" in proof(Shares).verdict and proof(Shares).codes == {"shared"}

    class Declares(Remembers):
        order_dependent = True

    assert proof(Declares).codes == {"unbiased"}


def test_a_member_that_failed_is_the_cause_where_whole_groups_are_unbiased():
    class Left(RLOO):
        name = "left"

        @hookimpl
        def score_group(self, group):
            if len(group) > 1:
                super().score_group(group)
            else:
                (alone,) = group
                later = [0.0] * (alone.num_trainable_tokens - 1)
                alone.assign_advantages([alone.reward, *later])

    whole = replace(FEW["graded"], name="plain", questions=FEW["graded"].questions[:1])
    found = proof(Left, problems=(whole, replace(whole, name="failed", failing=0.2)))
    assert found.codes == {"unbiased", "failed"}
    assert "a member failed" in found.headline


LONELY = {
    "another sign": lambda r: [-x for x in r],
    "half of the rewards": lambda r: [x if x > 0 else 0.0 for x in r],
}


@pytest.mark.parametrize("fault", LONELY)
def test_a_fault_of_the_others_is_not_hidden_by_the_whole_groups(fault):
    class Lonely(RLOO):
        name = "lonely"

        def credit(self, r):
            return LONELY[fault](r) if len(r) == 1 else super().credit(r)

    whole = FEW["signed"]
    found = proof(Lonely, problems=(whole, FEW["failed-signed"]))
    assert found.codes == {"unbiased", "failed"}
    assert "where 1 of 2 are left" in found.headline


def test_what_a_module_keeps_for_an_example_is_state_after_many_groups_too():
    kept = {}

    class Cached(RLOO):
        name = "cached"

        @hookimpl
        def score_group(self, group):
            mean = kept.setdefault(group[0].example_id, fmean(each.reward for each in group))
            for rollout in group:
                rollout.assign_advantages(rollout.reward - mean)

    class WarmsUp(RLOO):
        name = "warms_up"

        def credit(self, r):
            self.seen = [*getattr(self, "seen", []), *r]
            return super().credit(r) if len(self.seen) < 12 else [x - fmean(self.seen) for x in r]

    for _ in range(2):  # what the first proof leaves in the module hides nothing
        assert proof.__wrapped__(Cached).codes == {"shared"}
    assert proof(WarmsUp).codes == {"memory"}


def test_rewards_of_another_env_are_called():
    """Credit is whitened over both envs."""

    class OverEnvs(RLOO):
        name = "over_envs"

        @hookimpl
        def score_group(self, group): ...

        @hookimpl
        def score_envs(self, batches):
            both = [r for groups in batches.values() for group in groups for r in group]
            rewards = [rollout.reward for rollout in both]
            for rollout in both:
                above = rollout.reward - fmean(rewards)
                rollout.assign_advantages(above / (pstdev(rewards) + 1e-4))

    alone = replace(SMALL, name="plain")
    found = proof(OverEnvs, problems=(alone, replace(BATCH, name="envs", envs=2)))
    assert found.codes - {"scaled"} == {"unbiased", "envs"}
    assert "other envs of a batch" in found.headline


def test_credit_of_a_sibling_is_called_a_matter_of_order():
    class Rolled(RLOO):
        name = "rolled"

        def credit(self, r):
            own = super().credit(r)
            return own[-1:] + own[:-1]

    found = proof(Rolled, group_size=3)
    assert found.codes == {"opposite", "order"}


def test_the_divisor_of_one_step_is_told_apart_from_the_credit():
    found = proof(RLOO, normalize_by="tokens", problems=CREDIT)
    assert found.is_unbiased and found.codes == {"unbiased", "divisor"}
    assert found.residual > 0.01
    assert "its own number of tokens" in found.verdict


# -- stale samples ---------------------------------------------------------------------------------


class WithoutRatio(Ratio):
    name = "without_ratio"

    def __call__(self, inputs):
        terms = -inputs.advantages * inputs.trainer_logprobs
        return LossOutputs(torch.where(inputs.loss_mask, terms, 0.0).sum(), {})


class Weighed(WithoutRatio):
    """Each token by a function of its ratio, without a gradient of it."""

    def weigh(self, ratio, inputs):
        raise NotImplementedError

    def __call__(self, inputs):
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp().detach()
        terms = -inputs.advantages * inputs.trainer_logprobs * self.weigh(ratio, inputs)
        return LossOutputs(torch.where(inputs.loss_mask, terms, 0.0).sum(), {})


def weighed(name, weigh, **attributes):
    return type(name, (Weighed,), {"name": name, "weigh": weigh, **attributes})


def against(ratio, inputs, eps=0.2):
    """Beyond the trust region, where the policy has moved against the credit."""
    good = inputs.advantages > 0
    return torch.where(good, ratio < 1 - eps, ratio > 1 + eps)


def along(ratio, inputs, eps=0.2):
    good = inputs.advantages > 0
    return torch.where(good, ratio > 1 + eps, ratio < 1 - eps)


AGED = ("advantages", ("ref_logprobs", None), "policy_lag")
STALE = {
    "no_ratio": WithoutRatio,
    "no_ratio in a trust region": weighed("masked", lambda self, r, i: 1.0 * ~along(r, i)),
    "no_ratio for negative credit": weighed(
        "half", lambda self, r, i: torch.where(i.advantages > 0, r, 1.0)
    ),
    "inverted": weighed("mu_over_pi", lambda self, r, i: 1 / r),
    "inverted in a trust region": weighed("mop", lambda self, r, i: (1 / r) * ~along(r, i)),
    "wrong_side": weighed("wrong_side", lambda self, r, i: r * ~against(r, i)),
    "dropped": weighed("dropped", lambda self, r, i: r * ((r - 1).abs() < 1e-6)),
    "dropped by age": weighed("aged", lambda self, r, i: r * (i.policy_lag <= 0), reads=AGED),
    "partly, those with negative credit": weighed(
        "unlucky", lambda self, r, i: r * ((i.policy_lag <= 0) | (i.advantages > 0)), reads=AGED
    ),
    "partly, on one side": weighed("rising", lambda self, r, i: r * (r >= 1 - 1e-6)),
    "discounted by half": weighed(
        "half", lambda self, r, i: r * torch.where(i.policy_lag > 0, 0.5, 1.0), reads=AGED
    ),
    "discounted by age": weighed(
        "by_age", lambda self, r, i: r * 0.7 ** i.policy_lag.clamp(min=0), reads=AGED
    ),
    "shifted": weighed("shifted", lambda self, r, i: torch.where(i.loss_mask, r, 1.0).roll(1)),
    "opposite": weighed("opposite", lambda self, r, i: torch.where(r > 1.2, -r, r)),
    "excessive": weighed("squared", lambda self, r, i: r * r),
    "excessive by a base": weighed("base", lambda self, r, i: r**1.4427),
}


def stale_codes(found):
    return [each.stale.code for each in found.estimates if each.stale and each.loss == "own"]


@pytest.mark.parametrize("fault", quickly(STALE, ["no_ratio", "wrong_side"]))
def test_a_wrong_ratio_is_called_at_each_staleness(fault):
    found = proof(RLOO, loss=STALE[fault](CONFIG), staleness=(0, 1, 2))
    code = fault.replace(",", "").split()[0]
    assert stale_codes(found) == [code, code]
    if code == "discounted":
        assert ("0.5 times" if "half" in fault else "0.49 times") in found.headline
    for sign in ("negative", "positive"):
        said = f"{sign} credit" in found.headline or f"credit is {sign}" in found.headline
        assert said == (f"{sign} credit" in fault)
    assert not found.is_unbiased
    assert "2 versions old" in found.headline
    # What it makes of fresh samples is right, and said beside it.
    assert "unbiased" in found.codes


SOUND = {
    "exact": SequenceRatio,
    "per_token": Ratio,
    "capped": weighed("capped", lambda self, r, i: r.clamp(max=1.1)),
    "capped at 1": weighed("at_one", lambda self, r, i: r.clamp(max=1)),
    "capped from below": weighed("floor", lambda self, r, i: r.clamp(min=1)),
    "clipped": weighed("clipped", lambda self, r, i: r * ~along(r, i)),
    "soft": weighed("soft", lambda self, r, i: r.sqrt()),
}


@pytest.mark.parametrize("kind", quickly(SOUND, ["exact"]))
def test_an_exact_ratio_and_its_approximations_are_told_apart(kind):
    found = proof(RLOO, loss=SOUND[kind](CONFIG), normalize_by=None, staleness=(0, 2))
    assert stale_codes(found) == kind.split()[:1]
    (stale,) = [each.stale for each in found.estimates if each.stale and each.loss == "own"]
    assert (stale.residual < 1e-5) == (kind == "exact")
    assert not stale.is_fault
    assert "stale" in found.codes or kind == "exact"


REGIONS = {
    "trust region, only above it, whatever their credit": lambda self, r, i: r * (r < 1.1),
    # In the lab's small problem all tokens that moved down so far have negative credit.
    "trust region, only below it, and": lambda self, r, i: r * (r > 0.9),
    "trust region, whatever their credit": lambda self, r, i: r * ((r - 1).abs() < 0.1),
    "trust region, and": lambda self, r, i: r * ~along(r, i),
}


@pytest.mark.slow
@pytest.mark.parametrize("region", REGIONS)
def test_a_trust_region_on_one_side_is_said(region):
    found = proof(RLOO, loss=weighed("region", REGIONS[region])(CONFIG), staleness=(0, 2))
    assert stale_codes(found) == ["clipped"]
    assert region in found.verdict


def test_the_exact_update_is_the_sum_over_all_replies_of_the_policy_in_training():
    """Independent: E over replies that the new policy samples, by credit of fresh tokens."""
    found = proof(Reinforce, group_size=1, loss=Ratio(CONFIG), staleness=(0, 2))
    by_kind = {each.loss: each for each in found.estimates if each.staleness}
    assert by_kind["exact"].many.residual < 1e-6
    assert by_kind["exact"].many.scale == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_no_shipped_loss_is_accused_of_its_ratio():
    pytest.importorskip("prime_rl_clip_losses")
    from prime_rl.registry.components import installed_losses

    names = [
        name
        for name, each in installed_losses().installed.items()
        if each.cls.compares_with_sampler and name not in ("custom", "ref_kl")
    ]
    assert len(names) > 10
    for name in names:
        found = proof(RLOO, loss=name, normalize_by=None, staleness=(0, 1))
        (stale,) = [each.stale for each in found.estimates if each.stale and each.loss == "own"]
        assert not stale.is_fault, (name, stale.text)


# -- settings --------------------------------------------------------------------------------------


def test_settings_reach_losses_and_heads():
    pytest.importorskip("prime_rl_losses")
    drops = {"loss": {"dppo_mask_high": 0.01, "dppo_mask_low": 0.01}}
    cls = cache(lambda: RLOO)()
    options = {"group_size": 2, "problems": (SMALL,), "staleness": (0, 1)}
    wide, narrow = (
        prove(cls(CONFIG), loss="default", trainer=trainer, **options) for trainer in ({}, drops)
    )
    assert stale_codes(wide) == ["per_token"]
    assert stale_codes(narrow) == ["clipped"]

    ppo = pytest.importorskip("prime_rl_ppo")
    heads = {"heads": {"values": {"gae_lambda": 0.5}}}
    algorithm = ppo.PPO(ppo.PPO.config_class())
    few = {**options, "staleness": (0,)}
    assert prove(algorithm, trainer=heads, **few).estimates != prove(algorithm, **few).estimates


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"optim": {}}, r"trainer\.optim: a proof takes"),
        ({"losses": {"defualt": {}}}, r"trainer\.losses\.defualt"),
        ({"heads": {"valves": {}}}, r"trainer\.heads\.valves"),
        ({"loss": {"clip": 1}}, "clip: unknown key"),
    ],
)
def test_a_setting_that_nothing_takes_is_refused(trainer, said):
    with pytest.raises(ConfigError, match=said):
        prove(RLOO(CONFIG), problems=(SMALL,), staleness=(0,), trainer=trainer)


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_a_verdict_json_and_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("prime_rl_grpo")
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setattr("prime_rl_devkit.lab.prove.SHIPPED", shipped(longest=2))
    command = ["plugins", "prove", "grpo", "--group-size", "2", "--normalize-by", "constant"]
    path = tmp_path / "grpo.png"
    shown = CliRunner().invoke(app, [*command, "--staleness", "0,2", "--png", str(path)])
    assert shown.exit_code == 0, shown.output
    said = " ".join(shown.output.split())
    assert "times 1 - 1/G" in said
    assert "cosine, scale, bias: of a step of one group" in said
    assert "many: the bias in a step of many groups" in said
    assert "is_masked" in shown.output
    assert image.imread(path).shape[2] in (3, 4)
    answer = CliRunner().invoke(app, [*command, "--staleness", "0", "--json"])
    found = json.loads(answer.output)
    assert found["estimates"][0]["one"]["residual"] < 1e-7
    assert found["objective"] == "expected reward"


# -- groups that grow -----------------------------------------------------------------------------


class FirstSuccess(Algorithm):
    """Samples up to M replies until one is right, and trains that one alone.

    It is the k-th with probability (1 - p)^(k-1) p, and its score is grad p / p on average: the
    update is the sum over k of (1 - p)^(k-1) grad p, the gradient of the sum of (1 - (1-p)^k) / k.
    """

    name = "first-success"
    group_relative = True
    grows_groups = True
    trains_at_most = 1

    def objective(self, outcomes):
        """The sum of pass@k / k."""
        p = outcomes.mean_reward
        most = outcomes.group_size + 1  # the lab lets a group grow by one
        return sum((1 - (1 - p) ** k) / k for k in range(1, most + 1))

    @hookimpl
    def wanted_members(self, progress):
        if progress.rollouts[-1].reward == 1.0:
            return progress.ended
        return min(progress.ended + 1, progress.max_group_size)

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward)
            if rollout.reward != 1.0:
                rollout.assign_weights("rl", 0.0)


class StopsAtFailure(FirstSuccess):
    """The same credit for another rule."""

    @hookimpl
    def wanted_members(self, progress):
        return progress.ended if progress.rollouts[-1].reward == 0.0 else progress.size


def test_a_group_that_grows_until_a_success_climbs_the_sum_of_pass_at_k():
    question = replace(SMALL, questions=SMALL.questions[:1])
    options = {"group_size": 2, "staleness": [0], "normalize_by": "constant"}
    options |= {"problems": [question]}
    proof = prove(FirstSuccess(CONFIG), **options)
    assert proof.is_unbiased, proof.verdict
    assert proof.residual < 1e-6
    other = prove(StopsAtFailure(CONFIG), **options)
    assert not other.is_unbiased
