"""Experts on their ranks, and rows over several ranks: what they send, what they take, and which
of them a run would refuse."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl import ConfigError, Engine, PluginConfig
from prime_rl.config.run import RunConfig
from prime_rl.trainer import model as models
from prime_rl_plan import estimate as estimates
from prime_rl_plan import measure
from prime_rl_plan.architecture import num_experts
from prime_rl_plan.devices import NETWORK, SENT, SHARED, parse
from prime_rl_plan.estimate import PlanFacts, Traffic, times, traffic

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
pytestmark = pytest.mark.filterwarnings("ignore:Set timeout is now only")
TOKENS = 256
HALF = 2
"""Bytes of a number in bfloat16."""
FULL = 4


def request_of(ranks: int, layers: int, model: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    return {
        "gpu": True,
        "half": True,
        "ranks": ranks,
        "rows": 1,
        "component": "rl",
        "row_tokens": TOKENS,
        "seq_len": TOKENS,
        "model": model | {"num_hidden_layers": layers},
        "trainer": {"loss": {"type": "default"}, "compile": False} | trainer,
        "layers": [layers, layers],
        "roofline": {"bfloat16": 1.0, "float32": 1.0, "bytes": 1.0},
    }


def measured(ranks: int, layers: int, **trainer: Any) -> dict[str, Any]:
    """A step on fake ranks: costs of a row and the update, and peaks."""
    request = request_of(ranks, layers, MODEL, **trainer)
    # Groups of a row need a process of their own: a process makes fake ones only once.
    is_apart = "context_parallel" in trainer
    return estimates._ask(json.dumps(request)) if is_apart else measure.answer(request)


def of_a_layer(ranks: int, **trainer: Any) -> dict[str, float]:
    """Bytes that one more layer moves over the network."""
    two, three = (measured(ranks, layers, **trainer) for layers in (2, 3))
    return over_the_network(two["costs"], three["costs"])


def over_the_network(two: dict[str, float], three: dict[str, float]) -> dict[str, float]:
    """By how much the costs of three layers are more."""
    return {
        key: three[key] - two.get(key, 0.0)
        for key in three
        if "network" in key and three[key] != two.get(key, 0.0)
    }


HIDDEN = MODEL["hidden_size"]
ATTENTION = HIDDEN * 16 * (4 + 2 + 2) + 4 * 16 * HIDDEN + 2 * 16 + 2 * HIDDEN
"""Weights of queries, keys, values, output, and the norms of heads and block."""
ROUTER = MODEL["num_experts"] * HIDDEN
EXPERTS = MODEL["num_experts"] * 3 * HIDDEN * MODEL["moe_intermediate_size"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "replicas"), [(4, 1), (8, 2), (8, 1)])
def test_tokens_travel_instead_of_experts(ranks: int, replicas: int) -> None:
    """Gathered experts: all weights of a layer come twice, in bfloat16, and their gradients are
    summed once, in float32. Else these are those of attention and router alone, and a token's k
    rows travel four times: to the experts and back, forward and backward."""
    shards = ranks // replicas
    gathered = of_a_layer(ranks, dp_replicate=replicas)
    group = f"{shards}/{shards}"
    whole = ATTENTION + ROUTER + EXPERTS
    assert gathered[f"rows_network/{SHARED}/{group}"] == whole * (2 * HALF + FULL)
    own = of_a_layer(ranks, dp_replicate=replicas, expert_parallel=True)
    assert own[f"rows_network/{SHARED}/{group}"] == (ATTENTION + ROUTER) * (2 * HALF + FULL)
    rows = TOKENS * MODEL["num_experts_per_tok"] * HIDDEN
    assert own[f"rows_network/{SENT}/{group}"] == 4 * rows * HALF
    if replicas == 1:
        return
    # Once per step, each rank's share over the replicas: to the sum, and the sum back.
    between = f"update_network/{SHARED}/{replicas}/{ranks - shards + 1}"
    assert gathered[between] == 2 * whole / shards * FULL
    assert own[between] == 2 * whole / shards * FULL
    halved = of_a_layer(ranks, dp_replicate=replicas, expert_parallel=True, reduce_dtype="bfloat16")
    assert halved[between] == gathered[between] / 2
    shared = f"rows_network/{SHARED}/{group}"
    assert halved[shared] == (ATTENTION + ROUTER) * 3 * HALF


@pytest.mark.slow
@pytest.mark.parametrize("of_experts", [False, True])
def test_adapters_lie_beside_experts_that_are_frozen_on_their_ranks(of_experts: bool) -> None:
    """Of one layer. A block gathers frozen weights twice and sums no gradient of them; A and B of
    attention it gathers twice, in bfloat16, and sums once. Experts and their A and B do not
    travel. A rank holds as much as where all is gathered before a block runs: a quarter of the
    frozen weights in bfloat16, and of A and B, their gradients and moments in float32."""
    ranks, rank = 4, 4
    lora = {"rank": rank, "experts": of_experts}
    outputs = (64, 32, 32, HIDDEN)
    linear = sum(rank * (HIDDEN + output) for output in outputs)
    width = MODEL["moe_intermediate_size"]
    per_expert = rank * ((HIDDEN + 2 * width) + (width + HIDDEN)) if of_experts else 0
    of_stacks = MODEL["num_experts"] * per_expert

    group = f"rows_network/{SHARED}/{ranks}/{ranks}"
    two, three = (measured(ranks, layers, lora=lora) for layers in (2, 3))
    gathered = over_the_network(two["costs"], three["costs"])
    whole = (ATTENTION + ROUTER + EXPERTS) * 2 * HALF
    assert gathered[group] == whole + (linear + of_stacks) * (2 * HALF + FULL)
    fewer, more = (measured(ranks, layers, lora=lora, expert_parallel=True) for layers in (2, 3))
    own = over_the_network(fewer["costs"], more["costs"])
    assert own[group] == (ATTENTION + ROUTER) * 2 * HALF + linear * (2 * HALF + FULL)
    rows = TOKENS * MODEL["num_experts_per_tok"] * HIDDEN
    assert own[f"rows_network/{SENT}/{ranks}/{ranks}"] == 4 * rows * HALF

    assert more["trained"] == more["published"] == 3 * (linear + of_stacks)
    held = [each["peaks"]["update"] for each in (fewer, more)]
    for kind in ("weights", "gradients", "optimizer"):
        assert held[1][kind] == three["peaks"]["update"][kind]
    # A GPU gives each tensor a multiple of 512 bytes.
    frozen = (ATTENTION + ROUTER + EXPERTS) * HALF / ranks
    trained = (linear + of_stacks) * FULL / ranks
    of_layer = {kind: held[1][kind] - held[0][kind] for kind in held[1]}
    assert frozen + trained <= of_layer["weights"] <= frozen + trained + 24 * 512
    assert trained <= of_layer["gradients"] <= trained + 12 * 512
    assert 2 * trained <= of_layer["optimizer"] <= 2 * trained + 36 * 512


@pytest.mark.slow
@pytest.mark.parametrize("size", [True, 8])
@pytest.mark.parametrize("trainer", [{}, {"activation_checkpointing": 1}, {"dp_replicate": 4}])
def test_collectives_of_256_ranks_are_those_of_the_formula(
    trainer: dict[str, Any], size: bool | int
) -> None:
    """Of one layer and row: the block's other weights come forward and backward and go once; tokens
    travel twice forward, twice backward, and twice again if the block is recomputed. A copy has 256
    ranks, or 64. Its ranks are one group; or groups of 8, which gather both weights of their
    experts in each forward pass, and sum their gradients once."""
    holders = 256 // trainer.get("dp_replicate", 1)
    group = size if size is not True else holders
    shards = holders // group
    passes = 2 if "activation_checkpointing" in trainer else 1
    model = MODEL | {"num_experts": 256}
    number: dict[int, Counter[str]] = {}
    sizes: dict[tuple[str, str], float] = {}
    for layers in (2, 3):
        number[layers] = Counter()
        request = request_of(256, layers, model=model, expert_parallel=size, **trainer)
        for _, name, dtype, _, moved, count in measure.step(request, layers)["costs"]:
            if dtype.startswith("network"):
                number[layers][name] += count
                sizes[name, dtype] = max(sizes.get((name, dtype), 0.0), moved)

    number[3].subtract(number[2])
    of_experts = 2 if shards > 1 else 0
    expected = {
        "_allgather_base_": 2 + of_experts * passes,
        "_reduce_scatter_base_": 1 + of_experts,
        "alltoall_base_": 2 + 2 * passes,
        # Copies are summed once per step: the block's unit, and two weights of experts.
        "allreduce_": 3 if holders < 256 else 0,
    }
    assert {name: number[3][name] for name in expected} == expected
    assert sum(number[3].values()) == sum(expected.values())
    rows = TOKENS * MODEL["num_experts_per_tok"]
    assert sizes["alltoall_base_", f"network/{SENT}/{group}/{group}"] == rows * HIDDEN * HALF
    assert {dtype for name, dtype in sizes if name == "alltoall_base_"} == {
        f"network/{SENT}/{group}/{group}"
    }
    if shards == 1:
        return
    # The larger weight of a rank's experts: gate and up. Every eighth rank has a part of it.
    gate_and_up = 256 // group * 2 * HIDDEN * MODEL["moe_intermediate_size"]
    sharing = f"network/{SENT}/{shards}/{holders - group + 1}"
    assert sizes["_allgather_base_", sharing] == gate_and_up * HALF
    assert sizes["_reduce_scatter_base_", sharing] == gate_and_up * FULL


@pytest.mark.slow
def test_gathered_experts_stay_until_the_backward_pass_of_blocks_that_are_not_recomputed() -> None:
    """Four ranks: with groups of two each has half of the experts, in bfloat16. The head comes
    after all three layers, and a recomputed block has only its own."""

    def gathered(region: str, **trainer: Any) -> int:
        in_groups = measured(4, 3, expert_parallel=2, **trainer)["peaks"][region]["gathered"]
        of_copy = measured(4, 3, expert_parallel=True, **trainer)["peaks"][region]["gathered"]
        return int(in_groups - of_copy)

    half = EXPERTS // 2 * HALF
    assert gathered("top") == 3 * half
    assert gathered("top", activation_checkpointing=1) == 0
    assert gathered("middle", activation_checkpointing=1) == half


LINEAR = 4 * (HIDDEN * 4 + (64 + 32 + 32 + HIDDEN))
"""Weights of an adapter of rank 4 beside queries, keys, values and output."""
LAYER = ATTENTION + ROUTER
ENDS = 2 * MODEL["vocab_size"] * HIDDEN + HIDDEN
"""Embedding, head and the last norm."""
OWN_MODEL = {
    "loss": {"type": "policy_gradient"},
    "heads": {"implicit_reward": {"own_model": True}},
}


@pytest.mark.parametrize(
    ("ranks", "trainer", "gathered"),
    [
        (4, {}, ENDS + 3 * (LAYER + EXPERTS)),
        (4, {"expert_parallel": 2}, ENDS + 3 * LAYER),
        (1, {"expert_parallel": True}, ENDS + 3 * (LAYER + EXPERTS)),
        (4, {"lora": {"rank": 4}}, ENDS + 3 * (LAYER + EXPERTS + LINEAR)),
        (
            4,
            {"lora": {"rank": 4, "experts": True}, "expert_parallel": 2},
            ENDS + 3 * (LAYER + LINEAR),
        ),
        (4, OWN_MODEL, 2 * (ENDS + 3 * (LAYER + EXPERTS))),
    ],
)
def test_weights_are_kept_where_those_that_fsdp_gathers_take_a_sixteenth_of_the_gpu(
    ranks: int, trainer: dict[str, Any], gathered: int
) -> None:
    """Three layers, in bfloat16, with adapters, and with the model of a head."""
    request = request_of(ranks, 3, MODEL, **trainer)
    least = 16 * gathered * HALF
    for memory, expected in ((least, True), (least - 1, False)):
        _, kept = measure.choices(json.dumps(request | {"memory": memory}))
        assert kept is expected


@pytest.mark.parametrize(
    ("trainer", "compiled"),
    [
        ({}, True),
        ({"compile": False}, False),
        ({"lora": {"rank": 4}}, True),
        ({"expert_parallel": True}, False),
        ({"router_replay": True}, False),
        ({"expert_load": True}, False),
        ({"balance_loss": 0.01}, False),
    ],
)
def test_blocks_count_as_compiled_where_the_trainer_would_compile_them(
    trainer: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has just enough weights for it."""
    request = request_of(4, 3, MODEL, compile="auto")
    request["trainer"] |= trainer
    monkeypatch.setattr(models, "WORTH_COMPILING", ENDS + 3 * (LAYER + EXPERTS))
    measure.choices.cache_clear()
    assert measure.choices(json.dumps(request))[0] is compiled
    assert measure.choices(json.dumps(request | {"gpu": False}))[0] is False


