"""The kit's checks by kind: sound ones pass, and each check can fail."""

import json
import random
import re
from dataclasses import replace

import pytest

from prime_rl import (
    ConfigError,
    Filter,
    Head,
    Loss,
    LossOutputs,
    ModelMaker,
    Monitor,
    PluginConfig,
    RendererOffer,
    Sampler,
    Source,
    hookimpl,
    log_metric,
)
from prime_rl.testing import make_rollout
from prime_rl_app.children import LocalLauncher
from prime_rl_devkit.kinds import BY_KIND, builds, check_offer
from prime_rl_devkit.verdicts import run


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


class AveragesEachSequence(Averages):
    token_wise = False


class Detached(Reinforce):
    def per_token(self, inputs):
        return super().per_token(inputs).detach()


class SequenceRatio(Reinforce):
    """GSPO, declared as a sum of terms of single tokens."""

    def per_token(self, inputs):
        gaps = inputs.trainer_logprobs - inputs.inference_logprobs
        ratio = (gaps * inputs.loss_mask).sum() / inputs.loss_mask.sum()
        return -inputs.advantages * ratio.exp() * inputs.loss_weights


class OfASequence(SequenceRatio):
    token_wise = False


class OfAHead(Reinforce):
    """Trains a head alone, whose output it reads."""

    reads = ("values",)

    def per_token(self, inputs):
        return inputs.streams["values"].square() * inputs.loss_weights


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


class Refuses(InTurn):
    def reject(self, group):
        return len(group) > 1


class Demonstrations(Source):
    name = "demonstrations"
    feeds = frozenset({"ce"})
    num_examples = 3

    def __init__(self, config):
        super().__init__(config)
        self.given = 0

    def rollout(self, request):
        return make_rollout(completion=2 + self.given, group_id=request.group_id)

    async def group(self, request):
        self.given += 1
        return [self.rollout(request)]

    def save(self, directory):
        (directory / "given").write_text(str(self.given))

    def load(self, directory):
        self.given = int((directory / "given").read_text())


class Scored(Demonstrations):
    def rollout(self, request):
        rollout = super().rollout(request)
        rollout.assign_advantages(1.0)
        return rollout


class OtherGroup(Demonstrations):
    def rollout(self, request):
        return make_rollout(group_id=request.group_id + 7)


class FeedsNothing(Demonstrations):
    feeds = frozenset({"echo"})


class ForgetsSome(Demonstrations):
    def load(self, directory):
        pass


class Prints(Monitor):
    name = "prints"

    def log(self, step, metrics):
        (self.run_dir / "log").write_text(f"{step} {dict(metrics)}")


class InOrder(Prints):
    def __init__(self, config, run_dir):
        super().__init__(config, run_dir)
        self.last = -1

    def log(self, step, metrics):
        assert step > self.last, f"step {step} after {self.last}"
        self.last = step


class Renames(Prints):
    def log(self, step, metrics):
        metrics["mine"] = 1.0


class Rewrites(Prints):
    def log_rollouts(self, step, rollouts, dropped):
        for sample in rollouts[0].samples:
            sample.advantages = sample.advantages * 0


class Elsewhere(LocalLauncher):
    def start(self, task, command):
        return super().start(task, replace(command, env={"GREETING": "good-bye"}))


class Nowhere(LocalLauncher):
    def place(self, tasks, run_dir, tell):
        return {}


class LetsRun(LocalLauncher):
    """Ends nothing when asked; the test ends it all the same."""

    def __init__(self, config):
        super().__init__(config)
        self.started = []

    def end(self, processes):
        pass

    def close(self):
        super().end(self.started)
        super().close()

    def start(self, task, command):
        self.started.append(super().start(task, command))
        return self.started[-1]


class Knows(RendererOffer):
    name = "knows"

    def check(self, model):
        raise ConfigError(f"{model}: no template")

    def build(self, model, fields):
        return fields


class NoBuild(RendererOffer):
    name = "no_build"


class Raises(Knows):
    def check(self, model):
        raise KeyError(model)


class Makes(ModelMaker):
    name = "makes"
    seeded = True

    def make(self, directory, seed, progress):
        (directory / "config.json").write_text("{}")
        weights = random.Random(seed if self.seeded else None).randbytes(8)
        (directory / "model.safetensors").write_bytes(weights)
        progress("made", 1.0)


