"""Every check of the kit can fail: a plugin for each, broken in that one way."""

import asyncio
import itertools
import random
import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from prime_rl import Algorithm, ConfigError, FrozenModel, PluginConfig, hookimpl
from prime_rl.testing import (
    CHECKS,
    FakeHost,
    check_algorithm,
    conformance,
    conformance_group,
    make_group,
)
from prime_rl.testing.host import conformance_host
from prime_rl_devkit.algorithms.subject import Subject
from prime_rl_devkit.algorithms.suite import run_check


class Sound(Algorithm):
    """Credit is the reward above the group's mean."""

    name = "sound"
    group_relative = True

    def credit(self, group):
        first = group[0].reward
        offset = np.mean([rollout.reward - first for rollout in group])
        return [rollout.reward - first - offset for rollout in group]

    @hookimpl
    async def score_group(self, group):
        for rollout, credit in zip(group, self.credit(group), strict=True):
            rollout.assign_advantages(credit)


class Sampled(Sound):
    """Writes columns without ``assign_*``."""

    stream = "advantages"

    @hookimpl
    async def score_group(self, group):
        await super().score_group(group)
        for rollout in group:
            for sample in rollout.samples:
                setattr(sample, self.stream, self.column(sample))


class TooShort(Sampled):
    def column(self, sample):
        return np.zeros(len(sample) - 1, np.float32)


class NotFinite(Sampled):
    stream = "ref_logprobs"

    def column(self, sample):
        return np.full(len(sample), np.nan, np.float32)


class OffMask(Sampled):
    def column(self, sample):
        return np.ones(len(sample), np.float32)


class KlOffMask(Sampled):
    stream = "ref_kl_weights"

    def column(self, sample):
        return np.ones(len(sample), np.float32)


class SaysCe(Sound):
    """Declares one component and feeds another."""

    action_loss = "ce"

    @hookimpl
    async def score_group(self, group):
        await super().score_group(group)
        for rollout in group:
            rollout.assign_weights("ce", np.zeros(rollout.num_tokens))
            rollout.assign_weights("rl", np.ones(rollout.num_trainable_tokens))


class Nothing(Algorithm):
    name = "nothing"


class LeavesOneOut(Sound):
    def credit(self, group):
        total = sum(rollout.reward for rollout in group)
        return [r.reward - (total - r.reward) / (len(group) - 1) for r in group]


class OwnReward(Sound):
    """For a lone rollout, the mean of the others is 0."""

    group_relative = True

    def credit(self, group):
        total, others = sum(rollout.reward for rollout in group), max(len(group) - 1, 1)
        return [r.reward - (total - r.reward) / others for r in group]


class Residue(Sound):
    """The plain mean of equal floats is not always that float."""

    group_relative = True

    def credit(self, group):
        mean = sum(rollout.reward for rollout in group) / len(group)
        return [rollout.reward - mean for rollout in group]


class FirstPlace(Sound):
    group_relative = False

    def credit(self, group):
        return [credit + (index == 0) for index, credit in enumerate(super().credit(group))]


class DividesByMean(Sound):
    def credit(self, group):
        mean = sum(rollout.reward for rollout in group) / len(group)
        return [credit / mean for credit in super().credit(group)]


class Squares(Sound):
    def credit(self, group):
        return [rollout.reward**2 for rollout in group]


class SpreadsNaN(Sampled):
    """Turns a reward of nan into a stream of nan."""

    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            for sample in rollout.samples:
                sample.advantages = np.where(sample.loss_mask, np.float32(rollout.reward), 0)


class Sorts(Sound):
    @hookimpl
    async def score_group(self, group):
        await super().score_group(group)
        group.sort(key=lambda rollout: rollout.reward)


class Shapes(Sound):
    """Shapes the reward in place, so that the next plugin and every metric see it shaped."""

    @hookimpl
    async def score_group(self, group):
        for rollout in group:
            rollout.reward -= 0.125
        await super().score_group(group)


class CutsMask(Sound):
    @hookimpl
    async def score_rollout(self, rollout):
        rollout.samples[0].loss_mask[-1] = True


class Dice(Sound):
    group_relative = False

    def credit(self, group):
        return [credit + random.random() for credit in super().credit(group)]


class WaitsOnSelf(Sound):
    """Keeps a group on self while it waits."""

    @hookimpl
    async def score_group(self, group):
        self.mean = np.mean([rollout.reward for rollout in group])
        await asyncio.sleep(0)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - self.mean)


