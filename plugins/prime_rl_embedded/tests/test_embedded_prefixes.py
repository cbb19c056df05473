"""The prefix cache: what is copied, what is dropped, and that replies do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl_embedded.kv import KVCache
from prime_rl_embedded.model import ServedModel, load_model
from prime_rl_embedded.prefixes import BLOCK, PrefixCache
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_embedded.testing import write_model

LONGEST = 96
Asked = list[tuple[list[int], str | None]]
"""Prompts and salts of requests that arrive together."""


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model(model_folder: Path) -> ServedModel:
    return load_model(model_folder, max_len=LONGEST)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model whose tokens see the 20 tokens before them."""
    folder = tmp_path_factory.mktemp("windowed")
    return load_model(write_model(folder, "Mistral", sliding_window=20), max_len=LONGEST)


def make(model: ServedModel, mib: float = 1.0) -> Scheduler:
    scheduler = Scheduler(model, num_slots=3, max_model_len=LONGEST, max_prefill_tokens=64)
    scheduler.kept = PrefixCache(int(mib * 2**20))
    return scheduler


def answer(scheduler: Scheduler, asked: Asked, new: int = 4) -> list[Request]:
    params = SamplingParams(max_tokens=new, seed=1)
    requests = [Request(list(prompt), params, salt=salt) for prompt, salt in asked]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        scheduler.step()
    return requests


def test_the_next_turn_computes_only_what_is_new(model: ServedModel) -> None:
    """40 + 20 tokens, of which the last was never fed: 59 are known, 3 blocks of 16 whole."""
    scheduler = make(model)
    (first,) = answer(scheduler, [([*range(40)], None)], new=20)
    turn = [*first.prompt, *first.token_ids, 7, 8, 9]
    (second,) = answer(scheduler, [(turn, None)])
    (alone,) = answer(make(model), [(turn, None)])
    assert (first.cached_tokens, second.cached_tokens, alone.cached_tokens) == (0, 48, 0)
    assert scheduler.stats.shared_tokens == 48
    assert second.token_ids == alone.token_ids
    assert second.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_questions_with_the_same_examples_share_them(model: ServedModel) -> None:
    scheduler = make(model)
    for last in range(3):
        (request,) = answer(scheduler, [([*range(35), last], None)])
        assert request.cached_tokens == (32 if last else 0)


def test_the_last_token_of_a_prompt_is_always_computed(model: ServedModel) -> None:
    scheduler = make(model)
    cached = [answer(scheduler, [([*range(32)], None)])[0].cached_tokens for _ in range(2)]
    assert cached == [0, 16]


def test_another_salt_and_other_weights_share_nothing(model: ServedModel) -> None:
    scheduler, prompt = make(model), [*range(40)]
    answer(scheduler, [(prompt, "a")])
    assert answer(scheduler, [(prompt, "b")])[0].cached_tokens == 0
    scheduler.swap_weights(lambda: None, version=1)
    assert answer(scheduler, [(prompt, "a")])[0].cached_tokens == 0


def test_a_row_that_lived_through_an_update_is_not_kept(model: ServedModel) -> None:
    scheduler, prompt = make(model), [*range(40)]
    scheduler.add(Request(prompt, SamplingParams(max_tokens=4)))
    scheduler.step()
    scheduler.swap_weights(lambda: None, version=1)
    while scheduler.has_work:
        scheduler.step()
    assert answer(scheduler, [(prompt, None)])[0].cached_tokens == 0


def test_sleep_gives_the_memory_back(model: ServedModel) -> None:
    scheduler = make(model)
    answer(scheduler, [([*range(40)], None)])
    assert scheduler.kept.num_bytes > 0
    scheduler.sleep()
    scheduler.wake()
    assert scheduler.kept.num_bytes == 0


PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 60), st.lists(st.integers(0, 9), max_size=12)),
    min_size=1,
    max_size=4,
)
"""(which text, how many of its tokens, tokens after it)"""


@given(rounds=st.lists(PROMPTS, min_size=1, max_size=4), mib=st.sampled_from((0.0, 0.02, 1.0)))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", ["model", "windowed"])
def test_replies_do_not_depend_on_the_cache(
    name: str,
    rounds: list[list[tuple[int, int, list[int]]]],
    mib: float,
    request: pytest.FixtureRequest,
) -> None:
    """However much fits, and whatever came before."""
    served = request.getfixturevalue(name)
    scheduler = make(served, mib)
    for drawn in rounds:
        asked: Asked = [
            ([(text * 31 + i * i) % 90 for i in range(length)] + end, str(text))
            for text, length, end in drawn
        ]
        for one in answer(scheduler, asked):
            (alone,) = answer(make(served, 0), [(one.prompt, one.salt)])
            assert one.token_ids == alone.token_ids
            assert one.logprobs == pytest.approx(alone.logprobs, abs=2e-5)
        assert scheduler.kept.num_bytes <= mib * 2**20


@given(
    stored=st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=30),
    asked=st.lists(st.integers(0, 1), max_size=4),
    max_blocks=st.integers(0, 6),
)
def test_the_blocks_used_last_stay(
    stored: list[list[int]], asked: list[int], max_blocks: int
) -> None:
    """Oracle: a list of paths, the last used first. A block is as recent as the last path through
    it; of equally recent ones, the earlier in the text is the more recent."""
    cache = KVCache({0: (1, 2)}, max_slots=1, max_len=8 * BLOCK)
    cache.reserve(1, 4 * BLOCK)
    block_bytes = 2 * 1 * BLOCK * 2 * 4
    kept = PrefixCache(max_blocks * block_bytes)
    order: list[tuple[int, ...]] = []
    for path in stored:
        kept.store(cache, 0, None, [each for each in path for _ in range(BLOCK)])
        used = [tuple(path[: end + 1]) for end in range(len(path))]
        order = [*used, *(each for each in order if each not in used)][:max_blocks]
    longest = 0
    while longest < len(asked) and tuple(asked[: longest + 1]) in order:
        longest += 1
    tokens = [each for each in asked for _ in range(BLOCK)]
    assert len(kept.find(None, [*tokens, 5])) == longest
    assert kept.num_bytes == len(order) * block_bytes
