"""Real clients play rollouts: each calls a tool, reads its result and answers."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from program_rollouts import ASK, Play, check_tokens, info_of
from renderers import Qwen3RendererConfig
from scripted_replies import TOKENIZER, ScriptedEngine
from waiting import LIMIT

from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl.env.traces import build_samples

pytestmark = pytest.mark.slow

CLIENTS = Path(__file__).parent / "clients"
APART = Path(__file__).parents[3] / ".venv-agents"
INSTALL = "not installed: make setup-agents"

CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1, "b": 2.5}}\n</tool_call>'
ANSWER = "the sum is 3.5"


def calling_then_answering(prompt: str) -> str:
    return ANSWER if "<tool_response>" in prompt else CALL


def python_with(package: str) -> str:
    """An interpreter that has the package: of ``make setup-agents``."""
    python = APART / "bin" / "python"
    if not any(APART.glob(f"lib/python*/site-packages/{package}")):
        pytest.skip(f"{package} is {INSTALL}")
    return str(python)


def node_with(package: str) -> list[str]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node: install Node.js 20 or newer")
    if not (APART / "node_modules" / package).is_dir():
        pytest.skip(f"{package} of npm is {INSTALL}")
    return [node, str(CLIENTS / "openai_node.mjs"), str(APART)]


SDKS = {
    "openai, chat": ["openai_sdk.py", "chat"],
    "openai, chat, streamed": ["openai_sdk.py", "chat", "stream"],
    "openai, responses": ["openai_sdk.py", "responses"],
    "openai, responses, streamed": ["openai_sdk.py", "responses", "stream"],
    "anthropic, messages": ["anthropic_sdk.py"],
    "anthropic, messages, streamed": ["anthropic_sdk.py", "stream"],
}
FRAMEWORKS = {
    "OpenAI Agents SDK": ("agents", ["openai_agents.py"]),
    "LangGraph": ("langgraph", ["langgraph_agent.py"]),
    "Pydantic AI, openai": ("pydantic_ai", ["pydantic_ai_agent.py", "openai"]),
    "Pydantic AI, anthropic": ("pydantic_ai", ["pydantic_ai_agent.py", "anthropic"]),
}
CLIENT_NAMES = [*SDKS, *FRAMEWORKS, "openai of npm, streamed"]


def command_of(client: str) -> list[str]:
    """How a client is started. Skips where it is not installed."""
    if client in SDKS:
        file, *arguments = SDKS[client]
        return [sys.executable, str(CLIENTS / file), *arguments]
    if client in FRAMEWORKS:
        package, (file, *arguments) = FRAMEWORKS[client]
        return [python_with(package), str(CLIENTS / file), *arguments]
    return node_with("openai")


@pytest.mark.parametrize("client", CLIENT_NAMES)
async def test_a_client_calls_a_tool_and_answers(
    client: str, play: Play, engine: ScriptedEngine
) -> None:
    engine.script = calling_then_answering
    engine.max_model_len = 100_000
    result = await play("", command=command_of(client))
    assert result.ok, result.error
    assert info_of(result)["stdout"].strip() == ANSWER
    assert (result.num_turns, len(engine.bodies)) == (2, 2)
    assert check_tokens(result, engine) == 1


# -- a policy, its engine, and what would train --------------------------------------------------


@pytest.fixture(scope="module")
def tiny_chat(model_cache: Path) -> Path:
    """Warmed up on one task only: what it says does not matter here."""
    from prime_rl.rundir.launch import READY
    from prime_rl_app.models import cached_path, make
    from prime_rl_environments.tiny import TinyChat, TinyChatConfig

    maker = TinyChat(TinyChatConfig(lessons=["reverse"]))
    path = cached_path(maker, version("prime-rl-environments"), 0, model_cache)
    if not (path / READY).exists():
        make(lambda folder: maker.make(folder, 0, lambda state, share: None), path)
    return path


@pytest.fixture(scope="module")
def policy(tiny_chat: Path) -> Iterator[ModelEndpoint]:
    """The embedded engine with ``tiny-chat``."""
    testing = pytest.importorskip("prime_rl_embedded.testing", reason="needs prime-rl-embedded")
    with testing.serve(tiny_chat, max_model_len=2048, policy_version=3) as served:
        yield ModelEndpoint("tiny", f"{served.url}/v1")


def logprob_gap(model: Path, result: RolloutResult, temperature: float) -> float:
    """Largest difference between the recorded log-probabilities of what trains and those of a plain
    forward over its whole sample: a token in another context, or another token, would differ."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)
    gaps = []
    for sample in build_samples(result.branches, temperature):
        ids = torch.tensor(sample.token_ids[None].astype("int64"))
        with torch.no_grad():
            logits = policy(ids).logits[0, :-1]
        logprobs = torch.log_softmax(logits / temperature, -1).gather(-1, ids[0, 1:, None])[:, 0]
        gap = np.abs(logprobs.numpy() - sample.inference_logprobs[1:])
        gaps.append(float(gap[sample.loss_mask[1:]].max()))
    return max(gaps)