class OnTheClass(Sound):
    """Two envs share state of one."""

    seen: list[float] = []

    def credit(self, group):
        self.seen.extend(rollout.reward for rollout in group)
        return [rollout.reward - np.mean(self.seen) for rollout in group]


class KeepsObject(Sound):
    @hookimpl
    async def score_rollout(self, rollout):
        rollout.info["judge"] = object()


class Whitens(Sound):
    """Divides by the deviation of the batch."""

    epsilon = 1e-8

    @hookimpl
    async def score_batch(self, groups):
        rollouts = [rollout for group in groups for rollout in group]
        scale = np.std([float(rollout.advantages[0]) for rollout in rollouts]) + self.epsilon
        for rollout in rollouts:
            self.write(rollout, rollout.advantages / scale)

    def write(self, rollout, credit):
        rollout.assign_advantages(credit)


class DividesByZero(Whitens):
    """Without credit in the batch, its deviation is 0; writes past the check of ``assign_*``."""

    epsilon = 0.0

    def write(self, rollout, credit):
        for sample in rollout.samples:
            sample.advantages = np.where(sample.loss_mask, credit[0], np.float32(0))


class AcrossEnvs(Whitens):
    """Whitens with the batches of other envs."""

    seen: list[float] = []

    @hookimpl
    async def score_batch(self, groups):
        self.seen.extend(rollout.reward for group in groups for rollout in group)
        await asyncio.sleep(0)
        for group in groups:
            for rollout in group:
                rollout.assign_advantages(rollout.reward - np.mean(self.seen))


TEACHER = FrozenModel(name="t", base_url=("http://127.0.0.1:1/v1",))


class Distils(Algorithm):
    name = "distils"
    action_loss = "ref_kl"

    async def setup(self, host):
        self.teacher = host.connect(TEACHER)

    @hookimpl
    async def score_rollout(self, rollout):
        columns = [await self.teacher.logprobs(s.token_ids) for s in rollout.samples]
        rollout.assign_ref_logprobs(np.concatenate([self.align(each) for each in columns]))

    def align(self, column):
        return column


class OffByOne(Distils):
    """Reads position t as the logprob of token t + 1."""

    def align(self, column):
        return np.append(column[1:], np.float32(0.0))


class WithKl(Distils):
    """rl credit, and a term towards a reference on the same tokens, which pulls the other way."""

    action_loss = "rl"
    group_relative = True

    @hookimpl
    async def score_group(self, group):
        first = group[0].reward
        offset = np.mean([rollout.reward - first for rollout in group])
        for rollout in group:
            rollout.assign_advantages(rollout.reward - first - offset)
            rollout.assign_weights("ref_kl", 4.0)


class WrongWayWithKl(WithKl):
    @hookimpl
    async def score_group(self, group):
        await super().score_group(group)
        for rollout in group:
            rollout.assign_weights("rl", -1.0)


class WrongWay(Sound):
    @hookimpl
    async def score_group(self, group):
        await super().score_group(group)
        for rollout in group:
            rollout.assign_weights("rl", -np.ones(rollout.num_trainable_tokens))


class NoSignal(Sound):
    def credit(self, group):
        return [0.0] * len(group)


class Undeclared(Algorithm):
    name = "undeclared"
    credit = Sound.credit
    score_group = Sound.score_group


class SaysAlone(Sound):
    """Compares siblings, and declares that it needs none."""

    group_relative = False
    needs_siblings = False


class Running(Sound):
    """A baseline that outlives the group."""

    group_relative = False

    def __init__(self, config):
        super().__init__(config)
        self.baseline = 0.0

    def credit(self, group):
        credit = []
        for rollout in group:
            credit.append(rollout.reward - self.baseline)
            self.baseline += 0.5 * (rollout.reward - self.baseline)
        return credit

    def save(self, directory):
        (directory / "baseline").write_text(str(self.baseline))

    def load(self, directory):
        self.baseline = float((directory / "baseline").read_text())


class SavesNothing(Running):
    order_dependent = True
    save = Algorithm.save


class Hints(Sound):
    """Of texts only, as its envs give them."""

    async def setup(self, host):
        self.hint = host.env

    @hookimpl
    async def prepare_rollout(self, plan):
        plan.prompt, plan.temperature = plan.prompt + self.hint, 0.5


class LoadsNothing(Running):
    def load(self, directory):
        pass


