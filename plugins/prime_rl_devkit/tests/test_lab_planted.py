"""Planted estimators: no wrong one is called right, no right one wrong, and each cause is true.

Each estimator is a textbook's with one error that authors make, or right and unusual. What is
expected follows from its definition, not from the lab.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, median, pstdev, stdev

import numpy as np
import pytest

from prime_rl import Algorithm, Loss, LossOutputs, PluginConfig, hookimpl
from prime_rl.rollout import TURN_REWARDS
from prime_rl.testing import prove

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from prime_rl_devkit.lab.problem import shipped  # noqa: E402

CONFIG = PluginConfig()
FEW = shipped(longest=2)
GRADED = replace(FEW["graded"], questions=FEW["graded"].questions[:1])
ONE = (FEW["plain"], GRADED, FEW["signed"], FEW["two-turn"])
FAILED = (FEW["signed"], FEW["failed-signed"])
BATCH = (FEW["plain"], FEW["batch"])


def length(rollout):
    return rollout.num_trainable_tokens


def above_the_others(rewards):
    total = sum(rewards)
    others = len(rewards) - 1
    return [r - (total - r) / others if others else 0.0 for r in rewards]


def rewards_of(group):
    return [rollout.reward for rollout in group]


def turn_rewards(rollout):
    found = [*rollout.info.get(TURN_REWARDS, {}).values()]
    return found if len(found) == length(rollout) else [rollout.reward]


class Planted(Algorithm):
    """Credit by a function of the group; ``spread`` over the tokens of each rollout."""

    name = "planted"

    def credit(self, group):
        return above_the_others(rewards_of(group))

    def spread(self, credit, rollout):
        return credit

    @hookimpl
    def score_group(self, group):
        for rollout, credit in zip(group, self.credit(group), strict=True):
            rollout.assign_advantages(self.spread(credit, rollout))


def of_group(credit):
    return type("OfGroup", (Planted,), {"credit": lambda self, group: credit(group)})


def of_rewards(credit):
    return of_group(lambda group: credit(rewards_of(group)))


def over_tokens(weigh):
    """RLOO, with ``weigh(credit, rollout)`` over the tokens."""
    return type("OverTokens", (Planted,), {"spread": lambda self, a, rollout: weigh(a, rollout)})


def over_batch(assign):
    """``assign`` credit to the groups of a batch."""

    class OverBatch(Algorithm):
        name = "over_batch"

        @hookimpl
        def score_group(self, group): ...

        @hookimpl
        def score_batch(self, groups):
            assign(groups)

    return OverBatch


def batch_std(groups):
    deviation = pstdev([r for group in groups for r in rewards_of(group)]) + 1e-6
    for group in groups:
        for rollout in group:
            rollout.assign_advantages((rollout.reward - fmean(rewards_of(group))) / deviation)


def rewards_of_the_group_before(groups):
    for group, before in zip(groups, [groups[-1], *groups[:-1]], strict=True):
        for rollout, other in zip(group, before, strict=True):
            rollout.assign_advantages(other.reward - fmean(rewards_of(group)))


def mean_of_the_other_groups(groups):
    for group in groups:
        others = [r for each in groups if each is not group for r in rewards_of(each)]
        for rollout in group:
            rollout.assign_advantages(rollout.reward - (fmean(others) if others else 0.0))


def logprobs(rollout):
    (sample,) = rollout.samples
    return sample.inference_logprobs[sample.loss_mask].astype(float)


def tokens(rollout):
    (sample,) = rollout.samples
    return np.asarray(sample.token_ids)[sample.loss_mask]


def same_length_mean(group):
    """The baseline of a rollout depends on its own length."""
    found = []
    for rollout in group:
        alike = [o.reward for o in group if o is not rollout and length(o) == length(rollout)]
        found.append(rollout.reward - (fmean(alike) if alike else 0.0))
    return found


def longest_left_out(group):
    longest = max(map(length, group))
    shortest = min(map(length, group))
    credit = above_the_others(rewards_of(group))
    return [
        0.0 if length(rollout) == longest > shortest else a
        for rollout, a in zip(group, credit, strict=True)
    ]


def mean_of_those_that_ended(group):
    ended = [rollout.reward for rollout in group if not rollout.is_truncated]
    return [rollout.reward - (fmean(ended) if ended else 0.0) for rollout in group]


def only_those_that_ended(group):
    ended = [rollout for rollout in group if not rollout.is_truncated]
    credit = dict(zip(map(id, ended), above_the_others(rewards_of(ended)), strict=True))
    return [credit.get(id(rollout), 0.0) for rollout in group]


def to_go(values):
    return np.cumsum(values[::-1])[::-1]


class WithKL(Planted):
    """Declares the expected reward minus 0.2 KL(π || initial)."""

    needs_initial = True
    sign = -1.0

    def objective(self, outcomes):
        gap = outcomes.log_probabilities - outcomes.reference_log_probabilities
        return outcomes.mean_reward - 0.2 * (outcomes.probabilities * gap).sum()

    async def setup(self, host):
        self.initial = host.initial

    def penalty(self, gap):
        return to_go(gap)

    @hookimpl
    async def score_rollout(self, rollout):
        (sample,) = rollout.samples
        initial = await self.initial.logprobs(sample.token_ids)
        gap = (sample.inference_logprobs - initial)[sample.loss_mask].astype(float)
        rollout.info["penalty"] = self.penalty(gap)

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            penalty = self.sign * 0.2 * rollout.info["penalty"]
            rollout.assign_advantages(rollout.reward + penalty)


class KLWithTheOtherSign(WithKL):
    sign = 1.0


class KLOfTheTokenAlone(WithKL):
    def penalty(self, gap):
        return gap


class K3AsReward(WithKL):
    def penalty(self, gap):
        return to_go(np.exp(-gap) - 1 + gap)


REWARDS = {"rewards", "difficulty"}
WRONG = {
    "standard deviation, ddof 1": (
        of_rewards(lambda r: [(x - fmean(r)) / (stdev(r) + 1e-4) for x in r]),
        REWARDS,
    ),
    "epsilon of one": (
        of_rewards(lambda r: [(x - fmean(r)) / (pstdev(r) + 1) for x in r]),
        REWARDS,
    ),
    "variance instead": (
        of_rewards(lambda r: [(x - fmean(r)) / (pstdev(r) ** 2 + 1e-2) for x in r]),
        REWARDS,
    ),
    "mean of |A|": (
        of_rewards(
            lambda r: [
                a / (fmean(map(abs, above_the_others(r))) + 1e-6) for a in above_the_others(r)
            ]
        ),
        REWARDS,
    ),
    "clipped rewards": (of_rewards(lambda r: above_the_others([min(x, 0.5) for x in r])), REWARDS),
    "squared rewards": (of_rewards(lambda r: above_the_others([x * abs(x) for x in r])), REWARDS),
    "tanh of rewards": (
        of_rewards(lambda r: above_the_others([math.tanh(2 * x) for x in r])),
        REWARDS,
    ),
    "clipped credit": (
        of_rewards(lambda r: [min(max(a, -0.3), 0.3) for a in above_the_others(r)]),
        REWARDS,
    ),
    "positive credit only": (
        of_rewards(lambda r: [max(a, 0.0) for a in above_the_others(r)]),
        REWARDS,
    ),
    "negative credit only": (
        of_rewards(lambda r: [min(a, 0.0) for a in above_the_others(r)]),
        REWARDS,
    ),
    "ranks": (
        of_rewards(lambda r: [sum(x > y for y in r) - sum(x < y for y in r) for x in r]),
        REWARDS,
    ),
    "a softmax": (
        of_rewards(lambda r: (np.exp(r) / np.exp(r).sum() - 1 / len(r)).tolist()),
        REWARDS,
    ),
    "advantages of another rollout": (
        of_rewards(lambda r: above_the_others(r)[::-1]),
        {"opposite", "order"},
    ),
    "times the length": (over_tokens(lambda a, o: a * length(o)), {"length"}),
    "by the root of the length": (over_tokens(lambda a, o: a / length(o) ** 0.5), {"length"}),
    "by all tokens, the prompt's too": (over_tokens(lambda a, o: a / o.num_tokens), {"length"}),
    "a sign flip of long replies": (
        over_tokens(lambda a, o: -a if length(o) > 1 else a),
        {"length", "opposite", "cut_off"},
    ),
    "siblings of equal length": (of_group(same_length_mean), {"length"}),
    "the longest left out": (of_group(longest_left_out), {"length"}),
    "shifted by one token": (
        over_tokens(lambda a, o: [0.0] + [a] * (length(o) - 1)),
        {"place", "opposite"},
    ),
    "the last token is missing": (
        over_tokens(lambda a, o: [a] * (length(o) - 1) + [0.0]),
        {"place", "opposite"},
    ),
    "twice on the last token": (
        over_tokens(lambda a, o: [a] * (length(o) - 1) + [2 * a]),
        {"place"},
    ),
    "discounted from the end": (
        over_tokens(lambda a, o: [a * 0.9**t for t in reversed(range(length(o)))]),
        {"place"},
    ),
    "discounted from the start": (
        over_tokens(lambda a, o: [a * 0.9**t for t in range(length(o))]),
        {"place"},
    ),
    "by the token's id": (over_tokens(lambda a, o: a * (1 + 0.3 * tokens(o))), {"token"}),
    "the stop token counts twice": (
        over_tokens(lambda a, o: a * (1.0 + (tokens(o) == 2))),
        {"token"},
    ),
    "unlikely tokens only": (over_tokens(lambda a, o: a * (logprobs(o) < -0.7)), {"likelihood"}),
    "a penalty of cut replies": (
        of_group(lambda g: above_the_others([o.reward - 0.1 * o.is_truncated for o in g])),
        {"cut_off"},
    ),
    "an entropy bonus in the reward": (
        of_group(lambda g: above_the_others([o.reward - 0.05 * logprobs(o).sum() for o in g])),
        {"apart"},
    ),
    "a baseline of replies that ended": (of_group(mean_of_those_that_ended), {"cut_off"}),
    "cut replies left out": (of_group(only_those_that_ended), {"cut_off"}),
    "the KL with the other sign": (KLWithTheOtherSign, {"apart"}),
    "the KL of the token alone": (KLOfTheTokenAlone, {"apart"}),
    "k3 as a reward": (K3AsReward, {"apart"}),
    "the first turn only": (
        over_tokens(lambda a, o: [a] + [0.0] * (length(o) - 1) if o.num_turns > 1 else a),
        {"turns"},
    ),
    "each turn's own reward": (
        over_tokens(lambda a, o: turn_rewards(o) if o.num_turns > 1 else o.reward),
        {"turns"},
    ),
    "turns discounted by half": (
        over_tokens(
            lambda a, o: (
                [sum(turn_rewards(o)) - 0.5 * turn_rewards(o)[-1], turn_rewards(o)[-1]]
                if o.num_turns > 1
                else o.reward
            )
        ),
        {"turns"},
    ),
    "failed members turn the sign": (
        of_rewards(lambda r: [-r[0]] if len(r) == 1 else above_the_others(r)),
        {"failed"},
    ),
    "the batch's standard deviation": (over_batch(batch_std), REWARDS),
    "rewards of the group before": (over_batch(rewards_of_the_group_before), {"batch"}),
}
HARMLESS = {"unbiased", "scaled", "stale"}
PROBLEMS = {
    "failed members turn the sign": FAILED,
    "rewards of the group before": BATCH,
    "the mean of the other groups": BATCH,
    "unlikely tokens only": ("plain", "signed"),  # short replies have too few places to tell
}
FAST = ("the KL of the token alone", "the stop token counts twice")


def cases(names, fast=()):
    """As parameters; all but ``fast`` are slow together."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", cases(WRONG, FAST))
