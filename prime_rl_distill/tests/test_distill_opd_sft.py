"""opd and sft: requests to the teacher, the resulting streams, refused configs."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from waiting import LIMIT

from prime_rl import ConfigError, FrozenModel
from prime_rl.orchestrator.scoring import stamp
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.rollout import Rollout, Sample
from prime_rl.testing import FakeHost, FakeReference, check_algorithm, make_rollout, score
from prime_rl_distill import OPD, SFT
from prime_rl_distill.opd import OPDConfig

TEACHER = {"name": "big", "base_url": "http://127.0.0.1:8000/v1"}
WHERE = "env 'a': algo"


def opd(**settings):
    return OPD(OPDConfig(teacher=TEACHER, **settings))


def sample(token_ids, mask):
    return Sample(
        token_ids=np.array(token_ids, np.int32),
        loss_mask=np.array(mask, np.bool_),
        inference_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
    )


def two_samples():
    samples = [sample([5, 6, 7, 8], [0, 1, 0, 1]), sample([9, 3], [0, 1])]
    return Rollout(env="a", example_id=0, group_id=4, reward=0.0, samples=samples)


def refusal(settings):
    with pytest.raises(ConfigError) as caught:
        settings_of(OPD, ALGORITHM, settings, WHERE)
    return str(caught.value)


# -- opd ---------------------------------------------------------------------------------------


def test_opd_scores_whole_samples_and_keeps_the_sampled_tokens():
    host = FakeHost(frozen=FakeReference(lambda ids: [-token / 8 for token in ids]))
    rollout = two_samples()
    score(opd(), [rollout], host=host)
    assert host.connected == [FrozenModel(**TEACHER)]
    assert host.frozen.asked == [[5, 6, 7, 8], [9, 3]]
    assert host.policy.asked == []
    assert rollout.samples[0].ref_logprobs.tolist() == [0.0, -0.75, 0.0, -1.0]
    assert rollout.samples[1].ref_logprobs.tolist() == [0.0, -0.375]


def test_opd_trains_the_sampled_tokens_only_in_ref_kl_and_gives_no_credit():
    rollout = two_samples()
    score(opd(), [rollout])
    stamp(rollout, OPD.action_loss)
    first = rollout.samples[0]
    assert first.ref_kl_weights.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert first.rl_weights.tolist() == [0.0] * 4
    assert first.advantages is None
    assert first.ce_weights is None


def test_opd_scores_all_samples_at_once_and_keeps_a_group_together():
    class Meeting:
        """Answers after two requests have arrived."""

        def __init__(self):
            self.barrier = asyncio.Barrier(2)
            self.groups = []

        async def logprobs(self, token_ids, *, group_id=0):
            self.groups.append(group_id)
            await asyncio.wait_for(self.barrier.wait(), LIMIT)
            return np.full(len(token_ids), -0.5, np.float32)

    class Host(FakeHost):
        def connect(self, model):
            self.meeting = Meeting()
            return self.meeting

    host, rollout = Host(), two_samples()
    score(opd(), [rollout], host=host)
    assert host.meeting.groups == [4, 4]
    assert rollout.samples[1].ref_logprobs.tolist() == [0.0, -0.5]


def test_opd_requires_no_siblings_and_no_frozen_source():
    assert not OPD.group_relative
    assert not OPD.needs_frozen_source


def test_opd_with_the_policy_as_teacher_is_refused_with_a_fix():
    assert refusal({"teacher": "policy"}) == (
        "env 'a': algo (algorithm 'opd').teacher: the policy cannot be its own teacher: the KL "
        "would be zero everywhere. Give a frozen model (name and base_url), or use the algorithm "
        "opsd, in which the policy learns from itself conditioned on a demonstration (got 'policy')"
    )


def test_opd_without_a_teacher_is_refused():
    assert refusal({}) == (
        "env 'a': algo (algorithm 'opd').teacher: required, and nothing was given. Start the model "
        "(prime-rl serve MODEL --served-model-name NAME --port 8000) and give a table: "
        'teacher = { name = "NAME", base_url = ["http://127.0.0.1:8000/v1"] }'
    )


def test_opd_with_a_teacher_without_a_server_is_refused():
    assert refusal({"teacher": {"name": "big"}}) == (
        "env 'a': algo (algorithm 'opd').teacher: a frozen model needs a base_url, and there is "
        "none: a run hosts the policy only. Start the model (prime-rl serve MODEL "
        "--served-model-name NAME --port 8000) and give a table: "
        '{ name = "NAME", base_url = ["http://127.0.0.1:8000/v1"] }'
    )


def test_opd_passes_the_conformance_checks():
    check_algorithm(opd())


class Ranked(FakeReference):
    """In the place of token t: t + 0.1, t + 0.2 ... below zero, of the ids t + 1, t + 2 ..."""

    async def top_logprobs(self, token_ids, k, *, group_id=0):
        self.asked.append((list(token_ids), k, group_id))
        rank = np.arange(1, k + 1)
        ids = np.add.outer(token_ids, rank).astype(np.int32)
        return ids, -np.add.outer(token_ids, rank / 10).astype(np.float32)


def test_opd_with_top_k_assigns_the_teachers_ids_and_logprobs_to_the_sampled_tokens():
    host, rollout = FakeHost(frozen=Ranked()), two_samples()
    algorithm = opd(top_k=2)
    score(algorithm, [rollout], host=host)
    assert host.frozen.asked == [([5, 6, 7, 8], 2, 4), ([9, 3], 2, 4)]
    stamp(rollout, algorithm.action_loss)
    first, second = (each.streams for each in rollout.samples)
    assert first["top_ids"].tolist() == [[0, 0], [7, 8], [0, 0], [9, 10]]
    assert first["top_ids"].dtype == np.int32
    expected = np.float32([[0, 0], [-6.1, -6.2], [0, 0], [-8.1, -8.2]])
    assert first["top_ref_logprobs"].tolist() == expected.tolist()
    assert second["top_ids"].tolist() == [[0, 0], [4, 5]]
    assert first["top_kl_weights"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert rollout.samples[0].rl_weights.tolist() == [0.0] * 4
    assert rollout.samples[0].ref_logprobs is None
    assert rollout.samples[0].ref_kl_weights is None


def test_the_setting_of_one_opd_leaves_the_loss_of_another_alone():
    assert opd(top_k=2).action_loss == "top_kl"
    assert opd().action_loss == OPD.action_loss == "ref_kl"


def test_opd_with_top_k_of_zero_is_refused():
    assert "top_k" in refusal({"teacher": TEACHER, "top_k": 0})


def test_opd_with_top_k_passes_the_conformance_checks():
    check_algorithm(opd(top_k=3))


# -- sft ---------------------------------------------------------------------------------------


def test_sft_trains_every_sampled_token_with_cross_entropy():
    rollout = make_rollout(reward=1.0, prompt=2, completion=3)
    score(SFT(SFT.config_class()), [rollout])
    stamp(rollout, SFT.action_loss)
    (only,) = rollout.samples
    assert only.ce_weights.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert only.rl_weights.tolist() == [0.0] * 5
    assert only.advantages is None
    assert only.ref_logprobs is None


def test_sft_requires_a_frozen_source():
    assert SFT.needs_frozen_source
    assert not SFT.group_relative


def test_sft_passes_the_conformance_checks():
    check_algorithm(SFT(SFT.config_class()))


@pytest.mark.parametrize(("top_k", "expected"), [(None, -29.0), (4, -13.0)])
def test_the_objective_is_the_divergence_that_the_loss_lowers(top_k, expected):
    """In the states that the policy visits: 1 x 7 + 2 x 11 in reverse, 1 x 3 + 2 x 5 forward."""
    teacher = {"name": "t", "base_url": "http://t/v1"}
    algorithm = OPD(OPD.config_class.model_validate({"teacher": teacher, "top_k": top_k}))
    outcomes = SimpleNamespace(
        visits=np.array([1.0, 2.0]),
        reverse_kl=np.array([7.0, 11.0]),
        forward_kl=np.array([3.0, 5.0]),
    )
    assert algorithm.objective(outcomes) == expected
