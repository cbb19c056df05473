"""sdft and sdpo: whose weights score which tokens after which hint, and the loss of it all.

Models are tables of bigrams. The oracle computes the expected loss from the tables, without a host,
streams or packing. ``FakeHost`` renders text as its code points.
"""

import numpy as np
import pytest

pytest.importorskip("torch")
from loss_path import load_losses, loss_and_slopes, rollouts_of

from prime_rl import ConfigError, OverlongError
from prime_rl.orchestrator.scoring import stamp
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.rollout import Rollout, Sample
from prime_rl.testing import FakeHost, FakeReference, check_algorithm, score
from prime_rl_distill import SDFT, SDPO

SIZE = 128


class Bigrams(FakeReference):
    """A random language model: the next token depends on the last one, and on the first."""

    def __init__(self, seed):
        super().__init__(lambda ids: [self.of(ids, t) for t in range(len(ids))])
        self.logits = np.random.default_rng(seed).normal(size=(SIZE, SIZE))

    def of(self, ids, t):
        row = self.logits[ids[t - 1]] + self.logits[:, ids[0]]
        return row[ids[t]] - np.log(np.exp(row).sum())


def host():
    names = ("policy", "frozen", "initial", "ema")
    return FakeHost(**{name: Bigrams(seed) for seed, name in enumerate(names)})


def made(kind, **table):
    return kind(settings_of(kind, ALGORITHM, {"template": "<{demonstration}>"} | table, "algo"))


def member(reply, reward=0.0, **fields):
    text = "Q" + reply
    mask = np.arange(len(text)) > 0
    sample = Sample(
        token_ids=np.array([*map(ord, text)], np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-1.0), np.float32(0.0)),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
    )
    known = {"env": "a", "example_id": 3, "group_id": 9, "task": {"demonstration": "ok"}}
    return Rollout(**known | fields, samples=[sample], reward=reward)


def trained(rollout):
    stamp(rollout, "ref_kl")
    return bool(rollout.samples[0].ref_kl_weights.any())


def asked(model):
    return ["".join(map(chr, ids)) for ids in model.asked]


def expected(model, hint, reply):
    """log e(y_t | hint, x, y_<t), from the table."""
    ids = [*map(ord, hint + "Q" + reply)]
    return [model.of(ids, t) for t in range(len(ids) - len(reply), len(ids))]


@pytest.mark.parametrize(("reference", "other"), [("ema", "initial"), ("initial", "ema")])
def test_the_teacher_is_the_slow_copy_that_has_seen_the_demonstration(reference, other):
    algorithm, lent, rollout = made(SDFT, reference=reference), host(), member("no")
    assert (algorithm.needs_ema, algorithm.needs_initial) == (
        reference == "ema",
        reference == "initial",
    )
    score(algorithm, [rollout], host=lent)
    teacher = getattr(lent, reference)
    assert asked(teacher) == ["<ok>Qno"]
    assert asked(lent.policy) == asked(getattr(lent, other)) == []
    found = rollout.samples[0].ref_logprobs
    assert found[1:] == pytest.approx(expected(teacher, "<ok>", "no"), abs=1e-6)


def test_the_loss_of_sdft_pulls_each_token_by_the_gap_to_the_teacher():
    """Without a change since sampling, the slope of a token is -(log e - log pi) / tokens."""
    pi = np.log([0.4, 0.5, 0.1])
    (rollout,) = rollouts_of([0.0], [3], pi.tolist())  # the tokens 0 | 1, 2, 3
    rollout.task = {"demonstration": "ok"}
    lent, algorithm = host(), made(SDFT)
    score(algorithm, [rollout], host=lent)
    _, slopes = loss_and_slopes(algorithm, [rollout], pi.tolist(), load_losses())
    ids = [*map(ord, "<ok>"), 0, 1, 2, 3]
    gap = np.array([lent.ema.of(ids, t) for t in (5, 6, 7)]) - pi
    assert slopes == pytest.approx((-gap / 3).tolist(), abs=1e-5)


def test_a_gain_is_from_the_policy_without_to_the_teacher_with_the_demonstration():
    lent, rollout = host(), member("no")
    score(made(SDFT, min_gain=-99.0), [rollout], host=lent)
    assert asked(lent.policy) == ["Qok"]
    assert asked(lent.ema) == ["<ok>Qok", "<ok>Qno"]
    gap = np.subtract(expected(lent.ema, "<ok>", "ok"), expected(lent.policy, "", "ok"))
    assert rollout.metrics == {"sdft_gain": pytest.approx(gap.mean(), abs=1e-6)}


def test_each_rollout_learns_from_the_first_success_of_another():
    group = [member("a", 0.2), member("b", 1.0), member("c", 1.0), member("d", 0.0)]
    lent = host()
    score(made(SDPO), group, host=lent)
    assert asked(lent.ema) == ["<b>Qa", "<c>Qb", "<b>Qc", "<b>Qd"]
    for rollout, hint, reply in zip(group, "bcbb", "abcd", strict=True):
        found = rollout.samples[0].ref_logprobs[1:]
        assert found == pytest.approx(expected(lent.ema, f"<{hint}>", reply), abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "trains"),
    [((0.5, 0.9), (False, False)), ((1.0, 0.0), (False, True)), ((1.0, 1.0), (True, True))],
)
def test_a_rollout_without_a_successful_sibling_trains_nothing(rewards, trains):
    group = [member("a", rewards[0]), member("b", rewards[1])]
    score(made(SDPO), group, host=host())
    assert tuple(map(trained, group)) == trains


def test_min_reward_says_what_a_success_is():
    group = [member("a", 0.5), member("b", 0.9)]
    score(made(SDPO, min_reward=0.8, reference="initial"), group, host=host())
    assert [trained(each) for each in group] == [True, False]


def test_truncated_rollouts_and_overlong_hints_train_nothing():
    class Short(FakeReference):
        async def logprobs(self, token_ids, *, group_id=0):
            raise OverlongError("the model takes 4 tokens")

    group = [member("a", 1.0, is_truncated=True), member("b", 1.0)]
    score(made(SDPO), group, host=FakeHost(ema=Short()))
    assert not any(map(trained, group))
    assert [each.metrics for each in group] == [{}, {"sdpo_overlong": 1.0}]


def test_another_reference_is_refused():
    with pytest.raises(ConfigError, match="reference"):
        made(SDFT, reference="policy")


@pytest.mark.parametrize("algorithm", [made(SDFT), made(SDPO), made(SDPO, reference="initial")])
def test_they_pass_the_conformance_checks(algorithm):
    check_algorithm(algorithm)