def test_a_wrong_estimator_is_called_wrong_and_its_cause_is_true(name):
    cls, causes = WRONG[name]
    problems = PROBLEMS.get(name, ONE)
    found = prove(
        cls(CONFIG), group_size=2, normalize_by="constant", staleness=(0,), problems=problems
    )
    assert not found.is_unbiased
    assert found.codes & causes, found.verdict
    assert found.codes <= causes | HARMLESS, found.verdict


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_credit_that_is_random_is_not_said_to_depend_on_others(draw):
    cls = of_rewards(lambda r: [2 * a * (draw() < 0.5) for a in above_the_others(r)])
    state = random.getstate()
    random.seed(1)
    np.random.seed(1)
    found = prove(cls(CONFIG), group_size=2, staleness=(0,), problems=(FEW["signed"],))
    random.setstate(state)
    assert found.codes == {"random"}, found.verdict


def position_baseline(credit, rollout):
    return [rollout.reward - 0.1 * t for t in range(length(rollout))]


def prefix_baseline(credit, rollout):
    """Depends on the tokens before, and not on the token itself."""
    before = np.cumsum([0, *tokens(rollout)[:-1]])
    return rollout.reward - 0.2 * (before % 3)


class DeclaredEntropy(Planted):
    def objective(self, outcomes):
        entropy = -(outcomes.probabilities * outcomes.log_probabilities).sum()
        return outcomes.mean_reward + 0.1 * entropy

    def spread(self, credit, rollout):
        return rollout.reward - 0.1 * to_go(logprobs(rollout))