def test_kept_weights_are_gathered_once_per_step_and_experts_of_other_groups_for_each_row() -> None:
    """Of one layer and the second of two rows: four ranks in groups of two, which gather half of
    the experts and sum its gradients."""
    costs = []
    for layers in (2, 3):
        settings = {"expert_parallel": 2, "reshard_after_forward": False}
        request = request_of(4, layers, MODEL, **settings) | {"rows": 2}
        costs.append(measure.answer(request)["costs"])

    tokens = 4 * TOKENS * MODEL["num_experts_per_tok"] * HIDDEN * HALF
    assert over_the_network(*costs) == {
        f"update_network/{SHARED}/4/4": (ATTENTION + ROUTER) * HALF,
        f"rows_network/{SHARED}/4/4": (ATTENTION + ROUTER) * FULL,
        f"rows_network/{SENT}/2/3": EXPERTS / 2 * (HALF + FULL),
        f"rows_network/{SENT}/2/2": tokens,
    }


@pytest.mark.slow
def test_ranks_of_a_row_exchange_heads_and_hold_a_part_of_the_activations() -> None:
    """Forward: queries, keys and values to the ranks of their heads, and the output back; the
    same for gradients. Each rank sends its part of the tokens."""
    ranks, parts = 8, 2
    found = of_a_layer(ranks, context_parallel=parts)
    head = 16 * TOKENS // parts
    assert found[f"rows_network/{SENT}/{parts}/{parts}"] == 2 * (4 + 2 + 2 + 4) * head * HALF
    alone = measured(ranks, 3)["peaks"]["top"]["activations"]
    together = measured(ranks, 3, context_parallel=parts)["peaks"]["top"]["activations"]
    assert together / alone == pytest.approx(1 / parts, rel=0.25)  # whole rows at the head