class Colder(Sound):
    """Samples at a temperature at which it cannot learn."""

    needs_temperature = 1.0

    @hookimpl
    def prepare_rollout(self, plan):
        plan.temperature = 0.5


class Penalizes(Sound):
    @hookimpl
    def prepare_rollout(self, plan):
        plan.extra_body["repetition_penalty"] = 1.1


class HintsBeforeSetup(Sound):
    @hookimpl
    async def prepare_rollout(self, plan):
        plan.prompt = f"{plan.prompt} {self.hint}"


class WantsTooMany(Sound):
    @hookimpl
    def wanted_members(self, progress):
        return progress.max_group_size + 1


class TossesACoin(Sound):
    @hookimpl
    def wanted_members(self, progress):
        return 2 + next(COIN) % 3


COIN = itertools.count()


BROKEN = [
    ("streams_align", TooShort, "advantages of rollout 0, sample 0, .*wrong length"),
    ("streams_align", NotFinite, "ref_logprobs of rollout 0, sample 0, .*not finite"),
    ("credit_on_mask", OffMask, "advantages of rollout 0, sample 0: off the mask: got 4 values"),
    ("credit_on_mask", KlOffMask, "ref_kl_weights of rollout 0, sample 0: off the mask"),
    ("declared_component", SaysCe, "no sampled token feeds ce; they feed rl"),
    ("declared_component", Nothing, "no advantages were assigned"),
    ("group_of_one", LeavesOneOut, "rewards .0.5.: ZeroDivisionError"),
    ("group_of_one", OwnReward, "a lone rollout with reward 0.5: got credit 0.5, expected 0.0"),
    ("tied_group", Residue, "3 rewards of 0.1: got credit 1.*e-17, expected exactly 0.0"),
    ("tied_group", FirstPlace, "rollouts 0 and 1 are equal but for their place"),
    ("failed_group", DividesByMean, "rewards .0.0, 0.0, 0.0.: "),
    ("failed_group", DividesByZero, "advantages of rollout 0, .*not finite"),
    ("extreme_rewards", Squares, r"rewards .1e.30, 0.0, 5e.29.: StreamError"),
    ("nan_reward", SpreadsNaN, "advantages of .*not finite"),
    ("permutation", FirstPlace, r"in the order .2, 0, 3, 1.: advantages of sample"),
    ("inputs_kept", Sorts, "the group's own list was reordered"),
    ("inputs_kept", Shapes, "rollout 0: reward was changed from 1.0 to 0.875"),
    ("inputs_kept", CutsMask, "rollout 0: sample 0 loss_mask was changed"),
    ("deterministic", Dice, "two fresh instances gave"),
    ("concurrent_groups", WaitsOnSelf, "two groups mixed: advantages of sample"),
    ("neighbours", OnTheClass, "beside other envs: advantages of sample"),
    ("neighbours", AcrossEnvs, "beside other envs: advantages of sample"),
    ("round_trip", KeepsObject, "info is .*object object.* and came back as"),
    ("reference_aligned", OffByOne, r"position 2 changed ref_logprobs at \[1\]"),
    ("group_relative", Undeclared, "Declare group_relative = True"),
    ("siblings", SaysAlone, "scored alone instead of with its siblings: advantages of sample 0"),
    ("state_resumes", SavesNothing, "save writes nothing: a resumed run starts anew"),
    ("state_resumes", LoadsNothing, "after save and load: advantages of sample 0"),
    ("prepares", Colder, "set temperature = 0.5, and needs_temperature is 1.0"),
    ("prepares", Penalizes, "repetition_penalty would shape or replace the distribution"),
    ("prepares", HintsBeforeSetup, r"'2 \+ 2\?': AttributeError: .*'hint'"),
    ("sizes", WantsTooMany, "gave 7, expected a whole number from 1 to max_group_size = 6"),
    ("sizes", TossesACoin, "members, and . when it is asked again"),
    ("gradient", WrongWay, "sample 0, token 2: credit 0.5, but its logprob went from"),
    ("gradient", WrongWayWithKl, "sample 0, token 2: credit 0.5, but its logprob went from"),
    ("gradient", NoSignal, "give no gradient"),
]


@pytest.fixture(autouse=True)
def fresh_class_state():
    OnTheClass.seen.clear()
    AcrossEnvs.seen.clear()


