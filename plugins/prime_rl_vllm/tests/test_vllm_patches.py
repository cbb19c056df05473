"""Workarounds for vLLM. A test fails once vLLM no longer needs ours, which can then be deleted."""

import json
import subprocess

import pytest
import torch
from waiting import LIMIT

from prime_rl_devkit.engines.checkpoints import changed

pytestmark = pytest.mark.vllm

PROBE = """
import inspect, json
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateLogProbsContent
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
source = inspect.getsource
print(json.dumps({
    "generate_names_tokens": "token" in GenerateLogProbsContent.model_fields,
    "spawns_on_a_cpu": '"spawn"' in source(CpuPlatform.check_and_update_config),
    "looks_at_models_in_a_process": "_run_in_subprocess(" in source(registry),
    "winds_generators_back": "set_offset" in source(GPUModelRunner._bookkeeping_sync),
    "scores_full_prompts": "prompt_len == max_prompt_len" not in source(InputProcessor),
}))
"""


@pytest.fixture(scope="module")
def facts(vllm):
    """Facts about the installed vLLM, without our additions."""
    python = vllm.argv[0]
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=LIMIT)
    return json.loads(done.stdout.splitlines()[-1])


def test_its_generate_route_lacks_what_renderers_reads(facts):
    """Otherwise ``generate.py``, ``schema.py`` and ``reply.py`` could be deleted."""
    assert not facts["generate_names_tokens"]


def test_it_spawns_its_engine_on_a_cpu(facts):
    """Otherwise ``cpu_start.fork_the_engine`` could be deleted."""
    assert facts["spawns_on_a_cpu"] and facts["looks_at_models_in_a_process"]


def test_it_rewinds_random_generators_even_on_a_cpu(facts):
    """Otherwise ``cpu_start.SETTINGS`` could be deleted."""
    assert facts["winds_generators_back"]


def test_it_does_not_score_a_prompt_that_fills_the_context(facts):
    """Otherwise ``parse_vllm`` could pass ``max_model_len`` as it is."""
    assert not facts["scores_full_prompts"]


def test_its_own_reload_does_not_update_a_tied_head_and_ours_does(vllm, tmp_path):
    """Otherwise ``worker.repack`` could be deleted. Gaps are in logprobs."""
    new = changed(vllm.model_folder, tmp_path / "new")
    prompt = list(range(10, 40))

    def gap():
        found = vllm.reply(prompt, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        logprobs = torch.log_softmax(vllm.reference(new).logits(prompt), -1)
        wanted = [logprobs[i, t].item() for i, t in enumerate(prompt[1:])]
        return max(abs(a - b) for a, b in zip(own_entries(found, prompt), wanted, strict=True))

    try:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(new)}}
        vllm.ok(vllm.admin("/collective_rpc", body))
        theirs = gap()
        vllm.update(new)
        ours = gap()
    finally:
        vllm.restore()
    assert theirs > 0.1
    assert ours < 1e-4


def own_entries(rows, prompt):
    """The logprob of each prompt token but the first."""
    return [row[token] for row, token in zip(rows, prompt[1:], strict=True)]
