"""What our vLLM server does beyond the engine suite."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import PYTHON, SETTINGS
from waiting import LIMIT

from prime_rl.inference.pool import FrozenPool
from prime_rl.inference.scorer import PromptScorer
from prime_rl_devkit.engines import started
from prime_rl_devkit.engines.checkpoints import changed
from prime_rl_vllm import Vllm, VllmConfig

pytestmark = pytest.mark.vllm
GAP = 1e-4
MAIN = "from prime_rl_app.cli import main; main()"
CONFIG = Path(__file__).parents[3] / "configs" / "reverse_text" / "opd.toml"


def letters(count, seed=0):
    """Ids of ordinary tokens."""
    return torch.randint(9, 265, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(subject, token_ids):
    """Each token's logprob from transformers in float32; 0.0 for the first."""
    logprobs = torch.log_softmax(subject.reference().logits(token_ids), -1)
    picked = logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])


@pytest.mark.parametrize("length", ["short", "the whole context"])
def test_a_teacher_scores_as_transformers_does(vllm, length):
    """The requests of opd to its teacher, through the same client pool."""
    token_ids = letters(40 if length == "short" else vllm.max_model_len)

    async def score():
        pool = FrozenPool([vllm.url], vllm.model, where="teacher", api_key=vllm.api_key)
        try:
            return await PromptScorer(pool, vllm.model).logprobs(token_ids)
        finally:
            await pool.close()

    assert np.abs(asyncio.run(score()) - expected(vllm, token_ids)).max() < GAP


def test_more_seeded_prompts_than_a_step_takes_are_all_answered(vllm):
    """On a CPU vLLM dies if it splits a seeded prompt: 64 x 60 tokens, 2,048 per step."""
    bodies = [vllm.body(letters(60, seed=i), max_tokens=2, seed=i) for i in range(64)]
    assert len(vllm.replies(bodies)) == 64


TEXT = [{"role": "user", "content": "a" * 300}]
"""Long enough to fill blocks of the prefix cache."""


@pytest.mark.parametrize(
    ("route", "question"),
    [
        ("/v1/chat/completions", {"messages": TEXT}),
        ("/v1/chat/completions/batch", {"messages": [TEXT]}),
        ("/v1/completions", {"prompt": "a" * 300}),
        ("/v1/messages", {"messages": TEXT}),
        ("/v1/responses", {"input": "a" * 300, "max_output_tokens": 1}),
    ],
)
def test_text_routes_never_use_the_cache_of_older_weights(vllm, tmp_path, route, question):
    body = {"model": vllm.model, "max_tokens": 1, "cache_salt": route.replace("/", "-")} | question

    def cached():
        before = vllm.metric("prefix_cache_hits")
        vllm.ok(vllm.http.post(route, json=body, headers=vllm.headers()))
        return vllm.metric("prefix_cache_hits") - before

    first, second = cached(), cached()
    vllm.update(changed(vllm.model_folder, tmp_path / "new"))
    after = cached()
    vllm.restore()
    assert (first, after) == (0, 0)
    assert second > 0


def test_a_request_that_arrives_during_an_update_uses_no_older_cache(vllm, tmp_path):
    """The request waits, and is computed under the new weights only."""
    prompt, folder = letters(300, seed=6), changed(vllm.model_folder, tmp_path / "new")
    ask = {"salt": "s", "max_tokens": 1, "seed": 6}
    first, second = (vllm.reply(prompt, **ask).cached_tokens for _ in range(2))
    assert first == 0 < second
    vllm.pause()
    with vllm.held(vllm.body(prompt, **ask)) as waiting:
        time.sleep(0.5)  # the request has arrived
        vllm.ok(vllm.load(folder))
        vllm.resume()
        reply = waiting.result()
    vllm.restore()
    assert reply.cached_tokens == 0 and len(reply.choices[0].versions) == 1


