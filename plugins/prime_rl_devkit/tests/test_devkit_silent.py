"""`plugins check` finds what a run would refuse, and what trains in silence."""

from __future__ import annotations

import asyncio
import re

import pytest

from prime_rl import (
    Algorithm,
    Filter,
    Loss,
    LossOutputs,
    Observer,
    PluginConfig,
    Sampler,
    TokenMetric,
    hookimpl,
)
from prime_rl.testing import conformance
from prime_rl_devkit.hooks import check_hooks
from prime_rl_devkit.kinds import builds, check_offer
from prime_rl_devkit.verdicts import run


class Sound(Algorithm):
    """Each test plants one fault."""

    name = "planted"
    group_relative = False

    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(float(rollout.reward))


class Pops(Sound):
    @hookimpl
    async def score_group(self, group):
        group.pop()


class Shares(Sound):
    @hookimpl
    async def score_group(self, group):
        for rollout in group[1:]:
            rollout.samples.append(group[0].samples[0])


class Background(Sound):
    @hookimpl
    async def score_group(self, group):
        self.task = asyncio.ensure_future(super().score_group(group))


class Forgets(Sound):
    async def credit(self, rollout): ...

    @hookimpl
    async def score_group(self, group):
        await super().score_group(group)
        self.credit(group[0])


class Exits(Sound):
    @hookimpl
    async def score_rollout(self, rollout):
        raise SystemExit(0)


class Cancels(Sound):
    @hookimpl
    async def score_rollout(self, rollout):
        raise asyncio.CancelledError


class Ends(Sound):
    @hookimpl
    async def score_rollout(self, rollout):
        raise GeneratorExit


class Text(Sound):
    @hookimpl
    async def score_rollout(self, rollout):
        rollout.metrics["verdict"] = "good"


class Bool(Sound):
    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward > 0.5)


class Words(Sound):
    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(str(rollout.reward))


class Hash(Sound):
    @hookimpl
    async def score_group(self, group):
        await super().score_group(group)
        for rollout in group:
            rollout.assign_stream("key", 2**40 + rollout.group_id)


class Misnames(Sound):
    def __init__(self, config):
        super().__init__(config)
        self.action_los = "ce"


class Renames(Sound):
    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            rollout.assign_stream("advantages", rollout.reward)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (Pops, "the list of a group's members is read only"),
        (Shares, "and in another rollout"),
        (Background, "advantages were written outside of a scoring hook"),
        (Forgets, r"Forgets.credit\(\) was never awaited"),
        (Exits, r"it raised SystemExit\(0\)"),
        (Cancels, "it raised CancelledError, and nothing has cancelled the hook"),
        (Ends, "it raised GeneratorExit, which is no Exception"),
        (Text, "rollout.metrics.'verdict'. is 'good', expected a number"),
        (Bool, "got bool, expected numbers"),
        (Words, "got text, such as"),
        (Hash, "integer 1099511627776, which int32 cannot hold"),
        (Renames, "Use assign_advantages"),
    ],
)
def test_a_fault_of_an_algorithm_is_found_with_its_cause(broken, says):
    report = conformance(broken(PluginConfig()))
    assert report.failed and re.search(says, report.failed[0].message), str(report)


def test_state_on_the_class_is_found_where_credit_is_the_same():
    class OnClass(Sound):
        seen = {}

        @hookimpl
        async def score_group(self, group):
            await super().score_group(group)
            self.seen[group[0].group_id] = len(group)

    report = conformance(OnClass(PluginConfig()))
    (failed,) = report.failed
    assert failed.check == "neighbours" and "OnClass.seen has changed" in failed.message


def test_a_misspelt_attribute_of_an_instance_is_found():
    outcome = run(builds, "algorithm", Misnames, PluginConfig())
    assert outcome.status == "failed" and "did you mean 'action_loss'" in outcome.message


def test_an_exit_in_any_check_is_a_failure():
    class Leaves(Filter):
        name = "leaves"

        @hookimpl
        def filter_rollout(self, rollout):
            raise SystemExit(0)

    report = check_offer("filter", Leaves, PluginConfig())
    assert "SystemExit(0)" in report.failed[0].message


def test_a_wrapper_that_swallows_is_found():
    class Swallows:
        @hookimpl(wrapper=True)
        def score_rollout(self, rollout):
            try:
                return (yield)
            except Exception:
                return None

    report = check_hooks("mine", Swallows())
    assert any("it was swallowed" in each.message for each in report.failed)


