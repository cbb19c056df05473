"""The trainer's step on a GPU and on many ranks that are not there: where tensors lie, what waits
for the device, which kernels run in which type, and the collectives."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import fake_cuda
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(fake_cuda.lacks()), reason=f"needs {fake_cuda.lacks()}"),
]
TWO_WAITS = {"item update.py": 1, "to host metrics.py": 1}
"""For the gradient's norm, and for everything that the step measured, in one copy."""
LAYERS, ROWS = 2, 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case did, from one process."""
    folder, script = tmp_path_factory.mktemp("fake"), Path(__file__).with_name("fake_cuda_cases.py")
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def case(found: dict[str, Any], name: str) -> dict[str, Any]:
    result: dict[str, Any] = found[name]
    assert "error" not in result, result["traceback"][-3000:]
    return result


def waits(result: dict[str, Any]) -> dict[str, int]:
    """By kind and file."""
    counts: dict[str, int] = {}
    for where, number in result["waits"].items():
        kind = where.partition(":")[0]
        counts[kind] = counts.get(kind, 0) + number
    return counts


@pytest.mark.parametrize(
    "name",
    [
        *("dense", "recompute", "lora", "muon", "moe", "moe lora", "moe, 8 ranks", "every loss"),
        *("experts lora", "experts lora, 8 ranks"),
    ],
)
def test_a_step_waits_twice_for_the_device_and_multiplies_in_bfloat16(
    found: dict[str, Any], name: str
) -> None:
    result = case(found, name)
    assert waits(result) == TWO_WAITS
    assert result["float32_products"] == {}
    assert result["devices"] == ["cuda:0"]
    assert result["state_dtypes"] == ["torch.float32"]
    assert result["packing"] == "packed"
    assert result["dtype"] == "bfloat16"  # without a key that says so


def test_weights_are_float32_and_a_frozen_base_bfloat16_also_on_one_rank(
    found: dict[str, Any],
) -> None:
    for name in ("dense", "recompute", "muon", "moe", "8 ranks"):
        assert case(found, name)["weight_dtypes"] == ["True torch.float32"], name
    for name in (
        "lora",
        "moe lora",
        "experts lora",
        "experts lora, 8 ranks",
    ):  # by whether it is trained
        dtypes = ["False torch.bfloat16", "True torch.float32"]
        assert case(found, name)["weight_dtypes"] == dtypes
    for name in ("dense", "lora"):
        assert (case(found, name)["mesh"], case(found, name)["collectives"]) == ([1], {})


@pytest.mark.parametrize("name", ["offload", "offload, 8 ranks"])
def test_offloaded_moments_stay_on_the_host(found: dict[str, Any], name: str) -> None:
    result = case(found, name)
    assert {each.split()[0] for each in result["moments"]} == {"cpu"}
    assert result["devices"] == ["cpu", "cuda:0"]
    assert {each: n for each, n in waits(result).items() if n} == TWO_WAITS


def test_in_turns_the_trainer_holds_the_gpu_for_its_step_only(found: dict[str, Any]) -> None:
    """The default layout of one GPU. The step itself is that of a trainer with a GPU of its own."""
    result = case(found, "in turns")
    on_host, on_gpu = ["cpu"], ["cuda:0"]
    places = {each: where for each, where in result["places"].items() if "buffers" not in each}
    assert places == {
        "made": on_host,
        "loaded 1": on_gpu,
        "unloaded 1": on_host,
        "loaded 2": on_gpu,
        "unloaded 2": on_host,
    }
    assert (result["dtype"], result["packing"]) == ("bfloat16", "packed")
    assert result["weight_dtypes"] == ["torch.float32"]
    # FSDP2 of one rank: every parameter is a shard, and nothing is exchanged.
    assert (result["whole_tensors"], result["mesh"], result["collectives"]) == (0, [1], {})
    assert waits(result) == TWO_WAITS
    assert result["kernels"] == case(found, "dense")["kernels"]
    assert result["float32_products"] == {}


def test_in_turns_experts_are_made_on_the_host_too(found: dict[str, Any]) -> None:
    """Engines have the GPU's memory when a colocated trainer starts."""
    result = case(found, "experts in turns")
    assert (result["filled"], result["resident"]) == (["cpu"], ["cpu"])


