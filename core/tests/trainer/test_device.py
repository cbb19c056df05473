"""Offloading to the host and back. The host stands in for the GPU in these tests."""

import pytest
import torch
from torch import nn

from prime_rl.trainer.device import HOST, Offload, compute_dtype, moving_state


def trained(**options):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


@pytest.mark.parametrize(("fused", "names"), [(True, {"step"}), (False, set())])
def test_the_count_of_steps_moves_only_where_the_optimizer_is_fused(fused, names):
    _, optimizer = trained(fused=fused)
    moved = [name for _, name in moving_state(optimizer)]
    assert set(moved) == {"exp_avg", "exp_avg_sq"} | names
    assert len(moved) == 2 * len(set(moved))  # of the weight, of the bias


def test_everything_leaves_the_device_and_comes_back_as_the_same_parameters():
    """``meta`` stands in for the GPU: a tensor on it is where it was sent."""
    model, optimizer = trained(fused=True)
    before = list(model.parameters())
    memory = Offload(model, [optimizer], torch.device("meta"), enabled=True)
    memory.load()
    tensors = [*model.parameters(), *(state[name] for state, name in moving_state(optimizer))]
    assert len(tensors) == 8 and {tensor.device.type for tensor in tensors} == {"meta"}
    assert all(a is b for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))


def test_on_the_host_steps_with_and_without_it_are_bit_equal():
    torch.manual_seed(0)
    plain, steps = trained(fused=True)
    torch.manual_seed(0)
    moved, others = trained(fused=True)
    memory = Offload(moved, [others], HOST, enabled=True)
    for model, optimizer in ((plain, steps), (moved, others)):
        for _ in range(3):
            if model is moved:
                memory.load()
            model(torch.arange(3.0)[None]).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if model is moved:
                assert memory.unload() >= 0
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True)
    )


class OnGpu:
    """A tensor on a GPU, as far as a move reads it."""

    device = torch.device("cuda")
    shape = torch.Size((2,))
    dtype = torch.float32

    def to(self, device, non_blocking=False):
        return ("copied", device.type, non_blocking)


def test_without_pinned_memory_the_state_moves_through_ordinary_memory(monkeypatch, caplog):
    def refuse(*_, **settings):
        assert settings["pin_memory"]
        raise RuntimeError("out of host memory")

    monkeypatch.setattr(torch, "empty_like", refuse)
    memory = Offload(nn.Linear(1, 1), [], torch.device("cuda"), enabled=True)
    found = [memory._moved(OnGpu(), HOST, position) for position in range(3)]
    assert found == [("copied", "cpu", False)] * 3
    assert caplog.text.count("no more pinned memory") == 1


def test_switched_off_nothing_moves():
    model, optimizer = trained()
    memory = Offload(model, [optimizer], torch.device("meta"), enabled=False)
    assert memory.load() == memory.unload() == 0.0
    assert model.weight.device.type == "cpu"


def test_the_precision_is_bfloat16_where_a_gpu_has_it(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: seen.append(1) or len(seen) > 1
    )
    gpu = torch.device("cuda")
    assert [compute_dtype("auto", gpu) for _ in range(2)] == ["float32", "bfloat16"]
    assert compute_dtype("auto", HOST) == "float32" and len(seen) == 2
    assert compute_dtype("float32", gpu) == "float32"
    assert compute_dtype("bfloat16", HOST) == "bfloat16"