def test_text_metrics_of_an_observer_and_of_a_sampler():
    class Says(Observer):
        name = "says"

        def take_metrics(self):
            return {"verdict": "fine"}

    class Draws(Sampler):
        name = "draws"

        def next_example(self):
            return 0, 0

        def metrics(self):
            return {"verdict": "fine"}

    outcome = run(builds, "observer", Says, PluginConfig())
    assert "take_metrics gave 'verdict': 'fine'" in outcome.message
    report = check_offer("sampler", Draws, PluginConfig())
    assert "metrics gave 'verdict': 'fine'" in report.failed[0].message


# -- losses ----------------------------------------------------------------------------------------


class Plain(Loss):
    """Sums of a term per token."""

    scope = "token"
    name = "planted"
    compares_with_sampler = False
    reads = ("advantages",)

    def term(self, inputs, torch):
        return -inputs.trainer_logprobs * inputs.advantages

    def __call__(self, inputs):
        import torch

        weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
        term = torch.where(inputs.loss_mask, self.term(inputs, torch) * weights, 0.0)
        return LossOutputs(loss=self.total(term, inputs), metrics={})

    def total(self, term, inputs):
        return term.sum()


class NextAdvantage(Plain):
    def term(self, inputs, torch):
        return -inputs.trainer_logprobs * (inputs.advantages - inputs.advantages.roll(-1))


class Whitens(Plain):
    def term(self, inputs, torch):
        return -inputs.trainer_logprobs * (inputs.advantages - inputs.advantages.mean())


class ScalesByTheLargest(Plain):
    reads = ("advantages", "scores")

    def term(self, inputs, torch):
        return -inputs.trainer_logprobs * inputs.advantages / inputs.streams["scores"].abs().max()


class OffTheMask(Plain):
    def term(self, inputs, torch):
        return -inputs.trainer_logprobs * inputs.advantages[-1]


class MeanMu(Plain):
    compares_with_sampler = True

    def term(self, inputs, torch):
        return -inputs.trainer_logprobs * inputs.advantages * inputs.inference_logprobs.mean()


class WeightedMean(Plain):
    def total(self, term, inputs):
        return term.sum() / inputs.loss_weights[inputs.loss_mask].sum()


class MeanOfTheRow(Plain):
    scope = "sequence"

    def total(self, term, inputs):
        return term.mean()


class MeanOfMembers(Plain):
    scope = "rollout"

    def total(self, term, inputs):
        return term.sum() / inputs.loss_mask.sum()


class CountsText(Plain):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return LossOutputs(loss=outputs.loss, metrics={"how": "well"})


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (NextAdvantage, "^advantages of token 1 changed the gradient of other tokens"),
        (Whitens, "^advantages of token 0 changed the gradient"),
        (ScalesByTheLargest, "^scores of token . changed the gradient"),
        (OffTheMask, "^advantages of token 5 changed the gradient"),
        (MeanMu, "^inference_logprobs of token 0 changed the gradient"),
        (WeightedMean, "it is no sum"),
        (MeanOfTheRow, "it is a mean"),
        (MeanOfMembers, "it is a mean"),
        (CountsText, "metric 'how' is 'well'"),
    ],
)
def test_a_fault_of_a_loss_is_found_with_its_cause(broken, says):
    pytest.importorskip("torch")
    report = check_offer("loss", broken, PluginConfig())
    assert any(re.search(says, each.message) for each in report.failed), str(report)


def test_losses_of_one_term_per_token_pass():
    torch = pytest.importorskip("torch")

    class Measures(Plain):
        def __call__(self, inputs):
            outputs = super().__call__(inputs)
            metric = TokenMetric(torch.ones_like(inputs.advantages), inputs.loss_mask)
            return LossOutputs(loss=outputs.loss, metrics={"ones": metric})

    for sound in (Plain, Measures):
        report = check_offer("loss", sound, PluginConfig())
        assert report.ok, str(report)


def test_no_shipped_loss_is_accused_in_a_run():
    pytest.importorskip("torch")
    from prime_rl.registry.components import installed_losses
    from prime_rl.trainer.loss_probe import leak_of, mean_of

    for name, offered in installed_losses().installed.items():
        try:
            loss = offered.cls(offered.cls.config_class())
        except ValueError:  # a required setting
            continue
        assert not mean_of(offered.cls, loss), name
        assert not leak_of(offered.cls, loss), name
