"""Learning rates, clipping and the optimizers' steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from prime_rl import ConfigError
from prime_rl.config.trainer import OWNERS, OptimConfig, SchedulerConfig
from prime_rl.trainer.optim import (
    Muon,
    clip_gradients,
    hidden_matrices,
    make_optimizer,
    make_schedule,
)


def rates(max_steps: int, peak: float = 1.0, **settings: Any) -> list[float]:
    """The learning rate of every step."""
    schedule = make_schedule(SchedulerConfig(**settings), peak, max_steps)
    return [schedule(step) for step in range(1, max_steps + 1)]


def test_constant_warms_up_and_stays() -> None:
    assert rates(4, type="constant") == [1, 1, 1, 1]
    assert rates(6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_warms_up_holds_and_decays() -> None:
    found = rates(8, type="linear", warmup_steps=2, decay_steps=4)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_linear_without_decay_steps_decays_all_the_way_to_min_lr() -> None:
    found = rates(5, peak=2.0, type="linear", warmup_steps=1, min_lr=1.0)
    assert found == pytest.approx([2, 2, 1.75, 1.5, 1.25])  # 1.0 after the last step


def test_cosine_decays_by_half_a_wave() -> None:
    found = rates(5, type="cosine", warmup_steps=1, min_lr=0.2)
    # (1 + cos(0, 45, 90, 135 degrees)) / 2 of the way from 0.2 to 1
    expected = [1, 1, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_no_step_has_a_rate_of_zero(kind: str) -> None:
    assert min(rates(7, type=kind, warmup_steps=3)) > 0


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="take 9 steps, max_steps is 8"):
        rates(8, type="linear", warmup_steps=5, decay_steps=4)
    with pytest.raises(ConfigError, match=r"min_lr is 2\.0, expected at most optim\.lr 1\.0"):
        rates(8, type="cosine", min_lr=2.0)


def with_gradient(*values: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_clipping_scales_all_gradients_and_reports_the_norm_before() -> None:
    first, second = with_gradient(3.0, 0.0), with_gradient(4.0)
    assert float(clip_gradients([first, second], 1.0)) == pytest.approx(5)
    assert first.grad is not None and second.grad is not None
    assert [*first.grad.tolist(), *second.grad.tolist()] == pytest.approx([0.6, 0, 0.8], abs=1e-5)


def test_without_max_norm_nothing_is_clipped_and_the_norm_is_reported() -> None:
    parameter = with_gradient(3.0, 4.0)
    assert float(clip_gradients([parameter], None)) == pytest.approx(5)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3, 4]


def test_adamw_takes_its_first_step_by_hand() -> None:
    """m / (sqrt(v) + eps) = sign(g) at first, so p <- p * (1 - lr * wd) - lr * sign(g)."""
    parameter = nn.Parameter(torch.tensor([2.0, 2.0]))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = make_optimizer(
        nn.ParameterList([parameter, frozen]), OptimConfig(lr=0.1, weight_decay=0.5)
    )
    parameter.grad = torch.tensor([3.0, -0.01])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([1.9 - 0.1, 1.9 + 0.1], abs=1e-5)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_sgd_with_momentum_by_hand() -> None:
    """m <- 0.5 m + g, p <- p * (1 - lr * wd) - lr * m: the decay does not enter m."""
    parameter = nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer(
        nn.ParameterList([parameter]),
        OptimConfig(type="sgd", lr=0.1, weight_decay=0.5, momentum=0.5),
    )
    parameter.grad = torch.tensor([3.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([2 * 0.95 - 0.3])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([1.6 * 0.95 - 0.1 * (1.5 + 3)])


def test_nesterov_steps_along_the_gradient_and_the_momentum_to_come() -> None:
    parameter = nn.Parameter(torch.tensor([0.0]))
    settings = OptimConfig(type="sgd", lr=0.1, weight_decay=0, momentum=0.5, nesterov=True)
    optimizer = make_optimizer(nn.ParameterList([parameter]), settings)
    parameter.grad = torch.tensor([2.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.1 * (2 + 0.5 * 2)])


def test_sign_sgd_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([2.0, 2.0, 2.0]))
    unused = nn.Parameter(torch.ones(1))
    optimizer = make_optimizer(
        nn.ParameterList([parameter, unused]), OptimConfig(type="sign_sgd", lr=0.1, weight_decay=1)
    )
    parameter.grad = torch.tensor([5.0, -0.1, 0.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([1.8 - 0.1, 1.8 + 0.1, 1.8])
    assert unused.item() == 1
    assert not optimizer.state


class Tiny(nn.Module):
    """Embedding and head share a matrix; between them one of 2 x 4 and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.between = nn.Linear(4, 2, bias=False)
        self.norm = nn.LayerNorm(2)
        self.frozen = nn.Linear(4, 2, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_muon_takes_the_matrices_between_and_adamw_the_rest() -> None:
    model = Tiny()
    found = hidden_matrices(model)
    assert [id(each) for each in found] == [id(model.between.weight)]
    optimizer = make_optimizer(model, OptimConfig(type="muon"))
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 4]