class SquareOfTheMean(Planted):
    """(E r)^2 by pairs: 2 r_i times the mean of the others."""

    def objective(self, outcomes):
        return outcomes.mean_reward**2

    def credit(self, group):
        r = rewards_of(group)
        return [2 * x * (sum(r) - x) / (len(r) - 1) for x in r]


class PassAt2(Planted):
    def objective(self, outcomes):
        return 1 - (1 - outcomes.mean_reward) ** 2 if outcomes.is_binary else None

    def credit(self, group):
        r = rewards_of(group)
        return [2 * x * (1 - (sum(r) - x) / (len(r) - 1)) for x in r]


class LossToMinimize(Planted):
    def objective(self, outcomes):
        return -outcomes.mean_reward

    def credit(self, group):
        return [-r for r in rewards_of(group)]


def of_others(baseline):
    """The reward minus a function of the other rewards."""
    return of_rewards(lambda r: [x - baseline([*r[:i], *r[i + 1 :]]) for i, x in enumerate(r)])


def by_lengths_of_others(group):
    found = []
    for rollout in group:
        others = [each for each in group if each is not rollout]
        total = sum(map(length, others))
        mean = sum(length(each) * each.reward for each in others) / total
        found.append(rollout.reward - mean)
    return found


RIGHT = {
    "the median of the others": of_others(median),
    "the best of the others": of_others(max),
    "a constant": of_rewards(lambda r: [x - 0.37 for x in r]),
    "a baseline of the place": over_tokens(position_baseline),
    "a baseline of the tokens before": over_tokens(prefix_baseline),
    "the turns to come": over_tokens(
        lambda a, o: to_go(np.array(turn_rewards(o))) if o.num_turns > 1 else o.reward
    ),
    "the neighbor's reward": of_rewards(
        lambda r: [x - y for x, y in zip(r, [*r[1:], r[0]], strict=True)]
    ),
    "others weighted by length": of_group(by_lengths_of_others),
    "the first member only": of_rewards(lambda r: [r[0] - fmean(r[1:]), *([0.0] * (len(r) - 1))]),
    "the mean, times G / (G - 1)": of_rewards(
        lambda r: [(x - fmean(r)) * len(r) / (len(r) - 1) for x in r]
    ),
    "the mean of the other groups": over_batch(mean_of_the_other_groups),
    "a declared entropy": DeclaredEntropy,
    "a declared KL": WithKL,
    "the square of the mean": SquareOfTheMean,
    "pass at 2": PassAt2,
    "a loss to minimize": LossToMinimize,
}