class MakesAnother(Makes):
    seeded = False


class MakesNothing(Makes):
    def make(self, directory, seed, progress):
        pass


class InPercent(Makes):
    def make(self, directory, seed, progress):
        super().make(directory, seed, lambda state, share: progress(state, 100 * share))


BROKEN = [
    ("filter", "filter_answers", SaysTrue, "got True, expected the reason"),
    ("filter", "filter_answers", Forgets, r"it said \[\] and \['seen'\]"),
    ("filter", "filter_answers", Writes, "ValueError: assignment destination is read-only"),
    ("loss", "sums_over_the_mask", NotReduced, "expected LossOutputs with a 0-dim loss"),
    ("loss", "sums_over_the_mask", OffMask, r"the gradient is .* expected 0\.0 off the mask"),
    ("loss", "sums_over_the_mask", TopOffMask, r"the gradient is .* expected 0\.0 off the mask"),
    ("loss", "sums_over_the_mask", Explodes, "expected finite numbers"),
    ("loss", "is_a_sum", Averages, "one copy gives .*, two give "),
    ("loss", "is_a_sum", AveragesEachSequence, "6 tokens give .* it is a mean"),
    ("loss", "sums_over_the_mask", Detached, "the loss has no gradient: it would train nothing"),
    ("loss", "keeps_to_its_scope", SequenceRatio, "changed the gradient of other tokens"),
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
    ("sampler", "sampler_takes_groups", Refuses, "reject gave True, expected why"),
    ("source", "source_gives_groups", Scored, "a rollout has credit"),
    ("source", "source_gives_groups", OtherGroup, "asked for group 0, it gave"),
    ("source", "source_gives_groups", FeedsNothing, "feeds names 'echo', which is no installed"),
    ("source", "source_resumes", ForgetsSome, "after save and load it gives"),
    ("monitor", "monitor_logs", InOrder, "step 0 after 1"),
    ("monitor", "monitor_logs", Renames, "TypeError: .*does not support item assignment"),
    ("monitor", "monitor_logs", Rewrites, "log_rollouts changed the rollouts: advantages"),
    ("launcher", "launcher_runs_a_process", Elsewhere, "its log has .*good-bye"),
    ("launcher", "launcher_runs_a_process", Nowhere, "place gave none to quick, slow"),
    ("launcher", "launcher_runs_a_process", LetsRun, "a process runs after end"),
    ("renderer", "renderer_refuses_in_words", NoBuild, "nothing could render"),
    ("renderer", "renderer_refuses_in_words", Raises, "KeyError: 'no-such-model'"),
    ("model", "model_is_reproducible", MakesAnother, "another model.safetensors the second time"),
    ("model", "model_is_reproducible", MakesNothing, r"it wrote \[\], expected config.json"),
    ("model", "model_is_reproducible", InPercent, "progress reported .*100.0"),
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
        ("loss", OfASequence),
        ("loss", OfAHead),
        ("sampler", InTurn),
        ("source", Demonstrations),
        ("monitor", Prints),
        ("launcher", LocalLauncher),
        ("renderer", Knows),
        ("model", Makes),
    ],
)
def test_a_sound_class_passes(kind, sound):
    report = check_offer(kind, sound, PluginConfig())
    assert report.ok, str(report)


def test_a_kind_without_checks_says_so():
    (outcome,) = check_offer("observer", Short, PluginConfig()).outcomes
    assert outcome.status == "skipped"
    assert outcome.message == (
        "observers need the loop of a run, which the kit lacks: test it in a short run"
    )


class WrongInit(Short):
    def __init__(self):
        self.seen = set()


class NoSuper(Short):
    def __init__(self, config):
        self.seen = set()


class MonitorOfTheConfig(Prints):
    def __init__(self, config):
        super().__init__(config, None)


@pytest.mark.parametrize(
    ("kind", "broken", "says"),
    [
        ("filter", WrongInit, r"takes 1 positional argument but 2 were given"),
        ("filter", NoSuper, r"Call super\(\).__init__"),
        ("monitor", MonitorOfTheConfig, r"takes 2 positional arguments but 3 were given"),
    ],
)
def test_a_class_that_core_cannot_build_is_named(kind, broken, says):
    outcome = run(builds, kind, broken, PluginConfig())
    assert outcome.status == "failed" and re.search(says, outcome.message), outcome.message
