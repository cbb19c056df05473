"""The kit that plugin authors test with: it must catch what it promises to catch."""

import asyncio

import numpy as np

from prime_rl import Algorithm, PluginConfig, hookimpl
from prime_rl.testing import FakeReference, conformance_group, make_group, make_rollout, score


def test_a_made_rollout_has_the_given_tokens():
    rollout = make_rollout(0.5, prompt=2, completion=3, tool=1)
    (sample,) = rollout.samples
    assert rollout.reward == 0.5
    assert sample.loss_mask.tolist() == [False, False, True, True, True, False]
    assert sample.inference_logprobs.tolist() == [0, 0, -1, -1, -1, 0]
    assert sample.roles.tolist() == [1, 1, 2, 2, 2, 3]
    assert sample.policy_versions.tolist() == [-1, -1, 0, 0, 0, -1]


def test_a_made_group_has_the_given_rewards():
    assert [rollout.reward for rollout in make_group([1, 0, 0.5])] == [1, 0, 0.5]


class Base(Algorithm):
    name = "base"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(rollout.reward)


def test_scoring_runs_as_in_the_orchestrator_setup_first_close_last():
    calls = []

    class Lifecycle(Base):
        async def setup(self, host):
            calls.append("setup")

        async def close(self):
            calls.append("close")

        @hookimpl
        async def score_rollout(self, rollout):
            await asyncio.sleep(0)
            calls.append("rollout")

        @hookimpl
        def score_group(self, group):
            calls.append("group")

    score(Lifecycle(PluginConfig()), make_group([1, 0]))
    assert calls == ["setup", "rollout", "rollout", "group", "close"]


def test_the_fake_reference_completes_by_prompt_and_seed():
    model = FakeReference(
        answer=lambda ids: [-float(token) for token in ids],
        reply=lambda ids, seed: [seed, 7, 8],
    )

    async def ask(**settings):
        found = await model.generate([1, 2], **settings)
        return [(f.token_ids.tolist(), f.logprobs.tolist(), f.finish_reason) for f in found]

    assert asyncio.run(ask(max_tokens=2, n=2)) == [
        ([0, 7], [0.0, -7.0], "length"),
        ([1, 7], [-1.0, -7.0], "length"),
    ]
    assert asyncio.run(ask(max_tokens=3)) == [([2, 7, 8], [-2.0, -7.0, -8.0], "stop")]
    stopped = asyncio.run(ask(max_tokens=3, stop_token_ids=[7], seed=5))
    assert stopped == [([5, 7], [-5.0, -7.0], "stop")]
    assert asyncio.run(ask(max_tokens=3, group_id=1))[0][0] == [0, 7, 8]


def test_the_fake_references_alternatives_are_a_distribution():
    model = FakeReference(lambda ids: [-float(token) / 4 for token in ids])
    ids, logprobs = asyncio.run(model.top_logprobs([1, 2, 8], 3))
    assert ids.tolist() == [[0, 0, 0], [2, 3, 4], [9, 10, 8]]
    assert np.allclose(np.exp(logprobs[1:]).sum(1), 1.0)
    assert np.isclose(logprobs[1, 0], -0.5) and np.isclose(logprobs[2, 2], -2.0)


def test_the_fake_reference_answers_and_records():
    reference = FakeReference(lambda ids: [-float(token) for token in ids])
    column = asyncio.run(reference.logprobs(np.array([3, 4, 5])))
    assert column.dtype == np.float32 and column.tolist() == [0.0, -4.0, -5.0]
    assert reference.asked == [[3, 4, 5]]


def test_the_kits_rollouts_have_two_samples_and_an_observed_tool_message():
    group = conformance_group([1.0, 0.5])
    assert [rollout.reward for rollout in group] == [1.0, 0.5]
    for rollout in group:
        assert [len(sample) for sample in rollout.samples] == [7, 3]
        assert rollout.num_trainable_tokens == 5
        assert rollout.samples[0].roles.tolist() == [1, 1, 2, 2, 2, 3, 3]
        assert rollout.task["demonstration"]