@pytest.mark.filterwarnings("ignore:invalid value|divide by zero|overflow:RuntimeWarning")
@pytest.mark.parametrize(
    ("check", "broken", "says"), BROKEN, ids=[f"{c}-{cls.__name__}" for c, cls, _ in BROKEN]
)
def test_a_plugin_that_is_broken_in_one_way_fails_that_check(check, broken, says):
    if check == "gradient":
        pytest.importorskip("torch")
    subject = Subject(broken, PluginConfig(), conformance_group, conformance_host)
    outcome = run_check(subject, check)
    assert outcome.status == "failed"
    assert re.search(says, outcome.message, re.DOTALL), outcome.message


def test_every_check_has_a_plugin_that_fails_it():
    assert {check for check, _, _ in BROKEN} == set(CHECKS)


@pytest.mark.parametrize("algorithm", [Sound, Whitens, Distils, WithKl, Hints])
def test_a_sound_algorithm_fails_nothing(algorithm):
    report = conformance(algorithm(PluginConfig()))
    assert report.ok, str(report)
    assert len(report.outcomes) == len(CHECKS)


@pytest.mark.parametrize("broken", [Dice, Sorts, CutsMask, KeepsObject, OffByOne, WaitsOnSelf])
def test_a_fault_of_behavior_fails_few_checks(broken):
    """One fault fails at most three checks."""
    assert 1 <= len(conformance(broken(PluginConfig())).failed) <= 3


def test_streams_that_do_not_align_skip_the_other_checks():
    report = conformance(TooShort(PluginConfig()))
    assert [outcome.check for outcome in report.failed] == ["streams_align"]
    assert {outcome.message for outcome in report.skipped} == {"streams_align failed"}


def test_order_is_not_checked_for_an_algorithm_with_a_memory():
    report = conformance(Running(PluginConfig()))
    assert report.ok, str(report)
    skipped = {outcome.check: outcome.message for outcome in report.skipped}
    assert "depends on what was scored before" in skipped["permutation"]


def test_the_report_names_the_algorithm_and_reads_as_text_and_as_json():
    report = conformance(Sorts(PluginConfig()))
    text = str(report)
    with_torch, without = "14 passed, 2 failed, 5 skipped", "13 passed, 2 failed, 5 skipped"
    counts = with_torch if find_spec("torch") else without
    assert text.splitlines()[0] == f"algorithm 'sound': {counts}"
    assert "  failed  inputs_kept: the group's own list was reordered" in text
    table = report.as_dict()
    assert (table["kind"], table["name"]) == ("algorithm", "sound")
    assert table["ok"] is False
    assert [row["check"] for row in table["checks"]] == list(CHECKS)
    assert all(row["promise"].endswith(".") for row in table["checks"])


def test_without_a_distribution_that_brings_the_checks_nothing_passes(monkeypatch):
    monkeypatch.setattr(sys, "path", [])  # where distributions are found
    for ask in (lambda: check_algorithm(Sound(PluginConfig())), lambda: list(CHECKS)):
        with pytest.raises(ConfigError, match="checks of algorithms are not installed"):
            ask()


def test_check_algorithm_raises_with_every_failure_its_line_and_its_cause():
    with pytest.raises(AssertionError, match=r"failed  group_of_one: rewards \[0\.5\]") as caught:
        check_algorithm(LeavesOneOut(PluginConfig()))
    line = LeavesOneOut.credit.__code__.co_firstlineno + 2
    assert f"ZeroDivisionError: float division by zero (line {line} of {__file__})" in str(
        caught.value
    )
    assert "failed_group" in str(caught.value)
    assert isinstance(caught.value.__cause__, AssertionError)
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


class NeedsVerdict(Sound):
    def credit(self, group):
        for rollout in group:
            if "verdict" not in rollout.info:
                raise ConfigError("info has no 'verdict'")
        return super().credit(group)


def test_a_custom_group_factory():
    def judged(rewards):
        group = conformance_group(rewards)
        for rollout in group:
            rollout.info["verdict"] = "good"
        return group

    algorithm = NeedsVerdict(PluginConfig())
    with pytest.raises(ConfigError, match="verdict"):
        check_algorithm(algorithm)
    assert check_algorithm(algorithm, make_group=judged).ok


def test_a_custom_host_factory():
    asked = []

    class Named(Sound):
        async def setup(self, host):
            asked.append(host.env)

    check_algorithm(Named(PluginConfig()), make_host=lambda: FakeHost(env="mine"))
    assert set(asked) == {"mine"}


def test_make_group_is_a_group_factory():
    assert check_algorithm(Sound(PluginConfig()), make_group=make_group).ok
