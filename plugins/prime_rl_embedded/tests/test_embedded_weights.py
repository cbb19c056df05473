"""Weight updates on a running server: in flight, all or nothing, admin key required."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl_embedded.testing import Served, write_model
from prime_rl_embedded.weights import apply_weights, read_weights

Tensors = dict[str, torch.Tensor]
PROMPT = [11, 22, 33, 44]


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), seed=1, tie_word_embeddings=True)


@pytest.fixture(autouse=True)
def back_to_the_first_weights(server: Served, model_folder: Path) -> Iterator[None]:
    yield
    answer = server.update_weights(model_folder, version=0).json()
    assert answer.pop("paused_seconds") >= 0.0
    assert answer == {"status": "ok", "version": 0}


def greedy(server: Served, max_tokens: int = 8) -> list[int]:
    ids: list[int] = server.generate(PROMPT, temperature=0, max_tokens=max_tokens)["choices"][0][
        "token_ids"
    ]
    return ids


def expected_greedy(folder: Path, max_tokens: int = 8) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def saved(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_new_weights_serve_and_the_version_is_reported(server: Served, other_folder: Path) -> None:
    assert server.update_weights(other_folder, version=7).status_code == 200
    choice = server.generate(PROMPT, temperature=0, max_tokens=8)["choices"][0]
    assert choice["token_ids"] == expected_greedy(other_folder)
    assert choice["weight_versions"] == [{"version": "7", "start": 0, "end": 8}]
    assert server.metric("prime_rl:policy_version") == 7
    assert server.update_weights(other_folder).json()["version"] == 8


def test_requests_in_flight_keep_their_kv_and_continue_with_the_new_weights(
    server: Served, model_folder: Path, other_folder: Path
) -> None:
    """Compared with transformers whose cache the old weights fill and the new ones read."""
    length = 480
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, PROMPT, temperature=0, max_tokens=length)
        server.wait_for("vllm:num_requests_running", 1)
        assert server.post("/pause", admin=True).json() == {"status": "paused"}
        assert server.metric("vllm:num_requests_running") == 1
        assert server.update_weights(other_folder, version=1).status_code == 200
        assert server.post("/resume", admin=True).json() == {"status": "resumed"}
        choice = running.result()["choices"][0]
    old, new = choice["weight_versions"]
    swap = old["end"]
    assert old == {"version": "0", "start": 0, "end": swap} and swap > 0
    assert new == {"version": "1", "start": swap, "end": length}
    tokens, logprobs = continue_with_old_cache(model_folder, other_folder, swap, length)
    assert choice["token_ids"] == tokens
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert found == pytest.approx(logprobs, abs=1e-4)


def test_updates_without_a_pause_fall_between_two_tokens_of_every_request(
    server: Served, model_folder: Path, other_folder: Path
) -> None:
    """12 requests over 8 slots, 3 updates: spans ascend without gaps and cover every token."""
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(server.generate, [i], max_tokens=300, seed=i) for i in range(12)]
        server.wait_for("vllm:num_requests_running", 8)
        for version in (1, 2, 3):
            folder = (model_folder, other_folder)[version % 2]
            assert server.update_weights(folder, version=version).status_code == 200
        choices = [future.result()["choices"][0] for future in running]
    for choice in choices:
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == 300 == len(choice["token_ids"])
        versions = [int(span["version"]) for span in spans]
        assert versions == sorted(set(versions)) and set(versions) <= {0, 1, 2, 3}
    assert any(len(choice["weight_versions"]) > 1 for choice in choices)


@torch.no_grad()
def continue_with_old_cache(
    first: Path, second: Path, swap: int, length: int
) -> tuple[list[int], list[float]]:
    model = AutoModelForCausalLM.from_pretrained(first)
    tokens: list[int] = []
    logprobs: list[float] = []
    ids, cache = torch.tensor([PROMPT]), None
    for i in range(length):
        if i == swap:
            model = AutoModelForCausalLM.from_pretrained(second)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].log_softmax(-1).max(-1)
        tokens.append(int(best.indices))
        logprobs.append(float(best.values))
        ids = best.indices.view(1, 1)
    return tokens, logprobs


def test_tied_embeddings_follow_an_update_at_both_ends(
    server: Served, model_folder: Path, tmp_path: Path
) -> None:
    """Only the embedding changes. Logprobs equal a forward with it as input and as output."""
    tensors = load_file(model_folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    folder = saved(tmp_path / "flipped", tensors)
    shutil.copy(model_folder / "config.json", folder)
    before = greedy(server)
    assert server.update_weights(folder, version=1).status_code == 200
    assert greedy(server) == expected_greedy(folder) != before


def test_a_checkpoint_that_repeats_the_tied_head_is_accepted_if_it_agrees(
    server: Served, other_folder: Path, tmp_path: Path
) -> None:
    tensors = load_file(other_folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert server.update_weights(saved(tmp_path / "both", tensors)).status_code == 200
    assert greedy(server) == expected_greedy(other_folder)
    tensors["lm_head.weight"] += 1
    answer = server.update_weights(saved(tmp_path / "both", tensors))
    assert answer.status_code == 400 and "tied" in answer.json()["error"]["message"]


def test_bfloat16_checkpoints_are_cast(server: Served, other_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(other_folder / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert server.update_weights(saved(tmp_path / "half", halves)).status_code == 200
    folder = saved(tmp_path / "cast", {name: tensor.float() for name, tensor in halves.items()})
    shutil.copy(other_folder / "config.json", folder)
    assert greedy(server) == expected_greedy(folder)


def break_truncated(folder: Path, tensors: Tensors) -> None:
    path = saved(folder, tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def break_header(folder: Path, tensors: Tensors) -> None:
    path = saved(folder, tensors) / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def break_missing(folder: Path, tensors: Tensors) -> None:
    saved(folder, {n: t for n, t in tensors.items() if n != "model.norm.weight"})


def break_unknown(folder: Path, tensors: Tensors) -> None:
    saved(folder, tensors | {"model.extra": torch.zeros(1)})


def break_shape(folder: Path, tensors: Tensors) -> None:
    saved(folder, tensors | {"model.norm.weight": torch.zeros(7)})


def break_kind(folder: Path, tensors: Tensors) -> None:
    saved(folder, tensors | {"model.norm.weight": torch.zeros(32, dtype=torch.int64)})


def break_nan(folder: Path, tensors: Tensors) -> None:
    saved(folder, tensors | {"model.norm.weight": torch.full((32,), torch.nan)})


def break_shard(folder: Path, tensors: Tensors) -> None:
    first = saved(folder, tensors) / "model.safetensors"
    first.rename(folder / "model-00001-of-00002.safetensors")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {"weight_map": {name: shards[i % 2] for i, name in enumerate(tensors)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def break_index(folder: Path, tensors: Tensors) -> None:
    saved(folder, tensors)
    (folder / "model.safetensors.index.json").write_text("{}")


def break_everything(folder: Path, tensors: Tensors) -> None:
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (break_truncated, "model.safetensors: can't be read"),
        (break_header, "model.safetensors: can't be read"),
        (break_missing, "'model.norm.weight' missing"),
        (break_unknown, "'model.extra' not in the model Qwen3ForCausalLM"),
        (break_shape, "'model.norm.weight' has shape [7], the model's has [32]"),
        (break_kind, "'model.norm.weight' is torch.int64, the model's is torch.float32"),
        (break_nan, "'model.norm.weight' contains values that aren't finite"),
        (break_shard, "shards missing: model-00002-of-00002.safetensors"),
        (break_index, "not an index of safetensors"),
        (break_everything, "no model*.safetensors in it"),
    ],
)
def test_a_bad_checkpoint_is_refused_and_the_old_weights_stay(
    server: Served, other_folder: Path, tmp_path: Path, damage: Any, reason: str
) -> None:
    before = greedy(server)
    damage(tmp_path / "bad", load_file(other_folder / "model.safetensors"))
    answer = server.update_weights(tmp_path / "bad", version=1)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert reason in message and "still serving version 0" in message
    choice = server.generate(PROMPT, temperature=0, max_tokens=8)["choices"][0]
    assert choice["token_ids"] == before
    assert choice["weight_versions"][0]["version"] == "0"


def test_a_sharded_folder_is_read(server: Served, other_folder: Path, tmp_path: Path) -> None:
    tensors = load_file(other_folder / "model.safetensors")
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = {name: shards[i % 2] for i, name in enumerate(tensors)}
    for shard in shards:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, tmp_path / shard)
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert server.update_weights(tmp_path).status_code == 200
    assert greedy(server) == expected_greedy(other_folder)


@pytest.mark.parametrize("route", ["/pause", "/update_weights", "/resume"])
def test_admin_routes_need_the_runs_key(server: Served, route: str) -> None:
    without = server.post(route)
    assert without.status_code == 401
    assert "Authorization: Bearer" in without.json()["error"]["message"]
    wrong = server.http.post(route, headers={"Authorization": "Bearer guess"})
    assert wrong.status_code == 403
    assert server.metric("prime_rl:paused") == 0


def test_unsupported_pause_modes_are_refused(server: Served) -> None:
    assert server.post("/pause?mode=keep&clear_cache=false", admin=True).status_code == 200
    server.post("/resume", admin=True)
    answer = server.post("/pause?mode=abort", admin=True)
    assert answer.status_code == 400 and "mode=keep" in answer.json()["error"]["message"]
    assert server.post("/pause?clear_cache=true", admin=True).status_code == 400
    assert server.metric("prime_rl:paused") == 0


def test_an_update_without_a_folder_is_refused(server: Served) -> None:
    answer = server.post("/update_weights", {"weight_dir": None}, admin=True)
    assert answer.status_code == 400 and "$.weight_dir" in answer.json()["error"]["message"]
    answer = server.post("/update_weights", {"weight_dir": "/no/such/folder"}, admin=True)
    assert answer.status_code == 400 and "no such folder" in answer.json()["error"]["message"]


def test_experts_are_updated_from_one_tensor_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"vocab_size": 32, "num_hidden_layers": 1, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2)
    new, served = Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM(config)
    new.save_pretrained(tmp_path)
    weights = read_weights(tmp_path, served)
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in weights
    with torch.no_grad():
        apply_weights(weights, served)
    for name, parameter in new.named_parameters():
        assert served.get_parameter(name).equal(parameter), name
