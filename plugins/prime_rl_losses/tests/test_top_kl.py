"""``top_kl``: numbers worked out manually, and the KL of transformers' own distributions."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_fixtures import kernel_of
from transformers import PreTrainedModel

from prime_rl import ConfigError, LossInputs, LossOutputs, Rollout, Sample, StreamError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.orchestrator.scoring import stamp
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import LOSS, settings_of
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.update import BatchUpdate
from prime_rl.wire.micro_batch import decode_batch
from prime_rl_losses.distill import TopKL, TopKLConfig

Direction = Literal["forward", "reverse"]
VOCAB = 61
MakeModel = Callable[..., PreTrainedModel]


def outputs_of(
    direction: Direction, ours: Any, theirs: Any, mask: Any = (True,), weights: Any = None
) -> tuple[LossOutputs, Tensor]:
    """The loss of these logprobs [T, k], and its gradient."""
    leaf = torch.tensor(ours, dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(len(leaf), dtype=torch.float64)
    inputs = LossInputs(
        trainer_logprobs=zeros,
        inference_logprobs=zeros,
        ref_logprobs=None,
        advantages=zeros,
        loss_mask=torch.tensor(mask),
        loss_weights=None if weights is None else torch.tensor(weights, dtype=torch.float64),
        top_logprobs=leaf,
        streams={"top_ref_logprobs": torch.tensor(theirs, dtype=torch.float64)},
    )
    outputs = TopKL(TopKLConfig(direction=direction))(inputs)
    return outputs, torch.autograd.grad(outputs.loss, leaf)[0]


# The reference gives four words 1/2, 1/4, 1/8, 1/8, the trainer 1/4, 1/4, 1/4, 1/4: with k = 2, the
# bucket of the last two has 1/4 and 1/2.
P, Q = [log(1 / 2), log(1 / 4)], [log(1 / 4), log(1 / 4)]


def test_forward_with_two_of_four_words_is_worked_out_by_hand() -> None:
    """1/2 log 2 + 1/4 log 1 + 1/4 log(1/2) = 1/4 log 2. d/dlog q_v = -p_v + p_rest / q_rest q_v."""
    outputs, slope = outputs_of("forward", [Q], [P])
    assert outputs.loss.item() == pytest.approx(log(2) / 4)
    assert slope.tolist() == [pytest.approx([-1 / 2 + 1 / 8, -1 / 4 + 1 / 8])]
    assert outputs.metrics["kl"].values.item() == pytest.approx(log(2) / 4)  # type: ignore[union-attr]
    assert outputs.metrics["rest"].values.item() == pytest.approx(1 / 4)  # type: ignore[union-attr]


def test_reverse_with_two_of_four_words_is_worked_out_by_hand() -> None:
    """1/4 log(1/2) + 1/4 log 1 + 1/2 log 2 = 1/4 log 2. d/dlog q_v = q_v (log(q_v / p_v) -
    log(q_rest / p_rest)) = 1/4 (-2 log 2) and 1/4 (-log 2)."""
    outputs, slope = outputs_of("reverse", [Q], [P])
    assert outputs.loss.item() == pytest.approx(log(2) / 4)
    assert slope.tolist() == [pytest.approx([-log(2) / 2, -log(2) / 4])]


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_equal_distributions_have_no_loss_and_no_slope(direction: Direction) -> None:
    outputs, slope = outputs_of(direction, [P], [P])
    assert outputs.loss.item() == pytest.approx(0)
    on_logits = slope[0] - slope[0].sum() * torch.tensor(P).exp()  # of the two words
    assert on_logits.tolist() == pytest.approx([0, 0])


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_weights_multiply_and_nothing_off_the_mask_counts(direction: Direction) -> None:
    off = [float("nan"), float("inf")]
    outputs, slope = outputs_of(
        direction, [Q, off, Q], [P, off, P], (True, False, True), [1.0, 5.0, 0.5]
    )
    assert outputs.loss.item() == pytest.approx(1.5 * log(2) / 4)
    alone = outputs_of(direction, [Q], [P])[1]
    torch.testing.assert_close(slope, torch.cat([alone, 0 * alone, 0.5 * alone]))


def test_a_bucket_that_the_policy_has_emptied_is_filled_again() -> None:
    """q_rest is 0 to float32 and 1e-5 to the loss; the slope on the logits of the two words is
    finite, and their probabilities fall."""
    outputs, slope = outputs_of("forward", [[log(0.5), log(0.5)]], [P])
    expected = log(2) / 2 * 0 + log(1 / 2) / 4 + log(1 / 4 / 1e-5) / 4
    assert outputs.loss.item() == pytest.approx(expected)
    assert torch.isfinite(slope).all() and (slope > 0).all()


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_full_bucket_within_rounding_counts_as_empty(direction: Direction) -> None:
    """Of the whole vocabulary: 1 - sum is 1e-6 here, and changes nothing."""
    theirs, ours = [log(0.75), log(0.25)], [log(0.5), log(0.5 - 1e-6)]
    whole = {"forward": 0.75 * log(1.5) + 0.25 * log(0.5), "reverse": 0.5 * log(4 / 3)}
    assert outputs_of(direction, [ours], [theirs])[0].loss.item() == pytest.approx(
        whole[direction], abs=5e-6
    )


def test_streams_of_different_sizes_are_refused() -> None:
    with pytest.raises(StreamError, match=r"shape \(1, 1\) and top_ids \(1, 2\), expected one"):
        outputs_of("forward", [Q], [P[:1]])


def test_an_unknown_direction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.losses.top_kl.*direction"):
        settings_of(TopKL, LOSS, {"direction": "sideways"}, "trainer.losses.top_kl")


# -- against transformers ----------------------------------------------------------------------


def rollouts_of(documents: list[list[int]], prompt: int) -> list[Rollout]:
    """Siblings that share their prompt, at temperatures 0.5, 1 and 2."""
    found = []
    for document, temperature in zip(documents, [0.5, 1.0, 2.0], strict=True):
        tokens = np.array([*documents[0][:prompt], *document[prompt:]])
        mask = np.arange(len(tokens)) >= prompt
        sample = Sample(
            token_ids=tokens,
            loss_mask=mask,
            inference_logprobs=np.where(mask, -1.0, 0.0),
            temperature=temperature,
        )
        found.append(Rollout(env="a", example_id=0, group_id=0, reward=0.0, samples=[sample]))
    return found


def log_softmaxes(model: PreTrainedModel, rollout: Rollout, temperature: float) -> Tensor:
    """[C, V] of the places of the sampled tokens, as transformers computes them."""
    (sample,) = rollout.samples
    ids = torch.tensor([sample.token_ids.tolist()])
    logits = model(ids).logits[0, :-1] / temperature
    return logits.log_softmax(-1)[torch.tensor(sample.loss_mask[1:].tolist())]


def expected_loss(
    model: PreTrainedModel, teacher: PreTrainedModel, rollouts: list[Rollout], k: int, way: str
) -> Tensor:
    """The mean over tokens of the KL between the teacher's and the model's distributions, all but
    the teacher's k likeliest words taken together."""
    terms = []
    for rollout in rollouts:
        theirs = log_softmaxes(teacher, rollout, 1.0).detach()
        ours = log_softmaxes(model, rollout, rollout.samples[0].temperature)
        order = theirs.argsort(1, descending=True)
        p, q = (each.gather(1, order).exp() for each in (theirs, ours))
        if k < VOCAB:
            p, q = (torch.cat([x[:, :k], x[:, k:].sum(1, keepdim=True)], 1) for x in (p, q))
        a, b = (p, q) if way == "forward" else (q, p)
        terms.append((a * (a.log() - b.log())).sum(1))
    return torch.cat(terms).mean()


