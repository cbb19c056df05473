"""The kit's checks of filters, losses and samplers: sound ones pass, and each check can fail."""

import json
import random
import re

import pytest

from prime_rl import Filter, Head, Loss, LossOutputs, PluginConfig, Sampler, hookimpl, log_metric
from prime_rl_devkit.kinds import BY_KIND, check_offer


class Short(Filter):
    name = "short"

    @hookimpl
    def filter_rollout(self, rollout):
        return "too short" if rollout.num_trainable_tokens < 100 else None


class Keeps(Short):
    @hookimpl
    def filter_rollout(self, rollout):
        return None


class SaysTrue(Short):
    @hookimpl
    def filter_rollout(self, rollout):
        return True


class Forgets(Short):
    """Drops rollouts it has seen: two calls give two answers."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = set()

    @hookimpl
    def filter_rollout(self, rollout):
        if id(rollout) in self.seen:
            return "seen"
        self.seen.add(id(rollout))
        return None


class Writes(Short):
    @hookimpl
    def filter_rollout(self, rollout):
        rollout.samples[0].loss_mask[0] = False


class Reinforce(Loss):
    name = "reinforce"
    token_wise = True

    def per_token(self, inputs):
        return -inputs.advantages * inputs.trainer_logprobs * inputs.loss_weights

    def __call__(self, inputs):
        import torch

        return LossOutputs(torch.where(inputs.loss_mask, self.per_token(inputs), 0.0).sum(), {})


class Logs(Reinforce):
    def __call__(self, inputs):
        log_metric("tokens", inputs.loss_mask.sum())
        return super().__call__(inputs)


class NotReduced(Reinforce):
    def __call__(self, inputs):
        return LossOutputs(self.per_token(inputs), {})


class OffMask(Reinforce):
    def __call__(self, inputs):
        return LossOutputs(self.per_token(inputs).sum(), {})


class TopOffMask(Reinforce):
    reads = ("top_logprobs", "top_wanted")

    def __call__(self, inputs):
        gaps = inputs.top_logprobs - inputs.streams["top_wanted"] + 0 * inputs.streams["top_ids"]
        return LossOutputs(gaps.square().sum(), {})


class Explodes(Reinforce):
    def per_token(self, inputs):
        return (inputs.trainer_logprobs - inputs.trainer_logprobs.detach()).sqrt()


class Averages(Reinforce):
    def __call__(self, inputs):
        return LossOutputs(self.per_token(inputs)[inputs.loss_mask].mean(), {})


class Unweighted(Reinforce):
    def per_token(self, inputs):
        return -inputs.advantages * inputs.trainer_logprobs


class SeesNeighbors(Reinforce):
    def per_token(self, inputs):
        return super().per_token(inputs) * inputs.trainer_logprobs.sum()


class ReadsMore(Reinforce):
    reads = ()


class ReadsAbsent(Reinforce):
    def per_token(self, inputs):
        return super().per_token(inputs) * inputs.ref_logprobs


class SecretlyCompares(Reinforce):
    compares_with_sampler = False

    def per_token(self, inputs):
        return super().per_token(inputs) * inputs.inference_logprobs


class Critic(Head):
    name = "critic"
    reads = ("rewards",)
    writes = ("returns",)

    def build(self, hidden_size):
        from torch import nn

        return nn.Sequential(nn.Linear(hidden_size, 1), nn.Flatten(0))

    def prepare(self, inputs):
        return {"returns": inputs.streams["rewards"] - inputs.outputs}


class TwoOutputs(Critic):
    def build(self, hidden_size):
        from torch import nn

        return nn.Linear(hidden_size, 1)


class Constant(Critic):
    def build(self, hidden_size):
        from torch import nn

        return nn.Flatten(0) if hidden_size == 1 else nn.AvgPool1d(hidden_size)

    def prepare(self, inputs):
        return {}


class TooShort(Critic):
    def prepare(self, inputs):
        return {"returns": inputs.outputs[inputs.loss_mask]}


class InTurn(Sampler):
    name = "in_turn"

    def __init__(self, config, envs, seed):
        super().__init__(config, envs, seed)
        self.turn = 0

    def next_example(self):
        self.turn += 1
        return self.turn % 2, self.turn % 3

    def save(self, directory):
        (directory / "turn.json").write_text(json.dumps(self.turn))

    def load(self, directory):
        self.turn = json.loads((directory / "turn.json").read_text())


class Beyond(InTurn):
    def next_example(self):
        return 0, 3


class Dice(InTurn):
    def next_example(self):
        return 1, random.randrange(10**9)


class StartsAnew(InTurn):
    def load(self, directory):
        pass


BROKEN = [
    ("filter", "filter_answers", SaysTrue, "got True, expected the reason"),
    ("filter", "filter_answers", Forgets, r"it said \[\] and \['seen'\]"),
    ("filter", "filter_answers", Writes, "ValueError: assignment destination is read-only"),
    ("loss", "sums_over_the_mask", NotReduced, "expected LossOutputs with a 0-dim loss"),
    ("loss", "sums_over_the_mask", OffMask, r"the gradient is .* expected 0\.0 off the mask"),
    ("loss", "sums_over_the_mask", TopOffMask, r"the gradient is .* expected 0\.0 off the mask"),
    ("loss", "sums_over_the_mask", Explodes, "expected finite numbers"),
    ("loss", "is_a_sum", Averages, "one copy gives .*, two give "),
    ("loss", "weighs_each_term", Unweighted, "with twice the loss_weights, expected"),
    ("loss", "keeps_to_its_scope", SeesNeighbors, "log π of token 0 changed the gradient of other"),
    ("loss", "reads_what_it_declares", ReadsMore, "the loss is nan where what it does not declare"),
    ("loss", "reads_what_it_declares", ReadsAbsent, "TypeError: .*NoneType"),
    ("loss", "reads_what_it_declares", SecretlyCompares, "set compares_with_sampler = True"),
    ("head", "head_gives_an_output_each", TwoOutputs, r"gave .*5, 1.*expected .* shape \(5,\)"),
    ("head", "head_gives_an_output_each", Constant, r"gave|no gradient"),
    ("head", "head_prepares_what_it_writes", Constant, r"writes is \('returns',\), .* gave \(\)"),
    ("head", "head_prepares_what_it_writes", TooShort, "for 5 tokens, expected 5 finite"),
    ("sampler", "sampler_in_range", Beyond, r"gave \(env 0, example 3\)"),
    ("sampler", "sampler_in_range", Dice, "seed 0 gave .* Draw from self.seed"),
    ("sampler", "sampler_resumes", StartsAnew, "after a resume, expected"),
]


@pytest.mark.parametrize(
    ("kind", "check", "broken", "says"), BROKEN, ids=[broken.__name__ for _, _, broken, _ in BROKEN]
)
def test_a_class_broken_in_one_way_fails_that_check(kind, check, broken, says):
    if kind == "loss":
        pytest.importorskip("torch")
    report = check_offer(kind, broken, PluginConfig())
    messages = {outcome.check: outcome.message for outcome in report.failed}
    assert check in messages, str(report)
    assert re.search(says, messages[check], re.DOTALL), messages[check]


def test_every_check_has_something_that_fails_it():
    assert {check for _, check, _, _ in BROKEN} == {
        check.__name__ for checks in BY_KIND.values() for check in checks
    }


@pytest.mark.parametrize(
    ("kind", "sound"),
    [
        ("filter", Short),
        ("filter", Keeps),
        ("loss", Reinforce),
        ("loss", Logs),
        ("head", Critic),
        ("sampler", InTurn),
    ],
)
def test_a_sound_class_passes(kind, sound):
    report = check_offer(kind, sound, PluginConfig())
    assert report.ok, str(report)


def test_a_kind_without_checks_says_so():
    (outcome,) = check_offer("monitor", Short, PluginConfig()).outcomes
    assert outcome.status == "skipped"
    assert outcome.message == "the kit has no checks of monitors: test it yourself"
