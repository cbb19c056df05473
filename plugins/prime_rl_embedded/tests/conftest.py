"""One server for most tests: a tiny random Qwen3 with tied embeddings and 8 slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from transformers import AutoModelForCausalLM
from waiting import eventually

from prime_rl_embedded import testing
from prime_rl_embedded.testing import Served, serve, write_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def engines_start_warm() -> Iterator[None]:
    """Servers start from a warm interpreter. ``subprocess`` in a test still starts a fresh one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "subprocess", warm.SUBPROCESS)
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_model(folder, tokenizer=True, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Served]:
    with serve(model_folder, max_model_len=512, num_slots=8) as served:
        yield served


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Any:
    """The same model in this process, with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="sdpa").eval()


@pytest.fixture(scope="session")
def score(reference: Any) -> Callable[[list[int]], torch.Tensor]:
    """Logprobs [T, V] of the reference after each of T tokens."""

    def logprobs(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = reference(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        result: torch.Tensor = logits.log_softmax(-1)
        return result

    return logprobs


@pytest.fixture(autouse=True)
def servers_stay_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a request behind in the shared server."""
    yield
    if "server" in request.fixturenames:
        server = request.getfixturevalue("server")
        # The engine ends a request a moment after the client has its last text.
        eventually(lambda: server.metric("vllm:num_requests_running") == 0)