def test_in_turns_the_state_moves_through_pinned_memory_that_is_kept(found: dict[str, Any]) -> None:
    result = case(found, "in turns")
    number, all_pinned = result["places"]["new buffers 1"]
    assert number > 0 and all_pinned
    assert result["places"]["new buffers 2"] == [0, True]
    assert result["loading"] == result["unloading"] == {}  # each copy is queued


def test_a_row_is_one_call_of_the_varlen_kernel_in_each_layer(found: dict[str, Any]) -> None:
    calls = LAYERS * ROWS
    for name, forward in {"dense": calls, "moe": calls, "recompute": 2 * calls}.items():
        kernels = case(found, name)["kernels"]
        assert kernels["_varlen_attn"] == forward
        assert kernels["_varlen_attn_backward"] == calls
        assert "bmm" not in kernels
        # Its gradient is a copy of a layer's heads, in another layout.
        assert "select_backward" not in kernels
        assert not any("scaled_dot_product" in each for each in kernels)


def test_experts_take_two_grouped_products_forward_and_four_backward(found: dict[str, Any]) -> None:
    assert case(found, "moe")["kernels"]["_grouped_mm"] == LAYERS * ROWS * (2 + 4)
    frozen = case(found, "moe lora")["kernels"]["_grouped_mm"]
    assert frozen == LAYERS * ROWS * (2 + 2)  # no gradients of weights
    # A and B for each of the two, with gradients.
    adapted = case(found, "experts lora")["kernels"]["_grouped_mm"]
    assert adapted == frozen + LAYERS * ROWS * 2 * (2 + 4)


def test_halves_for_all_experts_are_sharded_and_published_whole(found: dict[str, Any]) -> None:
    """8 experts of rank 4: B [64, 4 * 8] of down_proj."""
    result = case(found, "experts lora, 8 ranks")
    assert (result["whole_tensors"], result["placements"]) == (0, ["(Shard(dim=0),)"])
    assert result["published"] == case(found, "experts lora")["published"]
    name = "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    assert [name, [64, 32]] in result["published"]


def test_float32_has_no_varlen_kernel(found: dict[str, Any]) -> None:
    result = case(found, "float32")
    assert waits(result) == TWO_WAITS
    assert "_varlen_attn" not in result["kernels"]
    assert result["kernels"]["bmm"] > 0  # scores of every pair of tokens are in memory


def test_every_installed_loss_but_the_users_own_was_in_that_step(found: dict[str, Any]) -> None:
    names = {*case(found, "every loss")["losses"], *case(found, "losses with heads")["losses"]}
    assert {"default", "ipo", "ce", "ref_kl", "top_kl", "gspo", "clip_cov", "dpo"} < names
    assert "value_loss" in names and "custom" not in names


def test_a_head_waits_per_row_for_its_outputs_and_ends_and_once_for_its_norm(
    found: dict[str, Any],
) -> None:
    """Two heads, each with a row of its own; the third norm is the policy's."""
    result = case(found, "losses with heads")
    rows = len(result["losses"])
    assert waits(result) == {**TWO_WAITS, "item update.py": 3, "to host heads.py": 2 * rows}
    assert result["devices"] == ["cuda:0"]


def test_a_token_export_only_adds_its_own_copies(found: dict[str, Any]) -> None:
    counts = waits(case(found, "token export"))
    assert counts.pop("to host token_export.py") > 0
    assert counts == TWO_WAITS


@pytest.mark.parametrize("name", ["dense", "moe", "8 ranks", "4 x 64 ranks"])
def test_copying_the_weights_for_a_thread_waits_for_nothing(
    found: dict[str, Any], name: str
) -> None:
    """Neither the device nor other ranks: copies into pinned memory are queued, then an event."""
    assert case(found, name)["copied"] == {
        "done": True,
        "waits": {},
        "pinned": [True],
        "events": 1,
        "places": ["cpu torch.bfloat16"],
        "collectives": {},
    }