@pytest.mark.parametrize("name", cases(RIGHT, ["a declared KL"]))
def test_a_right_estimator_is_not_called_wrong(name):
    problems = PROBLEMS.get(name, ONE)
    found = prove(
        RIGHT[name](CONFIG),
        group_size=2,
        normalize_by="constant",
        staleness=(0,),
        problems=problems,
    )
    assert {"unbiased"} <= found.codes <= {"unbiased", "undeclared"}, found.verdict


# -- the ratio of stale samples --------------------------------------------------------------------


class Weighed(Loss):
    """The credit of each token by a weight without a gradient."""

    name = "weighed"
    scope = "sequence"
    reads = ("advantages", "policy_lag", "entropies")

    def weigh(self, log_ratio, inputs):
        raise NotImplementedError

    def beside(self, log_ratio, inputs):
        return torch.zeros_like(log_ratio)

    def __call__(self, inputs):
        gap = inputs.trainer_logprobs - inputs.inference_logprobs
        log_ratio = torch.where(inputs.loss_mask, gap, 0.0)
        weight = self.weigh(log_ratio.detach(), inputs)
        terms = -inputs.advantages * log_ratio * weight + self.beside(log_ratio, inputs)
        return LossOutputs(torch.where(inputs.loss_mask, terms, 0.0).sum(), {})


def weighed(weigh, beside=None):
    methods = {"weigh": lambda self, log_ratio, inputs: weigh(log_ratio, inputs)}
    if beside is not None:
        methods["beside"] = lambda self, log_ratio, inputs: beside(log_ratio, inputs)
    return type("Planted", (Weighed,), methods)


def is_first(inputs):
    return inputs.loss_mask & ~inputs.loss_mask.roll(1)


def is_last(inputs):
    return inputs.loss_mask & ~inputs.loss_mask.roll(-1)


def is_good(inputs):
    return inputs.advantages > 0


