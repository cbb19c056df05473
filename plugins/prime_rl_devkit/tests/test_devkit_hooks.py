"""The kit's checks of a module's hooks: sound ones pass, and each check can fail."""

import re

import pytest

from prime_rl import PluginConfig, hookimpl
from prime_rl_devkit.hooks import CHECKS, check_hooks

wrapper = hookimpl(wrapper=True)


class Halves:
    """Halves the credit, where there is any."""

    @wrapper
    def score_group(self, group):
        yield
        for rollout in group:
            if rollout.advantages is not None:
                rollout.assign_advantages(rollout.advantages / 2)

    @wrapper
    def filter_rollout(self, rollout):
        return [reason for reason in (yield) if reason != "too late"]

    @hookimpl
    def batch_packed(self, samples):
        self.seen = sum(len(sample) for sample in samples)

    @hookimpl
    def step_finished(self, metrics):
        self.loss = metrics["loss"]


class Hints:
    @hookimpl
    def prepare_rollout(self, plan):
        if isinstance(plan.prompt, str):
            plan.prompt += " Think."
        plan.max_completion_tokens = 8


class HintsAll:
    @hookimpl
    def prepare_rollout(self, plan):
        plan.prompt = f"{plan.prompt} Think."


class HintsInPlace:
    @hookimpl
    def prepare_rollout(self, plan):
        if isinstance(plan.prompt, list) and isinstance(plan.prompt[0]["content"], list):
            plan.prompt[0]["content"].append({"type": "text", "text": "Think."})


class Renumbers:
    @hookimpl
    def prepare_rollout(self, plan):
        plan.member = 0


class Freezes:
    @wrapper
    def prepare_rollout(self, plan):
        yield
        plan.temperature = 0.0


class SwallowsAPlan:
    @wrapper
    def prepare_rollout(self, plan):
        try:
            yield
        except Exception:
            return


class RaisesAfter:
    @wrapper
    def score_group(self, group):
        yield
        raise KeyError("oops")


class YieldsTwice:
    @wrapper
    def score_rollout(self, rollout):
        yield
        yield


class NeedsCredit:
    @wrapper
    def score_group(self, group):
        yield
        for rollout in group:
            rollout.assign_advantages(rollout.advantages / 2)


class GivesNan:
    @wrapper
    def score_batch(self, groups):
        yield
        for sample in groups[0][0].samples:
            sample.ref_logprobs = sample.token_ids * float("nan")


class CutsTheMask:
    @hookimpl
    def score_rollout(self, rollout):
        rollout.samples[0].loss_mask[-1] = True


class Swallows:
    @wrapper
    def score_group(self, group):
        try:
            yield
        except KeyError:
            raise
        except Exception:
            return


class Replaces:
    @wrapper
    def score_rollout(self, rollout):
        try:
            yield
        except Exception as error:
            raise RuntimeError("scoring failed") from error


class NoList:
    @wrapper
    def filter_rollout(self, rollout):
        yield


class SaysTrue:
    @hookimpl
    def filter_rollout(self, rollout):
        return True


class Rebinds:
    @hookimpl
    def batch_packed(self, samples):
        samples[0].advantages = samples[0].advantages / 2


class WritesInPlace:
    @hookimpl
    def batch_packed(self, samples):
        samples[0].advantages[:] = 0


class AddsAMetric:
    @hookimpl
    def step_finished(self, metrics):
        metrics["mine"] = 1.0


BROKEN = [
    ("prepares_rollouts", HintsAll, "prompt = .*role.*TypeError: it wrote list into a text"),
    ("prepares_rollouts", HintsInPlace, "it changed the example's own messages"),
    ("prepares_rollouts", Renumbers, "it set plan.member"),
    ("prepares_rollouts", Freezes, "prompt = '2 .*temperature"),
    ("passes_errors_on", SwallowsAPlan, "prepare_rollout: .* no error: it was swallowed"),
    ("scores_beside_any_algorithm", RaisesAfter, "with advantages: KeyError: 'oops'"),
    ("scores_beside_any_algorithm", YieldsTwice, "generator didn't stop"),
    ("scores_beside_any_algorithm", NeedsCredit, "without advantages: TypeError"),
    ("scores_beside_any_algorithm", GivesNan, "ref_logprobs of rollout 0.* not finite"),
    ("scores_beside_any_algorithm", CutsTheMask, "it changed tokens, masks or logprobs"),
    ("passes_errors_on", Swallows, "score_group: .* no error: it was swallowed"),
    ("passes_errors_on", Replaces, "score_rollout: .* RuntimeError: scoring failed"),
    ("filters_by_a_reason", NoList, "the wrapper gave None, expected the list"),
    ("filters_by_a_reason", SaysTrue, "got True, expected the reason"),
    ("only_reads", Rebinds, "replaced advantages of a sample"),
    ("only_reads", WritesInPlace, "ValueError: assignment destination is read-only"),
    ("only_reads", AddsAMetric, "TypeError: .*does not support item assignment"),
]


@pytest.mark.parametrize(
    ("check", "broken", "says"), BROKEN, ids=[broken.__name__ for _, broken, _ in BROKEN]
)
def test_a_plugin_broken_in_one_way_fails_that_check(check, broken, says):
    report = check_hooks("mine", broken())
    messages = {outcome.check: outcome.message for outcome in report.failed}
    assert [*messages] == [check], str(report)
    assert re.search(says, messages[check], re.DOTALL), messages[check]


def test_every_check_has_a_plugin_that_fails_it():
    assert {check for check, _, _ in BROKEN} == {check.__name__ for check in CHECKS}


def test_a_sound_plugin_passes_every_check():
    report = check_hooks("mine", Halves())
    assert len(report.passed) == len(CHECKS) - 1 and report.ok, str(report)
    assert [o.check for o in check_hooks("mine", Hints()).passed] == ["prepares_rollouts"]


def test_a_plugin_that_only_registers_has_no_hooks_to_check():
    class Registers:
        @hookimpl
        def register_algorithms(self):
            return [PluginConfig]

    assert check_hooks("mine", Registers()) is None