def test_muons_update_is_orthogonal_and_of_adamws_size() -> None:
    """0.2 sqrt(max(A, B)) U V^T has rows of length about 0.4 for 2 x 4: 0.2 a weight. Five
    Newton-Schulz steps leave the singular values between 0.7 and 1.2."""
    model = Tiny()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = make_optimizer(model, OptimConfig(type="muon", lr=0.1, weight_decay=0.0))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    update = (before["between.weight"] - model.between.weight.detach()) / (0.1 * 0.2 * 2)
    singular = torch.linalg.svdvals(update)
    assert float(singular.min()) > 0.65 and float(singular.max()) < 1.25
    moved = (model.embedding.weight - before["embedding.weight"]).abs()
    assert moved.flatten().tolist() == pytest.approx([0.1] * 32, rel=1e-3)  # Adam's first step
    assert torch.equal(model.frozen.weight, before["frozen.weight"])


def test_muon_equals_torchs_two_optimizers_also_after_loading_its_state() -> None:
    torch.manual_seed(0)
    ours, theirs = Tiny(), Tiny()
    theirs.load_state_dict(ours.state_dict())
    settings = OptimConfig(type="muon", lr=0.1, weight_decay=0.5)
    optimizer = make_optimizer(ours, settings)
    muon = torch.optim.Muon(
        [theirs.between.weight], lr=0.1, weight_decay=0.5, eps=1e-8, adjust_lr_fn="match_rms_adamw"
    )
    rest = [each for name, each in theirs.named_parameters() if name != "between.weight"]
    adamw = torch.optim.AdamW(rest, lr=0.1, weight_decay=0.5)
    for step in range(4):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        if step == 2:
            state = optimizer.state_dict()
            optimizer = make_optimizer(ours, settings)
            optimizer.load_state_dict(state)
        for each in (optimizer, muon, adamw):
            each.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one, other)


def test_muon_in_shards_takes_the_same_steps(tmp_path: Path) -> None:
    """One rank's shard is the whole matrix here; two were compared manually, to 3e-8."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight, settings = torch.randn(6, 4), OptimConfig(type="muon", lr=0.1)
        whole = nn.Parameter(weight.clone())
        shard = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Shard(0)]))
        one, other = Muon([whole], [], settings), Muon([shard], [], settings)
        for _ in range(3):
            whole.grad = torch.randn_like(weight)
            shard.grad = distribute_tensor(whole.grad.clone(), mesh, [Shard(0)])
            one.step()
            other.step()
        assert torch.equal(shard.full_tensor(), whole)
        assert not torch.equal(whole, weight)
    finally:
        torch.distributed.destroy_process_group()


def test_a_key_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="beta1 is a key of adamw and muon, and type is 'sgd'"):
        OptimConfig(type="sgd", beta1=0.5)
    with pytest.raises(ValueError, match="ns_steps is a key of muon, and type is 'adamw'"):
        OptimConfig(ns_steps=3)
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        OptimConfig(type="sgd", nesterov=True)
    resolved = OptimConfig(type="sgd", momentum=0.9)
    assert OptimConfig.model_validate_json(resolved.model_dump_json()) == resolved


def test_every_key_belongs_to_all_optimizers_or_to_those_named() -> None:
    kinds = set(get_args(OptimConfig.model_fields["type"].annotation))
    assert OWNERS.keys() < OptimConfig.model_fields.keys()
    assert {kind for owners in OWNERS.values() for kind in owners} < kinds
