"""The estimator lab: known estimators come out as theory says, and planted faults are called.

The algorithms here are the textbook's, in a few lines each; the oracle is theory, not the library.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from math import comb
from statistics import fmean, pstdev

import numpy as np
import pytest
from typer.testing import CliRunner

from prime_rl import Algorithm, Loss, LossOutputs, PluginConfig, hookimpl
from prime_rl.errors import PluginError
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
    assert {(f.code, f.when) for f in found.findings} >= {("unbiased", ""), ("length", "one")}
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
    "mean over the wrong axis": (WrongAxis, None, {}, ("other", "")),
    "dropped zero advantages": (
        DropsZeroAdvantages,
        SequenceRatio,
        {"normalize_by": None},
        ("difficulty", "one"),
    ),
    "ratio inverted": (RLOO, Inverted, {}, ("opposite", "")),
    "mask shifted": (RLOO, ShiftedMask, {}, ("other", "")),
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


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_a_verdict_json_and_a_picture(tmp_path, monkeypatch):
    pytest.importorskip("prime_rl_grpo")
    image = pytest.importorskip("matplotlib.image")
    monkeypatch.setattr("prime_rl_devkit.lab.prove.SHIPPED", shipped(longest=2))
    command = ["plugins", "prove", "grpo", "--group-size", "2", "--normalize-by", "constant"]
    path = tmp_path / "grpo.png"
    shown = CliRunner().invoke(app, [*command, "--staleness", "0,2", "--png", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "times 1 - 1/G" in " ".join(shown.output.split())
    assert "is_masked" in shown.output
    assert image.imread(path).shape[2] in (3, 4)
    answer = CliRunner().invoke(app, [*command, "--staleness", "0", "--json"])
    found = json.loads(answer.output)
    assert found["estimates"][0]["one"]["residual"] < 1e-7
    assert found["objective"] == "expected reward"