@pytest.mark.parametrize("name", ["dense", "8 ranks"])
def test_copying_the_weights_for_a_broadcast_waits_for_nothing_and_stays_on_the_gpu(
    found: dict[str, Any], name: str
) -> None:
    """In bfloat16: a tied embedding; in each of two layers attention 64 -> 64 and 2 of 64 -> 32,
    back 64 -> 64, three of 64 x 128, norms of 64, 64, 16 and 16; the last norm."""
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    size = 2 * (512 * 64 + 2 * layer + 64)
    assert case(found, name)["staged"] == {
        "waits": {}, "places": ["cuda:0 torch.uint8"], "bytes": size
    }  # fmt: skip


def test_shards_of_experts_are_published_as_whole_ones_are(found: dict[str, Any]) -> None:
    names = case(found, "moe, 8 ranks")["published"]
    assert names == case(found, "moe")["published"]
    assert ["model.layers.1.mlp.experts.7.down_proj.weight", [64, 32]] in names


@pytest.mark.parametrize(
    ("name", "mesh", "placements", "shard", "all_reduces"),
    [
        ("8 ranks", [8], "(Shard(dim=0),)", [8, 128], 0),
        ("256 ranks", [256], "(Shard(dim=0),)", [1, 128], 0),
        ("4 x 64 ranks", [4, 64], "(Replicate(), Shard(dim=0))", [1, 128], 1),
    ],
)
def test_ranks_hold_shards_and_exchange_them_block_by_block(
    found: dict[str, Any],
    name: str,
    mesh: list[int],
    placements: str,
    shard: list[int],
    all_reduces: int,
) -> None:
    result = case(found, name)
    assert result["whole_tensors"] == 0
    assert (result["mesh"], result["placements"]) == (mesh, [placements])
    assert (result["whole"], result["shard"]) == ([64, 128], shard)
    units = LAYERS + 1  # the blocks, and the rest
    # Weights go around in bfloat16, once for all rows; those of a model of this size stay gathered.
    # Gradients go in float32.
    expected = {
        "_allgather_base_ bfloat16": units,
        "_reduce_scatter_base_ float32": ROWS * units,
        "allreduce_ float32": units * all_reduces,  # replicas: once per step
        "allgather_ float32": 1,  # the norm
    }
    assert result["collectives"] == {each: n for each, n in expected.items() if n}
    assert waits(result) == TWO_WAITS
    assert result["float32_products"] == {} and result["devices"] == ["cuda:0"]


def test_weights_that_do_not_stay_are_gathered_for_each_pass_of_each_row(
    found: dict[str, Any],
) -> None:
    kept = case(found, "8 ranks")
    freed = case(found, "8 ranks, resharded")
    units = LAYERS + 1
    # What is no block stays between forward and backward.
    expected = {"_allgather_base_ bfloat16": ROWS * (units + LAYERS)}
    assert freed["collectives"] == kept["collectives"] | expected
    assert waits(freed) == TWO_WAITS


def test_one_rank_copies_each_weight_once_in_a_step(found: dict[str, Any]) -> None:
    """A block has 11 weights, and the rest two, which stay between forward and backward."""
    kept = case(found, "dense")["kernels"]
    freed = case(found, "resharded")["kernels"]
    blocks = LAYERS * 11
    assert freed["copy_"] - kept["copy_"] == ROWS * (2 * blocks + 2) - (blocks + 2)


def test_ranks_of_a_row_exchange_heads_for_tokens_in_every_layer(found: dict[str, Any]) -> None:
    result = case(found, "256 ranks, rows of 4")
    alone = case(found, "256 ranks")
    own = Counter(result["collectives"])
    own.subtract(alone["collectives"])
    assert {name: number for name, number in own.items() if number} == {
        # Query, key and value before attention, its output after; and their gradients.
        "alltoall_base_ bfloat16": ROWS * LAYERS * (4 + 4),
        "_allgather_base_ bfloat16": ROWS,  # hidden states
        "_reduce_scatter_base_ bfloat16": ROWS,  # their gradients
        "_allgather_base_ float32": ROWS * 2,  # log π and entropies of the targets
        "_reduce_scatter_base_ float32": ROWS,  # the gradient of log π
    }
    assert result["shard"] == alone["shard"] and result["mesh"] == alone["mesh"]
    assert waits(result) == TWO_WAITS
    assert result["float32_products"] == {} and result["devices"] == ["cuda:0"]
