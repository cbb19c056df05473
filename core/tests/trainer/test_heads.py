"""Heads: their gradients against transformers run sample by sample, what ``prepare`` sees, resume,
and that nothing of a head is published."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_head import (
    Scores,
    rollout_of,
    rows_of,
    scored_rollouts,
    trainer_of,
    with_scores,
)
from torch import Tensor, nn
from trainer_fixtures import Ratio
from transformers import PreTrainedModel

from prime_rl import HeadInputs, PluginConfig, PluginError, Rollout, Sample, StreamError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.scoring import stamp
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.trainer.checkpoint import restore, snapshot, write_shard
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.trainer.publish import export
from prime_rl.trainer.published import Publisher
from prime_rl.trainer.update import BatchUpdate
from prime_rl.wire.micro_batch import MicroBatch

MakeModel = Callable[..., PreTrainedModel]
TABLES = [{}, {"detach": True}, {"own_model": True}]


# -- the gradient ---------------------------------------------------------------------------------


def run_alone(model: PreTrainedModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """[T] log π and [T, D] the hidden state that predicts each token; 0 for the first."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    found = model(input_ids=ids[None], output_hidden_states=True)
    logprobs = found.logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    hidden = found.hidden_states[-1][0, :-1]
    return nn.functional.pad(logprobs, (1, 0)), nn.functional.pad(hidden, (0, 0, 1, 0))


def definition(
    rollouts: Sequence[Rollout], model: PreTrainedModel, body: Any, linear: Any, detach: bool
) -> Tensor:
    """The loss, rollout by rollout. ``body``: the model that the head is on."""
    num_rl = sum(rollout.num_trainable_tokens for rollout in rollouts)
    num_fit = sum(r.num_trainable_tokens for r in rollouts if r.env == "a")
    total = torch.zeros((), dtype=torch.float64)
    for rollout in rollouts:
        reward = sum(float(s.streams.get("rewards", np.zeros(1)).sum()) for s in rollout.samples)
        for sample in rollout.samples:
            mask = torch.tensor(sample.loss_mask)
            t, hidden = run_alone(model, sample)
            if body is not model:
                hidden = run_alone(body, sample)[1]
            score = linear((hidden.detach() if detach else hidden).float())[:, 0].double()
            if rollout.env == "a":
                weights = torch.from_numpy(sample.streams["fit_weights"].astype(np.float64))
                total = total + (weights * (score - reward) ** 2 / 2)[mask].sum() / num_fit
                a = reward - score.detach()
            else:
                a = torch.from_numpy(np.asarray(sample.advantages, np.float64))
            ratio = (t - torch.tensor(sample.inference_logprobs)).exp()
            total = total - (a * ratio)[mask].sum() / num_rl
    return total


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_gradients_are_those_of_the_definition(
    make_model: MakeModel, table: dict[str, Any]
) -> None:
    trainer, rollouts = trainer_of(make_model(), table), scored_rollouts()
    head, _ = trainer.heads["scores"]
    plain = make_model("sdpa")
    body = copy.deepcopy(plain) if table.get("own_model") else plain
    linear = copy.deepcopy(head.module[0])
    update = BatchUpdate(trainer, 1, rows_of(rollouts, trainer.losses), None)
    assert len(update.parts[0]) > 2
    update.forward_backward(update.parts[0], update.counts[0])
    torch.autograd.backward(definition(rollouts, plain, body, linear, bool(table.get("detach"))))
    pairs = [(trainer.model, plain), (head.module[0], linear)]
    pairs += [(head.model, body)] if head.model is not None else []
    for ours, theirs in pairs:
        for (name, parameter), other in zip(
            ours.named_parameters(), theirs.parameters(), strict=True
        ):
            expected = torch.zeros_like(other) if other.grad is None else other.grad
            found = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=name)
        assert any(each.grad is not None and each.grad.any() for each in theirs.parameters())


# -- prepare --------------------------------------------------------------------------------------


