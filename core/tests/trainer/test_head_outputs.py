"""What heads may give besides one number a token: the state behind the last token, vectors, and
log-probabilities of a model of their own; and what a loss or head keeps in checkpoints."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_head import Fit, Scores, rollout_of, rows_of, scored_rollouts, trainer_of, with_scores
from test_heads import run_alone
from torch import nn
from trainer_fixtures import Ratio
from transformers import PreTrainedModel

from prime_rl import (
    ConfigError,
    HeadInputs,
    LossInputs,
    LossOutputs,
    PluginConfig,
    PluginError,
    StreamError,
)
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.scoring import stamp
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import Hooks
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.trainer.checkpoint import load_states, save_states

MakeModel = Callable[..., PreTrainedModel]


# -- the state behind the last token --------------------------------------------------------------


class Ends(Scores):
    reads_ends = True


def test_a_head_sees_its_output_behind_the_last_token_of_each_sample(
    make_model: MakeModel,
) -> None:
    head = Ends(PluginConfig())
    trainer = trainer_of(make_model(), {"lr": 0.1}, head)
    linear = copy.deepcopy(trainer.heads["scores"][0].module[0])
    plain = copy.deepcopy(trainer.model)
    plain.set_attn_implementation("sdpa")
    rollouts = scored_rollouts()
    expected = {}
    with torch.no_grad():
        for rollout in rollouts:
            states = []
            for sample in rollout.samples:
                ids = torch.from_numpy(sample.token_ids.astype(np.int64))
                found = plain(input_ids=ids[None], output_hidden_states=True)
                states.append(found.hidden_states[-1][0, -1])
            lengths = tuple(len(sample) for sample in rollout.samples)
            expected[lengths] = linear(torch.stack(states).float())[:, 0].numpy()

    trainer.train_step(1, rows_of(rollouts, trainer.losses))
    assert len(head.calls) == 4
    for call in head.calls:
        assert call.ends is not None
        np.testing.assert_allclose(call.ends, expected[call.lengths], atol=1e-5)


def test_a_sample_that_does_not_train_the_head_ends_with_zero(make_model: MakeModel) -> None:
    head = Ends(PluginConfig())
    trainer = trainer_of(make_model(), {}, head)
    (rollout, *_) = scored_rollouts()
    assert len(rollout.samples) == 2
    weights = np.ones(rollout.num_trainable_tokens)
    weights[-rollout.samples[1].loss_mask.sum() :] = 0.0
    rollout.assign_weights("fit", weights)
    trainer.train_step(1, rows_of([rollout], trainer.losses))
    (call,) = head.calls
    assert call.ends is not None
    assert call.ends[0] != 0.0 and call.ends[1] == 0.0


def test_a_head_that_does_not_ask_sees_no_ends(make_model: MakeModel) -> None:
    head = Scores(PluginConfig())
    trainer = trainer_of(make_model(), {}, head)
    trainer.train_step(1, rows_of(scored_rollouts(), trainer.losses))
    assert all(call.ends is None for call in head.calls)


# -- vectors --------------------------------------------------------------------------------------


class Vectors(Scores):
    gives_vectors = True

    def build(self, hidden_size: int) -> Any:
        return nn.Linear(hidden_size, 3)

    def prepare(self, inputs: HeadInputs) -> Mapping[str, Any]:
        self.calls.append(inputs)
        goals = np.where(inputs.loss_mask, inputs.streams["rewards"].sum(), 0.0)
        return {"goals": goals, "advantages": goals - inputs.outputs.sum(1)}


class FitVectors(Fit):
    """The sum over the three numbers of w (score_i - goal)^2 / 2."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        scores = inputs.streams["scores"]
        goals = inputs.streams["goals"]
        assert scores is not None and goals is not None and inputs.loss_weights is not None
        assert scores.shape == (len(goals), 3)
        terms = (scores - goals[:, None]).square().sum(1) / 2
        return LossOutputs((inputs.loss_weights * terms)[inputs.loss_mask].sum(), {})


