"""Two data-parallel engines behind one address: weights from files and from the trainer's memory
reach both, and a folder that one of them would refuse is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PYTHON, SETTINGS

from prime_rl_devkit.engines import EngineSubject, started
from prime_rl_devkit.engines.broadcast import TrainerRank
from prime_rl_devkit.engines.checkpoints import changed, read
from prime_rl_vllm import Vllm, VllmConfig

pytestmark = pytest.mark.vllm

NUM_ENGINES = 2
PROMPT = list(range(20, 60))
NUM_TOP = 20


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSubject]:
    engine = Vllm(VllmConfig.model_validate(SETTINGS | {"data_parallel_size": NUM_ENGINES}))
    folder = tmp_path_factory.mktemp("engines")
    with started(engine, folder, python=PYTHON, ready_timeout=900) as subject:
        subject.meet()
        yield subject


def assert_all_serve(engines: EngineSubject, folder: Path) -> None:
    """Every engine's most probable tokens have the log-probabilities of the folder's weights."""
    expected = engines.reference(folder).logits(PROMPT)[-1].log_softmax(-1)
    body = {"model": engines.model, "prompt": PROMPT, "max_tokens": 1, "logprobs": NUM_TOP}
    body["return_tokens_as_token_ids"] = True
    for number in range(NUM_ENGINES):
        headers = engines.headers() | {"X-data-parallel-rank": str(number)}
        answer = engines.ok(engines.http.post("/v1/completions", json=body, headers=headers))
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        assert len(top) >= NUM_TOP
        for name, logprob in top.items():
            token_id = int(name.removeprefix("token_id:"))
            assert logprob == pytest.approx(float(expected[token_id]), abs=1e-4), number


def test_every_engine_loads_a_folder(engines: EngineSubject, tmp_path: Path) -> None:
    folder = changed(engines.model_folder, tmp_path / "new")
    assert_all_serve(engines, engines.model_folder)
    engines.update(folder)
    assert_all_serve(engines, folder)
    engines.restore()


def test_every_engine_receives_weights_from_memory(engines: EngineSubject, tmp_path: Path) -> None:
    receives = engines.ok(engines.http.get("/health"))["receives"]
    assert receives["workers"] == NUM_ENGINES
    folder = changed(engines.model_folder, tmp_path / "new", 3)
    engines.ok(TrainerRank(engines).broadcast(read(folder)))
    assert_all_serve(engines, folder)
    engines.restore()


def test_a_folder_that_lacks_a_tensor_leaves_every_engine_as_it_was(
    engines: EngineSubject,
) -> None:
    tensors = read(engines.model_folder)
    del tensors[max(tensors)]
    answer = TrainerRank(engines).broadcast(tensors)
    assert answer.status_code == 400 and "still serving version" in answer.text
    assert_all_serve(engines, engines.model_folder)
