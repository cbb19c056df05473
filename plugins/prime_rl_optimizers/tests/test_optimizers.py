"""Steps of the optimizers, and their tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from prime_rl import AdamWConfig, ConfigError, OptimizerMaker, PluginConfig
from prime_rl.config.trainer import OptimConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_optimizer
from prime_rl_optimizers.makers import (
    MuonConfig,
    MuonMaker,
    OffloadedAdamWMaker,
    SgdConfig,
    SgdMaker,
    SignSgdMaker,
)
from prime_rl_optimizers.muon import Muon, hidden_matrices

MUON = MuonMaker(MuonConfig())


def maker_of(config: OptimConfig) -> OptimizerMaker:
    """What a run with this table has."""
    return make_optimizer(config, load_plugins(TRAINER_GROUP))


def test_sgd_with_momentum_by_hand() -> None:
    """m <- 0.5 m + g, p <- p * (1 - lr * wd) - lr * m: the decay does not enter m."""
    parameter = nn.Parameter(torch.tensor([2.0]))
    maker = SgdMaker(SgdConfig(momentum=0.5))
    optimizer = maker.make(nn.ParameterList([parameter]), 0.1, 0.5)
    parameter.grad = torch.tensor([3.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([2 * 0.95 - 0.3])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([1.6 * 0.95 - 0.1 * (1.5 + 3)])


def test_sgd_leaves_a_weight_without_a_gradient_alone() -> None:
    used = nn.Parameter(torch.tensor([2.0]))
    unused = nn.Parameter(torch.tensor([2.0]))
    optimizer = SgdMaker(SgdConfig()).make(nn.ParameterList([used, unused]), 0.1, 0.5)
    used.grad = torch.tensor([0.0])
    optimizer.step()
    assert (used.tolist(), unused.tolist()) == (pytest.approx([2 * 0.95]), [2.0])


def test_nesterov_steps_along_the_gradient_and_the_momentum_to_come() -> None:
    parameter = nn.Parameter(torch.tensor([0.0]))
    maker = SgdMaker(SgdConfig(momentum=0.5, nesterov=True))
    optimizer = maker.make(nn.ParameterList([parameter]), 0.1, 0.0)
    parameter.grad = torch.tensor([2.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([-0.1 * (2 + 0.5 * 2)])


def test_sign_sgd_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor([2.0, 2.0, 2.0]))
    unused = nn.Parameter(torch.ones(1))
    maker = SignSgdMaker(PluginConfig())
    optimizer = maker.make(nn.ParameterList([parameter, unused]), 0.1, 1.0)
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
    optimizer = MUON.make(model, 1e-6, 0.01)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 4]


def test_muons_update_is_orthogonal_and_of_adamws_size() -> None:
    """0.2 sqrt(max(A, B)) U V^T has rows of length about 0.4 for 2 x 4: 0.2 a weight. Five
    Newton-Schulz steps leave the singular values between 0.7 and 1.2."""
    model = Tiny()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = MUON.make(model, 0.1, 0.0)
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
    optimizer = MUON.make(ours, 0.1, 0.5)
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
            optimizer = MUON.make(ours, 0.1, 0.5)
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
        weight, settings = torch.randn(6, 4), (MuonConfig(), 0.1, 0.01)
        whole = nn.Parameter(weight.clone())
        shard = nn.Parameter(distribute_tensor(weight.clone(), mesh, [Shard(0)]))
        one, other = Muon([whole], [], *settings), Muon([shard], [], *settings)
        for _ in range(3):
            whole.grad = torch.randn_like(weight)
            shard.grad = distribute_tensor(whole.grad.clone(), mesh, [Shard(0)])
            one.step()
            other.step()
        assert torch.equal(shard.full_tensor(), whole)
        assert not torch.equal(whole, weight)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"type": "sgd", "beta1": 0.5}, r"trainer.optim \(optimizer 'sgd'\).*beta1: unknown key"),
        ({"ns_steps": 3}, r"trainer.optim \(optimizer 'adamw'\).*ns_steps: unknown key"),
        ({"type": "sgd", "nesterov": True}, "nesterov needs a momentum"),
        ({"type": "muno"}, "no installed plugin offers the optimizer 'muno'.*Did you mean 'muon'"),
    ],
)
def test_a_key_of_another_optimizer_is_refused(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        maker_of(OptimConfig.model_validate(table))


def test_settings_come_through_the_config_that_a_run_writes() -> None:
    resolved = OptimConfig.model_validate({"type": "sgd", "momentum": 0.9})
    assert OptimConfig.model_validate_json(resolved.model_dump_json()) == resolved
    assert maker_of(resolved).config == SgdConfig(momentum=0.9)


def test_offloaded_adamw_has_the_numbers_of_adamw_also_after_a_resume_from_it() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    models[1].load_state_dict(models[0].state_dict())
    plain = torch.optim.AdamW(models[0].parameters(), lr=0.1, weight_decay=0.5, fused=True)
    offloaded = OffloadedAdamWMaker(AdamWConfig()).make(models[1], 0.1, 0.5)
    for step in range(4):
        if step == 2:  # another one goes on from AdamW's state
            offloaded = OffloadedAdamWMaker(AdamWConfig()).make(models[1], 0.1, 0.5)
            offloaded.load_state_dict(plain.state_dict())
        for model, optimizer in zip(models, (plain, offloaded), strict=True):
            optimizer.zero_grad()
            model(torch.full((2, 5), float(step))).square().sum().backward()
            optimizer.step()
        for mine, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert mine.equal(expected)
            assert offloaded.state[mine]["exp_avg_sq"].equal(plain.state[expected]["exp_avg_sq"])