def facts(
    nodes: int, costs: dict[str, float], rows: int = 3, ranks: int = 16, **trainer: Any
) -> PlanFacts:
    """With costs given here. No engine: nothing samples."""
    config = RunConfig.model_validate(
        {
            "max_steps": 1,
            "seq_len": 64,
            "model": {"name": "m"},
            "trainer": {"num_ranks": ranks, "loss": {"type": "default"}, **trainer},
            "deployment": {"trainer_nodes": nodes},
            "inference": {"base_url": ["http://127.0.0.1:1/v1"]},
        }
    )
    measured = {"costs": costs, "peaks": {"update": {}}, "weights": 1.0, "trained": 1.0}
    return PlanFacts(
        config,
        Engine(PluginConfig()),
        machines=parse("2x8xH100-80"),
        table=MODEL,
        measured=measured,
        ranks=ranks,
        rows=rows,
    )


def test_traffic_takes_the_wire_that_its_group_spans() -> None:
    """450 GB/s on a machine of eight; 50 GB/s to another, also for a pair of neighbors in rank
    that is spread over both."""
    costs = {
        "rows_seconds": 0.001,
        "update_seconds": 0.01,
        "rows_network/shared/8/8": 8e9,  # a copy on each machine
        "update_network/shared/2/9": 2e9,  # of ranks 0 and 8
        "rows_network/sent/4/4": 4e9,
    }
    found = traffic(facts(2, costs))
    assert found == [
        Traffic(SENT, False, bytes=9e9, seconds=9e9 / 450e9),
        Traffic(SHARED, False, bytes=21e9, seconds=21e9 / 450e9),
        Traffic(SHARED, True, bytes=1e9, seconds=1e9 / NETWORK),
    ]
    # Ranks wait for what is sent. Gathering goes on beside computing, which is shorter here.
    seconds = times(facts(2, costs), 0)
    assert seconds["train"] == pytest.approx(21 / 450 + 1 / 50 + 9 / 450 + 0.01)
    assert seconds["network"] == pytest.approx(30 / 450 + 1 / 50)
    longer = times(facts(2, costs | {"rows_seconds": 1.0}), 0)
    assert longer["train"] == pytest.approx(3 + 9 / 450 + 0.01)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_traffic_is_between_machines_if_any_group_of_its_kind_is_of_two(
    nodes: int, size: int, stride: int
) -> None:
    """24 ranks, of which rank 0's group is known: the others are alike, in a mesh. With three
    machines of eight, ranks 6 to 11 are on two."""
    ranks = 24
    costs = {
        "rows_seconds": 0.0,
        "update_seconds": 0.0,
        f"rows_network/sent/{size}/{(size - 1) * stride + 1}": 1e9,
    }
    groups = torch.arange(ranks).reshape(-1, size, stride).transpose(1, 2).reshape(-1, size)
    machines = [{rank // (ranks // nodes) for rank in group} for group in groups.tolist()]
    (found,) = traffic(facts(nodes, costs, ranks=ranks))
    assert found.between_machines == any(len(each) > 1 for each in machines)


def test_each_optimizer_step_of_a_batch_sums_over_the_copies_and_updates() -> None:
    """Two minibatches, three times each: six optimizer steps."""
    costs = {"rows_seconds": 0.0, "update_seconds": 0.01, "update_network/shared/2/9": 2e9}
    six = facts(2, costs, minibatches=2, epochs=3)
    assert traffic(six) == [Traffic(SHARED, True, bytes=6e9, seconds=6e9 / NETWORK)]
    assert times(six, 0)["train"] == pytest.approx(6e9 / NETWORK + 6 * 0.01)


def test_each_epoch_computes_all_rows_and_gathers_for_them() -> None:
    """Three rows a step, twice: six."""
    costs = {"rows_seconds": 1.0, "update_seconds": 0.0, "rows_network/sent/4/4": 4e9}
    twice = facts(2, costs, epochs=2)
    assert traffic(twice) == [Traffic(SENT, False, bytes=18e9, seconds=18e9 / 450e9)]
    assert times(twice, 0)["train"] == pytest.approx(6 + 18 / 450)


@pytest.mark.parametrize(
    ("trainer", "model", "said"),
    [
        ({"expert_parallel": True, "num_ranks": 6}, {}, r"dp_replicate to one of \[3, 6\]"),
        ({"expert_parallel": 2, "num_ranks": 12}, {}, r"dp_replicate to one of \[3, 6\]"),
        ({"expert_parallel": True, "num_ranks": 8}, {"num_experts": 0}, "has no experts"),
        ({"context_parallel": 8, "num_ranks": 8}, {}, r"4 attention heads of 'm'.* \[1, 2, 4\]"),
        ({"context_parallel": 3, "num_ranks": 6}, {}, r"4 attention heads of 'm'.* \[1, 2, 4\]"),
        ({"expert_parallel": True, "context_parallel": 4, "num_ranks": 8}, {}, ""),
    ],
)
def test_layouts_that_a_run_would_refuse_are_not_planned(
    trainer: dict[str, Any], model: dict[str, Any], said: str
) -> None:
    table = {
        "max_steps": 1,
        "seq_len": 64,
        "model": {"name": "m"},
        "trainer": {"loss": {"type": "default"}} | trainer,
    }
    config = RunConfig.model_validate(table)
    architecture: dict[str, Any] = MODEL | model
    refused = pytest.raises(ConfigError, match=said) if said else nullcontext()
    with refused:
        config.trainer.check_layout(
            config.model.name,
            num_ranks=trainer["num_ranks"],
            num_heads=architecture["num_attention_heads"],
            num_experts=num_experts(architecture),
        )


ROOT = Path(__file__).resolve().parents[3]


def recorded(name: str) -> float:
    figures = json.loads((ROOT / "docs/benchmarks.json").read_text("utf-8"))
    (value,) = (float(each["value"]) for each in figures if each["name"] == name)
    return value


def test_numbers_in_recipes_are_those_of_the_record() -> None:
    text = (ROOT / "configs/recipes/qwen3_8b_32k.toml").read_text("utf-8")
    turns, halves = (recorded(f"layouts.qwen3_8b_32k.{name}.step") for name in ("turns", "4_and_4"))
    assert f"by plan {turns:.1f} min, with four and four GPUs {halves:.1f}" in text


RERECORD = (
    "Write the figures anew: python -m bench --record layouts, python -m bench --record roofline, "
    "python -m bench --record roofline --seq-len 256, python -m tools.docs"
)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name"), [("qwen3_8b_32k", "turns"), ("qwen3_30b_a3b", "own")])
def test_recorded_layouts_are_what_plan_says(
    recipe: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    layouts = import_module("bench.layouts")
    found = layouts.plan(recipe, name)
    prefix = f"layouts.{recipe}.{name}"
    for part in ("step", "train", "network"):
        minutes = found["seconds"].get(part, 0.0) / 60
        assert minutes == pytest.approx(recorded(f"{prefix}.{part}"), rel=0.01), RERECORD
    memory = found["trainer"]["total"] / 2**30
    assert memory == pytest.approx(recorded(f"{prefix}.memory"), rel=0.01), RERECORD


@pytest.mark.slow
def test_the_recorded_roofline_is_what_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    roofline = import_module("bench.roofline")
    for mix, length in (("whole", []), ("of_256", ["--seq-len", "256"])):
        ratio = roofline.main(["--only", "compiled", *length])["compiled"]
        prefix = f"roofline.{mix}.compiled"
        expected = recorded(f"{prefix}.least") / recorded(f"{prefix}.arithmetic")
        assert ratio == pytest.approx(expected, rel=0.01), RERECORD


def test_the_models_of_the_package_have_the_keys_that_layouts_need() -> None:
    for file in (files("prime_rl_plan") / "models").iterdir():
        table = json.loads(file.read_text("utf-8"))
        assert table["num_attention_heads"] > 0
        assert num_experts(table) == (128 if "A3B" in file.name else 0)


LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def test_latent_attention_and_biases_that_move_are_planned_on_a_gpu() -> None:
    """Keys of 32 and values of 16: the kernel of a GPU takes one size. A bias of eight numbers
    costs no memory that one could see."""
    plain = measure.answer(request_of(2, 2, LATENT))
    moved = measure.answer(request_of(2, 2, LATENT, balance_bias=0.001, expert_parallel=True))
    assert plain["weights"] == moved["weights"]
    for part in ("rows_flops", "update_bytes"):
        assert moved["costs"][part] == pytest.approx(plain["costs"][part], rel=0.05)