def test_a_loss_reads_several_numbers_of_a_head_for_each_token(make_model: MakeModel) -> None:
    """With three equal rows of weights, the gradient of each is that of the head of one number."""

    def gradient(head: Scores, loss: type[Fit]) -> torch.Tensor:
        trainer = trainer_of(make_model(), {"detach": True}, head)
        installed = trainer.losses.installed
        installed["fit"] = replace(installed["fit"], cls=loss)  # type: ignore[index]
        linear = next(m for m in trainer.heads["scores"][0].modules() if type(m) is nn.Linear)
        with torch.no_grad():
            linear.weight.copy_(torch.linspace(-1, 1, linear.weight.shape[1]))
            linear.bias.fill_(0.25)
        kept: list[torch.Tensor] = []
        linear.weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.clone()))
        trainer.train_step(1, rows_of(scored_rollouts(), trainer.losses))
        return kept[-1]

    one = gradient(Scores(PluginConfig()), Fit)
    three = gradient(Vectors(PluginConfig()), FitVectors)
    assert three.shape == (3, one.shape[1])
    torch.testing.assert_close(three, one.expand(3, -1))


def test_a_head_of_vectors_that_gives_numbers_is_named(make_model: MakeModel) -> None:
    class Wrong(Scores):
        gives_vectors = True

    trainer = trainer_of(make_model(), {}, Wrong(PluginConfig()))
    with pytest.raises(PluginError, match=r"head 'scores': its module gave .*expected .* k\)"):
        trainer.train_step(1, rows_of(scored_rollouts()[:1], trainer.losses))


# -- a model of its own ---------------------------------------------------------------------------


class OwnLogprobs(Scores):
    gives_logprobs = True
    reads = ("rewards", "initial_logprobs")


def test_a_head_gives_logprobs_of_a_model_of_its_own(
    make_model: MakeModel, model_dir: Path
) -> None:
    """At first those of the policy; then its model follows its own loss, and reads the weights of
    the start beside them."""
    head = OwnLogprobs(PluginConfig())
    trainer = trainer_of(make_model(), {"own_model": True, "lr": 0.05}, head)
    start = model_dir / "start"
    trainer.model.save_pretrained(start)
    trainer.references._folder = start
    plain = copy.deepcopy(trainer.model)
    plain.set_attn_implementation("sdpa")
    rollouts = scored_rollouts()[:4]
    expected = {}
    for rollout in rollouts:
        with torch.no_grad():
            alone = torch.cat([run_alone(plain, sample)[0] for sample in rollout.samples])
        lengths = tuple(len(sample) for sample in rollout.samples)
        expected[lengths] = alone.numpy()

    trainer.train_step(1, rows_of(rollouts, trainer.losses))
    for call in head.calls:
        mask = call.loss_mask
        np.testing.assert_allclose(call.outputs[mask], expected[call.lengths][mask], atol=1e-5)
        initial = call.streams["initial_logprobs"]
        np.testing.assert_allclose(initial[mask], expected[call.lengths][mask], atol=1e-5)

    head.calls.clear()
    trainer.train_step(2, rows_of(scored_rollouts()[:4], trainer.losses))
    own = trainer.heads["scores"][0].model
    assert own is not None
    for call in head.calls:
        mask = call.loss_mask
        assert np.abs(call.outputs[mask] - expected[call.lengths][mask]).max() > 1e-3
        initial = call.streams["initial_logprobs"]
        np.testing.assert_allclose(initial[mask], expected[call.lengths][mask], atol=1e-5)


def test_logprobs_need_a_model_of_their_own() -> None:
    offered = with_scores(Ratio(PluginConfig()))
    config = TrainerConfig.model_validate({"heads": {"scores": {}}})
    with pytest.raises(ConfigError, match=r"trainer.heads.scores.*Set own_model = true"):
        load_head(OwnLogprobs, config)
    assert "scores" in offered.heads


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (("entropies",), "head 'scores' reads 'entropies'.*initial_logprobs"),
        ((("ema_logprobs", 0.0),), "head 'scores' reads 'ema_logprobs'"),
        (("a b",), "head 'scores' reads 'a b'"),
    ],
)
def test_what_no_head_can_read_is_refused(reads: Any, message: str) -> None:
    made = type("Wrong", (Scores,), {"reads": reads})
    config = TrainerConfig.model_validate({"heads": {"scores": {}}})
    with pytest.raises(PluginError, match=message):
        load_head(made, config)