STALE_FAULTS = {
    "on the first token only": (
        "no_ratio",
        weighed(lambda x, i: torch.where(is_first(i), x, 0.0).exp()),
    ),
    "not on the last token": (
        "no_ratio",
        weighed(lambda x, i: torch.where(is_last(i), 0.0, x).exp()),
    ),
    "from the second version on": (
        "no_ratio",
        weighed(lambda x, i: torch.where(i.policy_lag > 1, x, 0.0).exp()),
    ),
    "without one where credit is positive": (
        "no_ratio",
        weighed(lambda x, i: torch.where(is_good(i), 0.0, x.clamp(max=0)).exp()),
    ),
    "upside down where credit is negative": (
        "inverted",
        weighed(lambda x, i: torch.where(is_good(i), x, -x).exp()),
    ),
    "of the neighbor where credit is negative": (
        "shifted",
        weighed(lambda x, i: torch.where(is_good(i), x, x.roll(1)).exp()),
    ),
    "twice": ("excessive", weighed(lambda x, i: (2 * x).exp())),
    "a straight line of slope 2": ("excessive", weighed(lambda x, i: 1 + 2 * torch.expm1(x))),
    "its distance from 1": ("inverted", weighed(lambda x, i: 1 + torch.expm1(x).abs())),
    "the mean over the prompt too": ("diluted", weighed(lambda x, i: (x.sum() / len(x)).exp())),
    "a penalty with the other sign": (
        "away",
        weighed(lambda x, i: x.exp(), beside=lambda x, i: -0.5 * x.square()),
    ),
}
STALE_PROBLEMS = {
    # Elsewhere no token with positive credit becomes less likely: a cap at 1 is the same.
    "without one where credit is positive": FEW["two-turn"],
}
STALE_RIGHT = {
    "capped at 1": ("capped", weighed(lambda x, i: x.clamp(max=0).exp())),
    "capped at 1 for the reply": ("capped", weighed(lambda x, i: x.sum().clamp(max=0).exp())),
    "the reply's where credit is negative": (
        "mixed_kinds",
        weighed(lambda x, i: torch.where(is_good(i), x, x.sum()).exp()),
    ),
    "a penalty on the distance": (
        "per_token",
        weighed(lambda x, i: x.exp(), beside=lambda x, i: 0.01 * x.square()),
    ),
    "the mean of the reply": (
        "per_reply",
        weighed(lambda x, i: (x.sum() / i.loss_mask.sum()).exp()),
    ),
    "a mask of a tenth at both ends": (
        "clipped",
        weighed(lambda x, i: x.exp() * ((x.exp() - 1).abs() < 0.1)),
    ),
}


def stale_codes(found):
    return [each.stale.code for each in found.estimates if each.stale and each.loss == "own"]


def of_stale(loss, problems=(FEW["plain"],)):
    return prove(
        Planted(CONFIG),
        loss=loss,
        group_size=2,
        normalize_by="constant",
        staleness=(0, 1),
        problems=problems,
    )


@pytest.mark.parametrize("name", cases(STALE_FAULTS, ["a penalty with the other sign"]))
def test_a_wrong_weight_of_stale_samples_is_called(name):
    code, cls = STALE_FAULTS[name]
    found = of_stale(cls(CONFIG), problems=(STALE_PROBLEMS.get(name, FEW["plain"]),))
    assert stale_codes(found) == [code], found.verdict
    assert not found.is_unbiased and "unbiased" in found.codes


@pytest.mark.parametrize("name", cases(STALE_RIGHT, ["capped at 1"]))
def test_an_approximation_of_the_ratio_is_called_what_it_is(name):
    code, cls = STALE_RIGHT[name]
    found = of_stale(cls(CONFIG))
    assert stale_codes(found) == [code], found.verdict
    assert found.is_unbiased


@pytest.mark.slow
def test_a_mask_that_costs_more_than_no_ratio_says_so():
    found = of_stale(STALE_RIGHT["a mask of a tenth at both ends"][1](CONFIG))
    assert "more than without any ratio" in found.verdict
    assert "whatever their credit" in found.verdict
    assert "more than" not in of_stale(STALE_RIGHT["capped at 1"][1](CONFIG)).verdict


@pytest.mark.slow
def test_no_shipped_loss_is_accused_where_a_reply_has_three_tokens():
    """Trust regions that are narrower than a version of the lab, and tokens that a loss picks."""
    pytest.importorskip("prime_rl_clip_losses")
    for name in ("clip_cov", "gspo", "gmpo", "kl_cov"):
        options = {"staleness": (0, 2), "problems": ("plain",), "group_size": 2}
        found = prove(Planted(CONFIG), loss=name, **options)
        (stale,) = [each.stale for each in found.estimates if each.stale and each.loss == "own"]
        assert not stale.is_fault, (name, stale.text)