def test_an_update_reports_its_duration(vllm, tmp_path):
    before = vllm.metric("weight_updates")
    vllm.update(changed(vllm.model_folder, tmp_path / "new"))
    assert vllm.metric("weight_updates") == before + 1
    assert vllm.metric("policy_version") == vllm.version
    seconds = vllm.metric("weight_update_seconds")
    vllm.restore()
    assert 0 < seconds < LIMIT


def test_a_sleeping_engine_refuses_resume_and_wakes_up_paused(vllm):
    vllm.ok(vllm.admin("/sleep"))
    refused = vllm.admin("/resume")
    vllm.ok(vllm.admin("/wake_up"))
    paused = vllm.metric("paused")
    vllm.resume()
    assert (refused.status_code, paused, vllm.metric("paused")) == (409, 1, 0)
    assert vllm.admin("/sleep", level="2").status_code == 400


def test_routes_for_development_need_the_admin_key(vllm):
    body = {"method": "get_model"}
    assert vllm.http.post("/collective_rpc", json=body).status_code == 401
    answer = vllm.http.post("/collective_rpc", json=body, headers=vllm.headers())
    assert answer.status_code == 403


def test_versions_may_skip_numbers(vllm):
    vllm.version += 40
    vllm.update(vllm.model_folder)
    choice = vllm.choice(letters(5), max_tokens=3)
    assert choice.versions == [(str(vllm.version), 0, 3)]


def test_nothing_is_lost_between_two_updates_in_a_row(vllm):
    """The same weights three times: the greedy completion is the same each time."""
    completions = []
    for _ in range(3):
        vllm.update(vllm.model_folder)
        completions.append(vllm.choice(letters(20), temperature=0, max_tokens=20).token_ids)
    assert all(a == b for a, b in itertools.pairwise(completions))


@pytest.mark.slow
def test_opd_learns_from_a_teacher_behind_vllm(vllm, tmp_path):
    """The teacher is the policy's initial model: log(teacher / policy) is 0 for every token of the
    first batch, and differs from 0 in the second."""
    words = [
        *("--max_steps", "2", "--output_dir", tmp_path, "--run.name", "opd"),
        *("--model.name", vllm.model_folder, "--orchestrator.batch_size", "8"),
        *("--orchestrator.max_off_policy_steps", "0", "--trainer.optim.lr", "0.01"),
        *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
        *("--orchestrator.eval.env", "[]"),
        *("--orchestrator.algo.teacher.name", vllm.model),
        *("--orchestrator.algo.teacher.base_url", f'["{vllm.url}/v1"]'),
        *("--orchestrator.algo.teacher.api_key_var", "TEACHER_KEY"),
    ]
    command = [sys.executable, "-c", MAIN, "run", CONFIG, *words]
    env = os.environ | {"TEACHER_KEY": vllm.api_key}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "opd" / "trainer.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["metrics"]["ref_kl/reverse-text/mean"] for line in lines)
    assert abs(first) < GAP < abs(second)


def test_a_server_whose_engine_dies_while_it_is_asked_to_pause_ends(tmp_path):
    """It waits for its client, which waits for the engine."""
    engine = Vllm(VllmConfig.model_validate(SETTINGS))
    with started(engine, tmp_path, python=PYTHON) as subject:
        log = tmp_path / "engine.log"
        pid = int(re.search(r"EngineCore pid=(\d+)", log.read_text())[1])
        os.kill(pid, signal.SIGSTOP)  # else it would answer at once
        client = HTTPConnection(subject.url.removeprefix("http://"), timeout=LIMIT)
        client.request("POST", "/pause", headers=subject.headers(admin=True))
        assert subject.http.get("/health").status_code == 200  # so the server has the request
        os.kill(pid, signal.SIGKILL)
        assert subject.process.wait(LIMIT) == 1
        answer = client.getresponse()
        text = answer.read().decode()
        client.close()
    assert answer.status == 503 and "the engine has ended" in text
    assert "the engine has died, so the server ends" in log.read_text()