def load_head(head: type[Scores], config: TrainerConfig) -> Components:
    """The components of a run whose only plugin offers this head."""
    from prime_rl import hookimpl

    class Plugin:
        @hookimpl
        def register_heads(self) -> list[type[Scores]]:
            return [head]

    hooks = Hooks(TRAINER_GROUP)
    hooks.register(Plugin(), "plugin")
    return Components.load(config, hooks)


# -- defaults -------------------------------------------------------------------------------------


class WithDefault(Scores):
    reads = ("rewards", ("bonus", 0.5), ("extra", None))


def test_a_head_reads_a_default_where_no_algorithm_assigned_the_stream(
    make_model: MakeModel,
) -> None:
    head = WithDefault(PluginConfig())
    trainer = trainer_of(make_model(), {}, head)
    rollouts = scored_rollouts()[:4]
    rollouts[1].assign_stream("bonus", 2.0)
    rollouts[2].assign_stream("extra", 3.0)
    trainer.train_step(1, rows_of(rollouts, trainer.losses))
    by_lengths = {call.lengths: call for call in head.calls}
    for number, rollout in enumerate(rollouts):
        call = by_lengths[tuple(len(sample) for sample in rollout.samples)]
        bonus = call.streams["bonus"][call.loss_mask]
        assert set(bonus.tolist()) == {2.0 if number == 1 else 0.5}
        if number == 2:
            assert set(call.streams["extra"][call.loss_mask].tolist()) == {3.0}
        lacking = rollout_of("a", 9, [5], 0)
        lacking.assign_weights("fit", 1.0)
        with pytest.raises(StreamError, match="reads 'rewards', but no rewards were assigned"):
            stamp(lacking, "rl", trainer.losses)


# -- what is kept ---------------------------------------------------------------------------------


class Adaptive(Ratio):
    """Keeps the sum of the losses that it was told of."""

    name = "adaptive"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.total = 0.0
        self.steps: list[int] = []

    def batch_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        self.total += metrics["loss/mean"]
        self.steps.append(step)

    def save(self, directory: Path) -> None:
        (directory / "total.json").write_text(json.dumps([self.total, self.steps]))

    def load(self, directory: Path) -> None:
        self.total, self.steps = json.loads((directory / "total.json").read_text())


def test_a_loss_and_a_head_keep_what_follows_from_the_metrics(
    make_model: MakeModel, tmp_path: Path
) -> None:
    def made() -> Any:
        trainer = trainer_of(make_model(), {})
        trainer.losses = with_scores(Adaptive(PluginConfig()), Scores(PluginConfig()))
        return trainer

    trainer = made()
    metrics = [
        trainer.train_step(step, rows_of(scored_rollouts(step), trainer.losses)) for step in (1, 2)
    ]
    kept = trainer.losses["rl"].loss
    assert kept.steps == [1, 2]
    assert kept.total == sum(each["loss/mean"] for each in metrics)

    folder = Checkpoint(tmp_path / "step_2").states
    save_states(trainer, folder)
    assert [path.name for path in folder.iterdir()] == ["rl.adaptive"]
    resumed = made()
    load_states(resumed, folder)
    assert resumed.losses["rl"].loss.steps == [1, 2]
    assert resumed.losses["rl"].loss.total == kept.total


def test_a_run_without_such_a_loss_leaves_no_folder_and_ignores_one(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(make_model(), {})
    folder = tmp_path / "states"
    save_states(trainer, folder)
    assert not folder.exists()
    (folder / "gone").mkdir(parents=True)
    load_states(trainer, folder)
    assert "the run has no loss or head 'gone' now" in caplog.text