def outputs_now(trainer: Trainer, rollout: Rollout) -> np.ndarray:
    """The head's outputs [N] on a rollout, 0.0 off the mask, by transformers."""
    model = copy.deepcopy(trainer.model)
    model.set_attn_implementation("sdpa")
    linear = trainer.heads["scores"][0].module[0]
    with torch.no_grad():
        hidden = torch.cat([run_alone(model, sample)[1] for sample in rollout.samples])
        mask = np.concatenate([sample.loss_mask for sample in rollout.samples])
        return np.where(mask, linear(hidden.float())[:, 0].numpy(), 0.0)


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (1, 2), (3, 2)])
def test_prepare_sees_each_rollout_that_trains_the_head_once_at_the_batchs_start(
    make_model: MakeModel, minibatches: int, epochs: int
) -> None:
    head = Scores(PluginConfig())
    trainer, rollouts = (
        trainer_of(make_model(), {"lr": 0.1}, head, epochs=epochs),
        scored_rollouts(),
    )
    rows = rows_of(rollouts, trainer.losses, minibatches)
    assert len({row.minibatch for row in rows}) == minibatches
    expected = {
        r.num_tokens: (r, outputs_now(trainer, r)) for r in rollouts if r.env == "a"
    }  # by length: all differ
    found = trainer.train_step(1, rows)
    assert len(head.calls) == len(expected) == 4
    for call in head.calls:
        rollout, outputs = expected[len(call.outputs)]
        np.testing.assert_allclose(call.outputs, outputs, atol=1e-5)
        assert (
            call.loss_mask.tolist()
            == np.concatenate([s.loss_mask for s in rollout.samples]).tolist()
        )
        rewards = np.concatenate([s.streams["rewards"] for s in rollout.samples])
        assert call.streams["rewards"].tolist() == rewards.tolist()
    assert found["tokens/fit"] == sum(r.num_trainable_tokens for r in rollouts if r.env == "a")
    after = expected[9][0]
    assert np.abs(outputs_now(trainer, after) - expected[9][1]).max() > 0.05  # it has learned


def test_neighbors_that_do_not_train_the_head_keep_their_credit(make_model: MakeModel) -> None:
    trainer, rollouts = trainer_of(make_model(), {}), scored_rollouts()
    rows: list[MicroBatch] = rows_of(rollouts, trainer.losses)
    trainer.train_step(1, rows)
    credit = {
        tuple(s.token_ids.tolist()): s.advantages
        for rollout in rollouts
        for s in rollout.samples
        if rollout.env == "b"
    }
    seen = 0
    for row in rows:
        ends = np.cumsum(row.sequence_lengths)
        for start, end, env in zip(ends - row.sequence_lengths, ends, row.env_ids, strict=True):
            assert row.advantages is not None
            if row.envs[env] == "b":
                own = credit[tuple(row.token_ids[start:end].tolist())]
                assert own is not None and row.advantages[start:end].tolist() == own.tolist()
                if "a" in row.envs:
                    assert np.isnan(row.streams["goals"][start:end]).all()
                    seen += 1
            else:
                assert row.advantages[start:end][row.loss_mask[start:end]].all()
    assert seen  # in a row with others


def test_a_batch_that_does_not_read_the_head_leaves_it_alone(make_model: MakeModel) -> None:
    head = Scores(PluginConfig())
    trainer = trainer_of(make_model(), {}, head, optim={"weight_decay": 0.1})
    before = copy.deepcopy(trainer.heads["scores"][0].state_dict())
    other = [rollout for rollout in scored_rollouts() if rollout.env == "b"]
    metrics = trainer.train_step(1, rows_of(other, trainer.losses))
    after = trainer.heads["scores"][0].state_dict()
    assert all(map(torch.equal, before.values(), after.values())) and not head.calls
    assert metrics["optim/scores/grad_norm"] == 0 and metrics["optim/grad_norm"] > 0


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"goals": [1.0]},
            r"env 'a': head 'scores': prepare gave .*'goals'.* expected the streams",
        ),
        ({"goals": [1.0], "advantages": [1.0]}, r"head 'scores': goals of 12 tokens: cannot resh"),
        ({"goals": [np.nan] * 12, "advantages": [1.0] * 12}, r"goals of 12 tokens: got nan"),
    ],
)
def test_what_prepare_gives_is_checked(
    make_model: MakeModel, given: dict[str, Any], message: str
) -> None:
    class Wrong(Scores):
        def prepare(self, inputs: HeadInputs) -> Mapping[str, Any]:
            return given

    trainer = trainer_of(make_model(), {}, Wrong(PluginConfig()))
    with pytest.raises(StreamError, match=message):
        trainer.train_step(1, rows_of(scored_rollouts()[:1], trainer.losses))


def test_a_module_of_another_shape_is_named(make_model: MakeModel) -> None:
    class Wide(Scores):
        def build(self, hidden_size: int) -> Any:
            return nn.Linear(hidden_size, 2)

    trainer = trainer_of(make_model(), {}, Wide(PluginConfig()))
    with pytest.raises(PluginError, match=r"head 'scores': its module gave .*15, 2.* \(15,\)"):
        trainer.train_step(1, rows_of(scored_rollouts()[:2], trainer.losses))


def test_a_rollout_has_what_the_head_reads_and_not_what_it_writes() -> None:
    losses = with_scores(Ratio(PluginConfig()))
    lacking = rollout_of("a", 3, [5], 0)
    lacking.assign_weights("fit", 1.0)
    with pytest.raises(
        StreamError,
        match=r"env 'a', group 3: tokens train in the fit component, whose head 'scores' reads "
        r"'rewards', but no rewards were assigned",
    ):
        stamp(lacking, "rl", losses)
    lacking.assign_stream("rewards", 0.0)
    lacking.assign_advantages(1.0)
    with pytest.raises(StreamError, match=r"advantages were assigned, and the .* head 'scores'"):
        stamp(lacking, "rl", losses)


