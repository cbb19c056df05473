"""What a run refuses of losses and their tables, and what one component keeps from another."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, Rollout, Sample, hookimpl
from prime_rl.config.trainer import LossTable, TrainerConfig
from prime_rl.errors import ConfigError, PluginError, StreamError
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.orchestrator.scoring import stamp
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry import components
from prime_rl.registry.components import Components, installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.packed_row import make_row
from prime_rl.trainer.packing import Packing
from prime_rl.wire.micro_batch import MicroBatch, decode_batch

CPU = torch.device("cpu")


class Plain(Loss):
    """Keeps the inputs of each call."""

    name = "plain"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.calls: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        self.calls.append(inputs)
        metrics = {f"{self.name}/ratio": torch.ones(())}
        return LossOutputs(inputs.trainer_logprobs[inputs.loss_mask].sum(), metrics)


def loss_of(**attributes: Any) -> Loss:
    return type("Made", (Plain,), attributes)(PluginConfig())


def rollout_of(env: str, group: int = 0, num_samples: int = 1) -> Rollout:
    samples = [
        Sample(token_ids=[1, 2, 3], loss_mask=[False, True, True], inference_logprobs=[0, 0, 0])
        for _ in range(num_samples)
    ]
    rollout = Rollout(env=env, example_id=0, group_id=group, reward=0.0, samples=samples)
    rollout.assign_advantages(1.0)
    return rollout


def packed(losses: Components, *rollouts: Rollout, capacity: int = 32) -> list[MicroBatch]:
    (frame,) = batch_frames(batch_to_pack(1, rollouts, losses, capacity), capacity)
    return decode_batch(frame)[1]


def train(losses: Components, *rows: MicroBatch) -> None:
    for row in rows:
        logprobs = torch.zeros(len(row), requires_grad=True)
        row_loss(make_row(row, CPU), logprobs, losses, count_members(rows, losses))


def load(**trainer: Any) -> Components:
    config = TrainerConfig.model_validate({"loss": {"type": "plain"}} | trainer)
    return Components.load(config, load_plugins(TRAINER_GROUP))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"reads": "advantages"}, "reads is 'advantages'. Expected a tuple"),
        ({"reads": ("inference_logprobs",)}, "first six fields of LossInputs are not named"),
        ({"reads": (("entropies", 0.0),)}, "that core computes .* has no default"),
        ({"reads": ("rl_weights",)}, "Expected a tuple of streams"),
        ({"scope": "sample"}, "scope is 'sample'. Expected one of token, sequence, rollout, group"),
        ({"normalize_by": "token"}, "normalize_by is 'token'. Expected one of tokens, sequences"),
    ],
)
def test_a_declaration_that_nothing_would_follow_is_refused(
    attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PluginError, match=message):
        installed_losses().with_rl(loss_of(**attributes))


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"losses": {"clip": {}}}, r"trainer.losses.clip: no installed .* mean 'clipped'\?"),
        ({"losses": {"clipped": {"clip_eps_hi": 1}}}, r"clipped.*clip_eps_hi: unknown key"),
        ({"losses": {"rl": {}}}, r'trainer.losses.rl: "rl" is the loss of \[trainer.loss\]'),
        ({"losses": {"clipped": {"constant": 9}}}, "clipped.constant: .* divided by its tokens"),
        ({"loss": {"type": "plain", "constant": 9}}, r"trainer.loss.constant: .* its tokens"),
    ],
)
def test_a_table_that_nothing_would_read_is_refused(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        losses = load(**trainer)
        for name in losses.tables:
            losses[name]


@pytest.mark.parametrize(
    "table",
    [{"normalize_by": "env", "per_env": False}, {"normalize_by": "constant"}],
)
def test_keys_of_a_table_that_contradict_each_other_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="normalize_by is"):
        LossTable.model_validate(table)


def test_a_further_loss_has_a_divisor_per_env_if_the_rl_loss_has_unless_it_says_otherwise() -> None:
    losses = load(
        loss={"type": "plain", "normalize_by": "env"},
        losses={"clipped": {"normalize_by": "sequences"}, "plain": {"per_env": False}},
    )
    assert [(losses[n].unit, losses[n].per_env) for n in ("rl", "clipped", "plain", "ce")] == [
        *(("tokens", True), ("sequences", True), ("tokens", False), ("tokens", True)),
    ]


def test_the_scope_of_a_loss_binds_only_rollouts_that_it_trains() -> None:
    """The rl loss sees groups whole; env b trains ce, and its group fits no row of six tokens."""
    losses = installed_losses().with_rl(loss_of(scope="group"))
    group = [rollout_of("b") for _ in range(3)]
    for rollout in group:
        stamp(rollout, "ce", losses)
    rows = packed(losses, *group, capacity=6)
    assert [row.num_sequences for row in rows] == [2, 1]
    assert all(row.group_ids is None for row in rows)


def test_a_bundle_that_fits_no_row_is_refused_with_its_env_and_size() -> None:
    losses = installed_losses().with_rl(loss_of(scope="rollout"))
    with pytest.raises(StreamError, match=r"env 'words': 3 samples with 9 tokens .* row holds 8"):
        packed(losses, rollout_of("words", num_samples=3), capacity=8)


def test_a_default_that_is_no_integer_stands_in_for_integers() -> None:
    loss = loss_of(reads=(("level", 0.5),))
    losses = installed_losses().with_rl(loss)
    first, second = rollout_of("a"), rollout_of("a")
    first.assign_stream("level", [3, 4])
    train(losses, *packed(losses, first, second))
    levels = [call.streams["level"] for call in loss.calls]  # type: ignore[attr-defined]
    assert [column.tolist() for column in levels] == [[0, 3, 4], [0.5, 0.5, 0.5]]


def test_an_integer_default_stands_in_for_ids_in_any_row() -> None:
    loss = loss_of(reads=(("ids", -1),))
    losses = installed_losses().with_rl(loss)
    first, second = rollout_of("a"), rollout_of("a")
    first.assign_stream("ids", np.array([2**31 - 1, 7]))
    train(losses, *packed(losses, first, second), *packed(losses, second))
    found = [call.streams["ids"] for call in loss.calls]  # type: ignore[attr-defined]
    assert {column.dtype for column in found} == {torch.int32}
    assert [column.tolist() for column in found] == [[0, 2**31 - 1, 7], [-1] * 3, [-1] * 3]


def test_the_rl_loss_may_report_metrics_under_its_own_name() -> None:
    losses = Components(installed_losses().tables, installed_losses().installed)
    loss = loss_of(name="clipped")  # as the installed one of that name
    train(losses.with_rl(loss), *packed(losses.with_rl(loss), rollout_of("a")))
    other = loss_of()
    other.name = "plain"
    type(other).__call__ = lambda self, inputs: LossOutputs(  # type: ignore[method-assign]
        inputs.trainer_logprobs.sum(), {"ce/nll": torch.ones(())}
    )
    with pytest.raises(PluginError, match="reports a metric 'ce/nll', but that name is in use"):
        train(losses.with_rl(other), *packed(losses.with_rl(other), rollout_of("a")))


def test_a_stream_that_no_loss_of_its_tokens_reads_is_refused() -> None:
    losses = installed_losses().with_rl(loss_of(reads=("advantages", ("grades", 0.0))))
    rollout = rollout_of("words", group=4)
    rollout.assign_stream("grads", 0.5)
    message = "env 'words', group 4: no loss .* reads the stream 'grads' .*advantages, grades"
    with pytest.raises(StreamError, match=message):
        stamp(rollout, "rl", losses)
    read = rollout_of("words")
    read.assign_stream("grades", 0.5)
    stamp(read, "rl", losses)


@pytest.mark.parametrize("action_loss", ["rl", "clipped"])
def test_zero_credit_leaves_the_loss_that_it_drives_whatever_its_name(action_loss: str) -> None:
    losses = load()
    alone, beside = rollout_of("a"), rollout_of("a")
    for rollout in (alone, beside):
        rollout.assign_advantages(0.0)
    beside.samples[0].ce_weights = np.array([0, 1, 0], np.float32)
    for rollout in (alone, beside):
        stamp(rollout, action_loss, losses)
    assert not alone.trains_beside_rl and alone.has_members
    assert beside.trains_beside_rl
    assert {name for name, _ in count_members(packed(losses, beside), losses).members} == {"ce"}


def test_the_kit_knows_a_loss_that_is_divided_by_a_constant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An algorithm that names it is checked without a table of the user's."""
    cls = type(loss_of(name="drgrpo", normalize_by="constant"))
    hooks = load_plugins(TRAINER_GROUP)
    hooks.register(SimpleNamespace(register_losses=hookimpl(lambda: [cls])), "drgrpo")
    monkeypatch.setattr(components, "load_plugins", lambda group: hooks)
    assert components.installed_losses.__wrapped__()["drgrpo"].unit == "constant"


def test_a_plugins_packing_may_call_its_parameters_otherwise() -> None:
    class Renamed(Packing):
        def lay_out(self, ids, owners, sizes, places, where, last=None):  # type: ignore[no-untyped-def]
            return super().lay_out(ids, owners, sizes, places, where, last)

    mine = {"ids", "owners", "sizes", "places", "where", "last"}
    assert not mine & {*inspect.signature(Packing.lay_out).parameters}
    losses = installed_losses().with_rl(loss_of())
    rollout = rollout_of("a", num_samples=2)
    stamp(rollout, "rl", losses)
    (micro_batch,) = packed(losses, rollout)
    row, expected = (make_row(micro_batch, CPU, packing) for packing in (Renamed(), Packing()))
    assert row.layout.token_ids.equal(expected.layout.token_ids)