@pytest.mark.parametrize("client", CLIENT_NAMES)
async def test_what_a_client_gets_from_a_policy_trains_as_it_was_sampled(
    client: str, play: Play, policy: ModelEndpoint, tiny_chat: Path
) -> None:
    """``tiny-chat`` does not know this tool: it replies with anything, and may call it wrongly, so
    a framework may give up. What it was given until then is in the record."""
    result = await play(
        "",
        command=["sh", "-c", '"$@" || true', "client", *command_of(client)],
        endpoint=policy,
        tokenizer=tiny_chat,
        max_tokens=24,
        max_turns=3,
    )
    assert result.ok, result.error
    assert result.num_turns >= 1, info_of(result)["stderr"]
    assert result.branches[0].policy_versions is not None
    assert logprob_gap(tiny_chat, result, 0.75) < 1e-4


async def test_a_program_gets_the_reply_that_the_in_process_harness_gets(
    policy: ModelEndpoint, tiny_chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token: the same seeds, prompts and limits reach the engine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(ASK + "chat(json.load(sys.stdin)['messages'])")
    program = {"id": "program", "command": [sys.executable, "agent.py"]}
    found = []
    for harness in (program, {"id": "in-process"}):
        settings = EnvSettings(
            id="reverse-text",
            args={"num_examples": 4},
            harness=harness,
            timeout=LIMIT,
            renderer=Qwen3RendererConfig(thinking_retention="all"),
            tokenizer_path=tiny_chat,
        )
        sampling = SamplingSettings(temperature=1.0, max_completion_tokens=12)
        async with Environment(settings) as env:
            runs = [
                env.run(env.examples[seed], model=policy, sampling=sampling, seed=seed)
                for seed in range(4)
            ]
            results = [result for (result,) in await asyncio.gather(*runs)]
        assert all(result.ok for result in results), [result.error for result in results]
        branches = [branch for result in results for branch in result.branches]
        found.append([(b.token_ids, b.sampled_mask, b.policy_versions) for b in branches])
    assert found[0] == found[1]
    assert len(found[0]) == 4


# -- coding agents, which let the model run a shell ----------------------------------------------


def called(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


SHELL = "echo 4$((1 + 1))"


def shell_then_answer(call: str) -> Callable[[str], str]:
    """The model runs ``SHELL``, then answers with what it printed."""
    return lambda prompt: ANSWER if "<tool_response>" in prompt else call


def check_shell(result: RolloutResult, engine: ScriptedEngine) -> None:
    assert result.ok, result.error
    assert len(engine.bodies) == 2
    assert "42" in TOKENIZER.decode(engine.bodies[1]["token_ids"]).split("<tool_response>")[1]
    assert check_tokens(result, engine) == 1


async def test_mini_swe_agent_runs_a_command_of_the_model(
    play: Play, engine: ScriptedEngine
) -> None:
    python = python_with("minisweagent")
    commands = [SHELL, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    engine.script = lambda prompt: called("bash", command=commands["<tool_response>" in prompt])
    engine.max_model_len = 100_000
    result = await play(
        "",
        command=[
            *(str(Path(python).parent / "mini"), "--model", "{model}", "--task", "{prompt}"),
            *("--model-class", "litellm", "--exit-immediately", "--yolo", "-c", "mini"),
            *("-c", "agent.cost_limit=0", "-c", "model.cost_tracking=ignore_errors"),
            *("-c", "model.model_kwargs.custom_llm_provider=openai"),
        ],
        env={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    )
    check_shell(result, engine)


async def test_claude_code_runs_a_command_of_the_model(
    play: Play, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Its system prompt and its tools are some 80,000 tokens of a tokenizer of bytes."""
    claude = command_line("claude", "@anthropic-ai/claude-code")
    engine.script = shell_then_answer(called("Bash", command=SHELL, description="count"))
    engine.max_model_len = 1_000_000
    result = await play(
        "",
        command=[claude, "-p", "{prompt}", "--dangerously-skip-permissions", "--model", "{model}"],
        env={
            "HOME": str(tmp_path),
            "IS_SANDBOX": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )
    check_shell(result, engine)
    assert info_of(result)["stdout"] == f"{ANSWER}\n"


async def test_codex_runs_a_command_of_the_model(
    play: Play, engine: ScriptedEngine, tmp_path: Path
) -> None:
    codex = command_line("codex", "@openai/codex")
    provider = '{name="run", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}'
    engine.script = shell_then_answer(called("exec_command", cmd=SHELL))
    engine.max_model_len = 1_000_000
    result = await play(
        "",
        command=[
            *(codex, "exec", "--skip-git-repo-check", "-m", "{model}"),
            "--dangerously-bypass-approvals-and-sandbox",
            *("-c", 'model_provider="run"', "-c", f"model_providers.run={provider}"),
            "{prompt}",
        ],
        env={"HOME": str(tmp_path)},
    )
    check_shell(result, engine)
    assert info_of(result)["stdout"] == f"{ANSWER}\n"


def command_line(name: str, package: str) -> str:
    path = APART / "node_modules" / ".bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: npm install --prefix .venv-agents {package}")
    return str(path)