def losses_with(direction: Direction) -> Components:
    config = TrainerConfig.model_validate(
        {"loss": {"type": "default"}, "losses": {"top_kl": {"direction": direction}}}
    )
    return Components.load(config, load_plugins(TRAINER_GROUP))


def backward(
    model: PreTrainedModel, losses: Components, rollouts: list[Rollout], **table: Any
) -> tuple[Trainer, dict[str, float]]:
    """Accumulate the gradients of a batch as the trainer does; its metrics."""
    (frame,) = batch_frames(batch_to_pack(1, rollouts, losses, 32), 32)
    rows = decode_batch(frame)[1]
    config = TrainerConfig.model_validate({"device": "cpu"} | table)
    trainer = Trainer(model, losses, config, 20, kernel=kernel_of(config))
    update = BatchUpdate(trainer, 1, rows, None)
    return trainer, update.forward_backward(rows, update.counts[0])[0].result()


@pytest.mark.parametrize("k", [VOCAB, 7])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "packed"])
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "kept"])
def test_it_is_the_kl_of_the_two_models_with_its_full_gradient(
    make_model: MakeModel,
    random_documents: Any,
    is_fused: bool,
    share: bool,
    direction: Direction,
    k: int,
) -> None:
    """With k = V, over the whole vocabulary. Through streams, packer, wire, rows and trainer."""
    rollouts, teacher = rollouts_of(random_documents([9, 7, 6]), 4), make_model("sdpa", seed=1)
    for rollout in rollouts:
        ranked = log_softmaxes(teacher, rollout, 1.0).detach().sort(1, descending=True)
        rollout.assign_stream("top_ids", ranked.indices[:, :k].numpy())
        rollout.assign_stream("top_ref_logprobs", ranked.values[:, :k].numpy())
        stamp(rollout, "top_kl")
    trainer, metrics = backward(
        *(make_model(), losses_with(direction), rollouts),
        fused_lm_head=is_fused,
        share_prompts=share,
    )
    assert trainer.policy.packing.name == ("shared" if share else "packed")

    model = make_model("sdpa")
    expected = expected_loss(model, teacher, rollouts, k, direction)
    torch.autograd.backward(expected)
    assert metrics["loss/mean"] == pytest.approx(expected.item(), abs=1e-5)
    assert metrics["top_kl/kl"] > 0.1
    assert metrics["top_kl/rest"] == pytest.approx(0, abs=1e-6) if k == VOCAB else True
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for (name, got), want in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad, want.grad, atol=1e-5 * min(largest, 1.0), rtol=1e-5, msg=name
        )