def test_rollouts_that_train_a_head_of_their_scope_stay_in_one_row() -> None:
    losses = with_scores(Ratio(PluginConfig()))
    assert losses["fit"].whole == "rollout" and losses["rl"].whole == "token"
    for row in rows_of(scored_rollouts(), losses):
        assert row.rollout_ids is not None
    ids = [set(row.rollout_ids.tolist()) for row in rows_of(scored_rollouts()[:4], losses)]
    assert sum(map(len, ids)) == len(set().union(*ids)) == 4


# -- checkpoints, adapters and what is published ---------------------------------------------------


def write(trainer: Trainer, step: int, folder: Path) -> Checkpoint:
    """What the trainer's part of a checkpoint holds."""
    checkpoint = Checkpoint(folder / f"step_{step}")
    checkpoint.weights.mkdir(parents=True)
    trainer.model.save_pretrained(checkpoint.weights)
    checkpoint.trainer.mkdir()
    write_shard(checkpoint.trainer, snapshot(trainer, step))
    return checkpoint


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.policy.parameters()]


def same(first: Trainer, second: Trainer) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


def loaded(folder: Path, table: Mapping[str, Any]) -> Trainer:
    model = load_model(folder, TrainerConfig(device="cpu"))
    return trainer_of(model, {"lr": 0.02, **table}, scheduler={"type": "linear"})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_two_steps_and_two_after_a_resume_are_four(
    tmp_path: Path,
    model_dir: Path,
    make_qwen3: MakeModel,
    table: dict[str, Any],
    tied: bool,
) -> None:
    """Nothing reads the untied LM head of a head's own model, so it never gets a gradient."""
    if not tied:
        make_qwen3(tie_word_embeddings=False).save_pretrained(model_dir)

    def train(trainer: Trainer, steps: Sequence[int]) -> None:
        for step in steps:
            trainer.train_step(step, rows_of(scored_rollouts(step), trainer.losses))

    straight, first = loaded(model_dir, table), loaded(model_dir, table)
    train(straight, (1, 2, 3, 4))
    train(first, (1, 2))
    checkpoint = write(first, 2, tmp_path / "checkpoint")
    resumed = loaded(checkpoint.weights, table)
    assert not same(resumed, first)  # the head is new
    restore(resumed, checkpoint)
    assert same(resumed, first)
    train(resumed, (3, 4))
    assert same(resumed, straight) and not same(first, straight)


def test_the_rate_of_a_head_follows_the_scheduler_from_its_own_peak(model_dir: Path) -> None:
    trainer = loaded(model_dir, {})
    trainer.train_step(11, rows_of(scored_rollouts(), trainer.losses))
    rates = [group["lr"] for each in trainer.optimizers for group in each.param_groups]
    assert rates == pytest.approx([0.005, 0.01])  # 10 of 20 steps of decay are done


@pytest.mark.parametrize("own_model", [False, True])
def test_a_head_computes_in_float32_beside_a_model_in_bfloat16(
    model_dir: Path, own_model: bool
) -> None:
    model = load_model(model_dir, TrainerConfig(device="cpu"))
    trainer = trainer_of(model, {"lr": 0.02, "own_model": own_model}, dtype="bfloat16")
    head, _ = trainer.heads["scores"]
    seen: list[torch.dtype] = []
    head.module.register_forward_hook(
        lambda module, given, out: seen.extend([given[0].dtype, out.dtype])
    )
    before = [parameter.detach().to_local().clone() for parameter in head.module.parameters()]
    trainer.train_step(1, rows_of(scored_rollouts(), trainer.losses))
    after = [parameter.detach().to_local() for parameter in head.module.parameters()]
    assert {*seen, *(each.dtype for each in after)} == {torch.float32}
    assert all((a != b).any() for a, b in zip(before, after, strict=True))


def test_no_tensor_of_a_head_is_published_or_exported(tmp_path: Path, model_dir: Path) -> None:
    trainer = loaded(model_dir, {"own_model": True})
    trainer.train_step(1, rows_of(scored_rollouts(), trainer.losses))
    publisher = Publisher(tmp_path / "broadcasts", 2)
    publisher.directory.mkdir()
    publisher.write(trainer.model, 1)
    export(trainer.model, model_dir, tmp_path / "weights")
    expected = load_file(model_dir / "model.safetensors").keys()
    for folder in (publisher.path(1), tmp_path / "weights"):
        assert load_file(folder / "model.safetensors").keys() == expected
