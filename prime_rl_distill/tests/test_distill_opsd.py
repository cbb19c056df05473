"""opsd: the reference's input, the sliced logprobs, the gate, refused configs.

``FakeHost`` renders text as its code points, so every sequence below is readable.
"""

import asyncio

import numpy as np
import pytest
from waiting import LIMIT

from prime_rl import ConfigError, OverlongError
from prime_rl.orchestrator.scoring import stamp
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.rollout import Rollout, Sample
from prime_rl.testing import FakeHost, FakeReference, check_algorithm, score
from prime_rl_distill import OPSD
from prime_rl_distill.opsd import OPSDConfig

HINT = "<ok>"
"""The template of ``opsd`` below with the demonstration ``ok``."""


def opsd(**settings):
    return OPSD(OPSDConfig(**{"template": "<{demonstration}>"} | settings))


def sample(prompt, reply, observed=""):
    text = prompt + reply + observed
    mask = np.array([False] * len(prompt) + [True] * len(reply) + [False] * len(observed))
    return Sample(
        token_ids=np.array([ord(letter) for letter in text], np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
    )


def rollout_of(*samples, **fields):
    known = {"env": "a", "example_id": 3, "group_id": 9, "reward": 0.0}
    fields = {"task": {"prompt": "Q", "demonstration": "ok"}} | fields
    return Rollout(**known, samples=list(samples), **fields)


def reference(shown=-0.2, plain=-0.5):
    """One logprob for all tokens of a sequence that starts with the hint, another for the rest."""

    def answer(ids):
        return [shown if text(ids).startswith(HINT) else plain] * len(ids)

    return FakeReference(answer)


def text(ids):
    return "".join(map(chr, ids))


def scored(algorithm, rollout, policy=None):
    """Score and stamp the rollout. Returns the texts that the policy scored."""
    host = FakeHost(policy=policy or reference())
    score(algorithm, [rollout], host=host)
    stamp(rollout, algorithm.action_loss)
    return [text(ids) for ids in host.policy.asked]


def refusal(algorithm, rollout):
    with pytest.raises(ConfigError) as caught:
        scored(algorithm, rollout)
    return str(caught.value)


# -- the signal --------------------------------------------------------------------------------


def test_each_sample_is_scored_verbatim_after_the_hint_under_the_live_policy():
    rollout = rollout_of(sample("Q", "no"), sample("Qno?", "yes", "T"))
    asked = scored(opsd(min_gain=None), rollout)
    assert asked == ["<ok>Qno", "<ok>Qno?yesT"]


def test_the_hints_logprobs_are_dropped_exactly():
    policy = FakeReference(lambda ids: [-i / 8 for i in range(len(ids))])  # by position
    rollout = rollout_of(sample("Q", "no"), sample("Qno?", "yes", "T"))
    scored(opsd(min_gain=None), rollout, policy)
    first, second = rollout.samples
    # the hint takes positions 0 to 3; "Q" is 4, "n" is 5, "o" is 6
    assert first.ref_logprobs.tolist() == [0.0, -0.625, -0.75]
    # "Qno?" is 4 to 7, "yes" is 8 to 10
    assert second.ref_logprobs.tolist() == [0.0] * 4 + [-1.0, -1.125, -1.25] + [0.0]
    assert second.ref_kl_weights.tolist() == [0.0] * 4 + [1.0] * 3 + [0.0]
    assert second.rl_weights.tolist() == [0.0] * 8
    assert second.advantages is None


def test_all_samples_are_scored_at_once():
    class Meeting:
        def __init__(self):
            self.barrier = asyncio.Barrier(2)
            self.groups = []

        async def logprobs(self, token_ids, *, group_id=0):
            self.groups.append(group_id)
            await asyncio.wait_for(self.barrier.wait(), LIMIT)
            return np.full(len(token_ids), -0.5, np.float32)

    host = FakeHost(policy=Meeting())
    score(opsd(min_gain=None), [rollout_of(sample("Q", "no"), sample("R", "n"))], host=host)
    assert host.policy.groups == [9, 9]


def test_the_default_hint_is_a_system_message_with_the_demonstration():
    rendered = []

    class Host(FakeHost):
        def render(self, messages, *, renderer=None, add_generation_prompt=False):
            rendered.append((messages, renderer, add_generation_prompt))
            return super().render(messages)

    algorithm = OPSD(OPSDConfig(renderer="qwen3", min_gain=None))
    score(algorithm, [rollout_of(sample("Q", "no"))], host=Host())
    content = "Here is an example of an expert response:\n<demonstration>\nok\n</demonstration>"
    assert rendered == [([{"role": "system", "content": content}], "qwen3", False)]


def test_info_takes_precedence_over_the_example():
    rollout = rollout_of(sample("Q", "no"), info={"demonstration": "hi"})
    assert scored(opsd(min_gain=None), rollout) == ["<hi>Qno"]


def test_demo_key_selects_another_field():
    rollout = rollout_of(sample("Q", "no"), task={"answer": "{b}"})
    assert scored(opsd(min_gain=None, demo_key="answer"), rollout) == ["<{b}>Qno"]


# -- the gate -----------------------------------------------------------------------------------


def test_the_gain_is_for_the_experts_reply_to_the_rollouts_prompt():
    rollout = rollout_of(sample("Q", "no"))
    asked = scored(opsd(), rollout, reference(shown=-0.2, plain=-0.5))
    assert asked == ["<ok>Qok", "Qok", "<ok>Qno"]
    assert rollout.metrics == {"opsd_gain": pytest.approx(0.3)}
    assert rollout.samples[0].ref_logprobs.tolist() == pytest.approx([0.0, -0.2, -0.2])


def test_the_gain_is_the_mean_over_the_reply_only():
    def answer(ids):  # o: -1/8 with the hint, -1 without; k: -1/2 and -3/4; the rest far off
        table = {"o": -0.125, "k": -0.5} if text(ids).startswith(HINT) else {"o": -1.0, "k": -0.75}
        return [*[-50.0] * (len(ids) - 2), table["o"], table["k"]]

    rollout = rollout_of(sample("Q", "no"))
    scored(opsd(), rollout, FakeReference(answer))
    assert rollout.metrics["opsd_gain"] == (0.875 + 0.25) / 2


@pytest.mark.parametrize(("min_gain", "trains"), [(0.25, True), (0.5, False), (0.75, False)])
def test_an_example_trains_only_while_its_gain_exceeds_the_minimum(min_gain, trains):
    rollout = rollout_of(sample("Q", "no"))
    asked = scored(opsd(min_gain=min_gain), rollout, reference(shown=-0.5, plain=-1.0))
    (only,) = rollout.samples
    assert only.ref_kl_weights.tolist() == [0.0, float(trains), float(trains)]
    assert only.rl_weights.tolist() == [0.0] * 3
    assert len(asked) == 2 + trains


def test_a_truncated_rollout_is_skipped_without_requests_by_default():
    cut = rollout_of(sample("Q", "no"), is_truncated=True)
    assert scored(opsd(), cut) == []
    assert cut.samples[0].ref_kl_weights.tolist() == [0.0] * 3
    cut = rollout_of(sample("Q", "no"), is_truncated=True)
    scored(opsd(skip_truncated=False), cut)
    assert cut.samples[0].ref_kl_weights.tolist() == [0.0, 1.0, 1.0]


# -- refusals ----------------------------------------------------------------------------------


def test_a_missing_demonstration_is_an_error_that_lists_the_fields():
    rollout = rollout_of(sample("Q", "no"), info={"tries": 2}, task={"prompt": "Q", "answer": "A"})
    assert refusal(opsd(), rollout) == (
        "env 'a', example 3: no demonstration: neither info nor the example has 'demonstration' "
        "(info has: 'tries'; the example has: 'prompt', 'answer'). Set algo.demo_key to the field "
        "with the expert's response, or change the environment to provide one."
    )


@pytest.mark.parametrize("found", [None, "", "  ", 42, ["ok"]])
def test_a_demonstration_that_is_not_a_text_is_refused(found):
    rollout = rollout_of(sample("Q", "no"), task={"demonstration": found})
    assert refusal(opsd(), rollout) == (
        f"env 'a', example 3: 'demonstration' is {found!r}, expected the text of an expert's "
        "response. Set algo.demo_key to another field, or fix the example."
    )


def test_it_requires_temperature_1():
    assert OPSD.needs_temperature == 1.0


async def test_a_rollout_that_exceeds_the_context_with_its_demonstration_is_skipped():
    class Short(FakeReference):
        async def logprobs(self, token_ids, *, group_id=0):
            raise OverlongError("the policy takes 4 tokens")

    algorithm, rollout = opsd(), rollout_of(sample("Q", "no"))
    await algorithm.setup(FakeHost(policy=Short()))
    await algorithm.score_rollout(rollout)
    assert rollout.metrics["opsd_overlong"] == 1.0
    assert not rollout.samples[0].ref_kl_weights.any()


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        (
            "Be good.",
            "it has no {demonstration}: the reference would see no example. Put the field where "
            "the expert's response belongs",
        ),
        (
            "{demonstration} {other}",
            "its only field may be {demonstration}, but formatting it gives KeyError: 'other'. "
            "Write all other braces twice",
        ),
        (
            "{demonstration",
            "its only field may be {demonstration}, but formatting it gives ValueError: expected "
            "'}' before end of string. Write all other braces twice",
        ),
        (
            "{{demonstration}}",
            "it has no {demonstration}: the reference would see no example. Put the field where "
            "the expert's response belongs",
        ),
    ],
)
def test_an_invalid_template_is_refused_at_config_time(template, fault):
    with pytest.raises(ConfigError) as caught:
        settings_of(OPSD, ALGORITHM, {"template": template}, "env 'a': algo")
    assert str(caught.value) == (
        f"env 'a': algo (algorithm 'opsd').template: {fault} (got {template!r})"
    )


# -- the contract ------------------------------------------------------------------------------


def instructive_host():
    """The hint raises every logprob, some above the sampling logprob."""

    def answer(ids):
        return [-0.5 - token % 3 if text(ids[:1]) == "<" else -4.0 for token in ids]

    return FakeHost(policy=FakeReference(answer))


@pytest.mark.parametrize("min_gain", [None, 0.1])
def test_opsd_passes_the_conformance_checks(min_gain):
    check_algorithm(opsd(min_gain=min_gain), make_host=instructive_host)


def test_opsd_requires_no_siblings_and_samples_from_the_policy():
    assert not OPSD.group_relative
    assert not OPSD.needs_frozen_source