def test_it_trains_beside_the_rl_loss_in_one_row(
    make_model: MakeModel, random_documents: Any
) -> None:
    """The other env has no ids; each component is divided by its own tokens."""
    first, second, third = rollouts_of(random_documents([9, 7, 6]), 4)
    second.assign_stream("top_ids", np.tile([3, 5], (3, 1)))
    second.assign_stream("top_ref_logprobs", np.tile(P, (3, 1)))
    stamp(second, "top_kl")
    for rollout in (first, third):
        rollout.assign_advantages(0.0)
        rollout.env = "b"
        stamp(rollout, "rl")
    losses = losses_with("forward")

    def found(rollouts: list[Rollout]) -> tuple[float, list[Any]]:
        trainer, metrics = backward(make_model(), losses, rollouts)
        return metrics["loss/mean"], [each.grad for each in trainer.model.parameters()]

    (together, slopes), (alone, slopes_alone), (others, other_slopes) = (
        found(each) for each in ([first, second, third], [second], [first, third])
    )
    assert together == pytest.approx(alone + others)
    for both, own, other in zip(slopes, slopes_alone, other_slopes, strict=True):
        torch.testing.assert_close(both, own + other, atol=1e-6, rtol=1e-6)


def test_it_reads_the_ids_and_needs_no_sampling_logprobs() -> None:
    component = installed_losses()["top_kl"]
    assert component.required == ["top_ids", "top_ref_logprobs"]
    assert not component.cls.compares_with_sampler
