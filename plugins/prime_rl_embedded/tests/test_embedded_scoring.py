"""Prompt scores, compared with a Hugging Face forward, and their effect on running requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_rl_embedded import scoring
from prime_rl_embedded.model import ServedModel, load_model
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_embedded.testing import VOCAB_SIZE, Served, write_model

Score = Callable[[list[int]], Tensor]


def sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def own(prompt: list[int], score: Score) -> list[float]:
    """The reference's logprobs of tokens 1, 2, ..."""
    found: list[float] = (
        score(prompt)[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    )
    return found


def scores(reply: dict[str, Any]) -> list[float]:
    """The first value of each entry, which belongs to the prompt's own token."""
    return [next(iter(entry.values()))["logprob"] for entry in reply["prompt_logprobs"][1:]]


def scoring_request(prompt: list[int], max_tokens: int = 1, **fields: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0, temperature=0)
    return Request(prompt, params, **fields)


# -- values ---------------------------------------------------------------------------------


def test_40_prompts_scored_at_once_equal_a_forward_over_each(server: Served, score: Score) -> None:
    """1 to 400 tokens: several prompts per forward, some longer than the budget."""
    prompts = sequences([1 + (97 * i) % 400 for i in range(40)])

    def ask(prompt: list[int]) -> dict[str, Any]:
        return server.generate(prompt, max_tokens=1, temperature=1.0, prompt_logprobs=0)

    with ThreadPoolExecutor(40) as pool:
        replies = list(pool.map(ask, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert scores(reply) == pytest.approx(own(prompt, score), abs=1e-4)
        assert len(reply["choices"][0]["token_ids"]) == 1


@pytest.mark.parametrize("sampling", [{"temperature": 0.3}, {"temperature": 0}, {"top_k": 1}])
def test_scores_are_of_the_raw_model_whatever_is_sampled(
    server: Served, score: Score, sampling: dict[str, float]
) -> None:
    (prompt,) = sequences([30], seed=1)
    reply = server.generate(prompt, max_tokens=1, prompt_logprobs=0, seed=1, **sampling)
    assert scores(reply) == pytest.approx(own(prompt, score), abs=1e-4)


def test_the_token_after_a_scored_prompt_is_the_one_sampled_without_scoring(
    server: Served,
) -> None:
    for prompt in sequences([2, 50], seed=2):
        plain = server.generate(prompt, max_tokens=1, seed=3)["choices"][0]
        scored = server.generate(prompt, max_tokens=1, seed=3, prompt_logprobs=0)["choices"][0]
        assert scored["token_ids"] == plain["token_ids"]
        assert scored["logprobs"]["content"][0]["logprob"] == pytest.approx(
            plain["logprobs"]["content"][0]["logprob"], abs=1e-5
        )


def test_scoring_and_then_generating_gives_what_each_gives_alone(server: Served) -> None:
    (prompt,) = sequences([20], seed=4)
    both = server.generate(prompt, max_tokens=9, seed=5, prompt_logprobs=0)
    alone = server.generate(prompt, max_tokens=9, seed=5)["choices"][0]
    assert both["choices"][0]["token_ids"] == alone["token_ids"]
    assert scores(both) == scores(server.generate(prompt, max_tokens=0, prompt_logprobs=0))


def test_a_request_for_no_token_gets_its_scores_and_nothing_else(
    server: Served, score: Score
) -> None:
    (prompt,) = sequences([12], seed=6)
    reply = server.generate(prompt, max_tokens=0, prompt_logprobs=1)
    choice = reply["choices"][0]
    assert choice["token_ids"] == [] and choice["logprobs"] == {"content": []}
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]
    assert reply["usage"]["completion_tokens"] == 0
    assert scores(reply) == pytest.approx(own(prompt, score), abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_sample_as_long_as_the_context_can_be_scored(
    server: Served, score: Score, max_tokens: int
) -> None:
    """The context is 512. The token after the last one is sampled but never fed."""
    (prompt,) = sequences([512], seed=7)
    reply = server.generate(prompt, max_tokens=max_tokens, prompt_logprobs=0)
    assert scores(reply) == pytest.approx(own(prompt, score), abs=1e-4)
    assert len(reply["choices"][0]["token_ids"]) == max_tokens


@pytest.mark.parametrize(
    ("length", "sampling", "reason"),
    [
        (513, {"max_tokens": 1}, "the prompt to score has 513 tokens; max_model_len is 512"),
        (512, {"max_tokens": 2}, "the prompt has 512 tokens; at most 511 leave room"),
        (512, {}, "the prompt has 512 tokens; at most 511 leave room"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(
    server: Served, length: int, sampling: dict[str, int], reason: str
) -> None:
    params = {"prompt_logprobs": 0} | sampling
    body = {"token_ids": [1] * length, "sampling_params": params}
    answer = server.post("/inference/v1/generate", body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


def test_max_tokens_0_is_for_scoring_only(server: Served) -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 0}}
    answer = server.post("/inference/v1/generate", body)
    assert answer.status_code == 400
    assert "at least 1, unless prompt_logprobs are wanted" in answer.json()["error"]["message"]


# -- every forward, bounded memory ------------------------------------------------------------


@pytest.fixture
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("architecture", "config", "kind"),
    [
        ("Qwen3", {}, "FusedForward"),
        ("Gemma", {}, "GeneralForward"),
        ("Granite", {"logits_scaling": 3.0}, "WholeForward"),
        ("Mistral", {"sliding_window": 6}, "GeneralForward"),
    ],
)
def test_every_forward_scores_like_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inference_mode: None,
    architecture: str,
    config: dict[str, Any],
    kind: str,
) -> None:
    """Chunks of 5 rows, so that prompts of 3, 9 and 30 tokens end inside a chunk. Granite divides
    its logits after the head, so only the whole module reproduces them."""
    monkeypatch.setitem(scoring._CHUNK_LOGITS, "cpu", 5 * VOCAB_SIZE)
    monkeypatch.setattr(scoring, "_FEWEST_ROWS", 1)
    served = load_model(write_model(tmp_path, architecture, **config), max_len=64)
    assert type(served.forward).__name__ == kind
    requests = [scoring_request(prompt) for prompt in sequences([30, 3, 9])]
    run(Scheduler(served, num_slots=1, max_model_len=64), requests)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for request in requests:
        logits = reference(input_ids=torch.tensor([request.prompt]), use_cache=False).logits[0]
        expected = own(request.prompt, partial(log_softmax, logits))
        assert request.prompt_scores is not None
        assert [row[0].logprob for row in request.prompt_scores] == pytest.approx(
            expected, abs=1e-4
        )
        assert request.token_ids == [int(logits[-1].argmax())]


def log_softmax(logits: Tensor, _: list[int]) -> Tensor:
    return logits.log_softmax(-1)


def run(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        scheduler.step()


def test_no_more_rows_of_logits_exist_at_a_time_than_the_chunk(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, inference_mode: None
) -> None:
    """50 tokens in chunks of 8 rows: 6 of 8, one of 2, and the row to sample from."""
    monkeypatch.setitem(scoring._CHUNK_LOGITS, "cpu", 8 * VOCAB_SIZE)
    monkeypatch.setattr(scoring, "_FEWEST_ROWS", 1)
    rows: list[int] = []
    logits = model.forward.logits

    def counted(states: Tensor) -> Tensor:
        rows.append(len(states))
        return logits(states)

    monkeypatch.setattr(model.forward, "logits", counted)
    run(Scheduler(model, num_slots=1, max_model_len=64), [scoring_request(sequences([50])[0])])
    assert rows == [8] * 6 + [2, 1]


# -- beside running requests ------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(model_folder, max_len=64)


def test_scoring_takes_no_slot_and_no_cache(model: ServedModel, inference_mode: None) -> None:
    """A running request takes the only slot; one step scores 20 prompts beside it."""
    scheduler = Scheduler(model, num_slots=1, max_model_len=64)
    running = Request([1, 2, 3], SamplingParams(max_tokens=20))
    scheduler.add(running)
    scheduler.step()
    requests = [scoring_request(prompt) for prompt in sequences([40] * 20)]
    before = [layer.clone() for layer in scheduler.cache.layers.values()]
    for request in requests:
        scheduler.add(request)
    scheduler.step()
    assert [r.finish_reason for r in requests] == ["length"] * 20
    assert scheduler.active == [running] and len(running.token_ids) == 2
    for old, new in zip(before, scheduler.cache.layers.values(), strict=True):
        changed = (old != new).any(-1).nonzero()  # one token: key and value, 2 heads
        assert {int(position) for position in changed[:, 3]} == {3}
        assert old.shape == new.shape


def test_running_requests_get_a_token_after_every_scoring_batch(
    model: ServedModel, inference_mode: None
) -> None:
    """Budget 40: a batch holds two prompts of 20 tokens, so six of them take three steps."""
    alone = Request([5, 6], SamplingParams(max_tokens=4, seed=1))
    run(Scheduler(model, num_slots=2, max_model_len=64), [alone])
    scheduler = Scheduler(model, num_slots=2, max_model_len=64, max_prefill_tokens=40)
    running = Request([5, 6], SamplingParams(max_tokens=4, seed=1))
    requests = [scoring_request(prompt) for prompt in sequences([20] * 6)]
    for request in [*requests, running]:
        scheduler.add(request)
    progress = []
    for _ in range(3):
        scheduler.step()
        progress.append(
            (len(running.token_ids), sum(r.finish_reason is not None for r in requests))
        )
    assert progress == [(1, 2), (2, 4), (3, 6)]
    scheduler.step()
    assert running.token_ids == alone.token_ids and not scheduler.has_work


def test_equal_prompts_of_one_salt_are_computed_once(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, inference_mode: None
) -> None:
    """One of 4 equal prompts has another salt; one of the other 3 wants the top token too."""
    (prompt,) = sequences([10])
    requests = [scoring_request(prompt, salt=salt) for salt in ("a", "a", "b", "a")]
    requests[1].params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    lengths: list[int] = []
    states = model.forward.states

    def counted(ids: Tensor, *rest: Any) -> Tensor:
        lengths.append(len(ids))
        return states(ids, *rest)

    monkeypatch.setattr(model.forward, "states", counted)
    scheduler = Scheduler(model, num_slots=1, max_model_len=64)
    run(scheduler, requests)
    assert lengths == [20] and scheduler.stats.shared_tokens == 20
    assert [r.cached_tokens for r in requests] == [0, 10, 0, 10]
    found = [[row[0] for row in r.prompt_scores or ()] for r in requests]
    assert found[0] == found[1] == found[3] != []
    counts = [{len(row) for row in r.prompt_scores or ()} for r in requests]
    assert counts[0] == counts[2] == counts[3] == {1} and counts[1] <= {1, 2} and 2 in counts[1]
    assert [len(r.token_ids) for r in requests] == [1, 0, 1, 1]


def test_lower_priority_is_scored_first(model: ServedModel, inference_mode: None) -> None:
    scheduler = Scheduler(model, num_slots=1, max_model_len=64, max_prefill_tokens=10)
    late, soon = (
        scoring_request(prompt, priority=priority)
        for prompt, priority in zip(sequences([10, 10]), (1, 0), strict=True)
    )
    scheduler.add(late)
    scheduler.add(soon)
    scheduler.step()
    assert soon.finish_reason == "length" and late.finish_reason is None


# -- failures ---------------------------------------------------------------------------------


def test_a_failing_batch_fails_its_requests_and_spares_running_rows(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, inference_mode: None
) -> None:
    scheduler = Scheduler(model, num_slots=1, max_model_len=64)
    running, failing = Request([1, 2], SamplingParams(max_tokens=3)), scoring_request([3, 4])
    scheduler.add(running)
    scheduler.step()
    scheduler.add(failing)
    monkeypatch.setattr(scheduler.model.forward, "states", lambda *_: 1 / 0)
    scheduler._score()
    monkeypatch.undo()
    assert failing.error == "ZeroDivisionError: division by zero"
    while scheduler.has_work:
        scheduler.step()
    assert running.finish_reason == "length" and scheduler.stats.finished["error"] == 1


def test_scores_that_are_not_numbers_fail_their_request_only(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, inference_mode: None
) -> None:
    """The second row of the shorter prompt, which comes first."""
    states = model.forward.states

    def poisoned(*args: Any) -> Tensor:
        result = states(*args)
        result[1] = torch.nan
        return result

    scheduler = Scheduler(model, num_slots=1, max_model_len=64)
    healthy, sick = (scoring_request(prompt) for prompt in sequences([9, 4]))
    monkeypatch.setattr(model.forward, "states", poisoned)
    run(scheduler, [healthy, sick])
    assert healthy.finish_reason == "length"
    assert sick.finish_reason == "error"
    assert sick.error == "the model's logits are not finite at position 4 under policy version 0"


def test_a_waiting_request_can_be_aborted_or_failed(
    model: ServedModel, inference_mode: None
) -> None:
    scheduler = Scheduler(model, num_slots=1, max_model_len=64)
    gone, failed = scoring_request([1, 2]), scoring_request([3, 4])
    scheduler.add(gone)
    scheduler.add(failed)
    assert scheduler.num_waiting == 2
    scheduler.abort(gone)
    scheduler.fail_all("the end")
    assert gone.finish_reason == "abort" and failed.error == "the end"
    assert not scheduler.has_work and scheduler.stats.finished.total() == 2


def test_prompts_are_scored_with_the_new_weights_after_a_swap(
    model_folder: Path, inference_mode: None
) -> None:
    """The swap doubles the last norm, and with it all logits."""
    served = load_model(model_folder, max_len=64)
    scheduler = Scheduler(served, num_slots=1, max_model_len=64)
    (prompt,) = sequences([10])
    request = scoring_request(prompt, max_tokens=0)
    scheduler.add(request)
    scheduler.swap_weights(lambda: served.module.model.norm.weight.mul_(2), version=7)
    run(scheduler, [])
    reference = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    logprobs = (2 * reference(input_ids=torch.tensor([prompt])).logits[0]).log_softmax(-1)
    assert request.versions == [(7, 0)] and request.prompt_scores is not None
    assert [row[0].logprob for row in request.prompt_scores] == pytest.approx(
        own(prompt, lambda _: logprobs), abs=1e-4
    )
