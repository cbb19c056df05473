"""Whole runs with agents outside: the walkthrough of docs/gateway.md, and an orchestrator that is
killed while agents talk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from started_commands import CLI, Start, started_commands
from waiting import LIMIT, eventually

from prime_rl_app.saved_rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "gateway.md"
CONFIG = ROOT / "configs" / "gateway" / "reverse.toml"
AGENT = ROOT / "configs" / "gateway" / "agent.py"
SMALL = [
    *("--model.warmup_exact", "0.0"),  # an untrained policy is made in a second
    *("--orchestrator.batch_size", "8", "--orchestrator.group_size", "2"),
    *("--orchestrator.max_off_policy_steps", "4"),
    *("--orchestrator.post_batch_filters", "[]"),  # an untrained policy earns nothing
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]

pytestmark = pytest.mark.slow


def test_the_page_shows_the_agent_that_is_shipped() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.M)
    assert block == AGENT.read_text("utf-8")


@pytest.fixture
def start(model_cache: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts ``prime-rl run`` of the shipped config."""
    with started_commands(model_cache) as starting:

        def run(name: str, *overrides: str) -> subprocess.Popen[str]:
            first = ["run", CONFIG, *SMALL, "--output_dir", tmp_path]
            return starting(*first, "--run.name", name, *overrides)

        yield run


def printed(name: str, folder: Path) -> dict[str, str]:
    """The variables that ``prime-rl gateway`` exports."""
    command = [*CLI, "gateway", name, "--output-dir", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^export (\w+)=(\S+)$", said, re.MULTILINE))


def listens(folder: Path) -> Callable[[], bool]:
    """Whether the gateway of a run has written its address."""
    return lambda: bool([*folder.glob("algorithms/*/gateway/address.json")])


def trained_in(run_dir: Path, step: int) -> list[Any]:
    """The rollouts that a step trained."""
    _, rollouts, dropped = read_rollouts(run_dir / "rollouts" / f"step_{step}.msgpack")
    return [each for each, why in zip(rollouts, dropped, strict=True) if why is None]


def test_agents_of_the_walkthrough_train_a_policy_that_lives_elsewhere(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """The commands of the page, with fewer steps: each is run as it is shown."""
    (_, block, *_) = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.M)
    export, agent = (line.removeprefix("$ ") for line in block.splitlines())
    assert export == 'eval "$(prime-rl gateway)"'
    assert agent == "python configs/gateway/agent.py 550"

    process = start("walk", "--max_steps", "3")
    eventually(listens(tmp_path / "walk"), process)
    agents = subprocess.run(
        [sys.executable, *agent.split()[1:-1], "6"],
        env=os.environ | printed("walk", tmp_path),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    # 48 sessions for 24 rollouts: the run may end before the agents do, and then they fail.
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, f"{output}\n{agents.stderr}"

    seen: set[str] = set()
    for step in (1, 2, 3):
        kept = trained_in(tmp_path / "walk", step)
        assert len(kept) == 8
        for rollout in kept:
            (sample,) = rollout.samples
            assert sample.policy_versions is not None
            assert set(sample.policy_versions[sample.loss_mask].tolist()) <= {0, 1, 2}
            assert rollout.info["session"] not in seen
            seen.add(rollout.info["session"])
    lines = (tmp_path / "walk" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert any("source/reverse-text/taken" in line for line in steps)


def test_an_orchestrator_that_is_killed_keeps_its_sessions_and_trains_each_once(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "killed"
    process = start("killed", "--max_steps", "4", "--ckpt.interval", "1")
    eventually(listens(run_dir), process)
    variables = printed("killed", tmp_path)
    client = httpx.Client(
        base_url=variables["PRIME_RL_GATEWAY"],
        headers={"Authorization": f"Bearer {variables['PRIME_RL_GATEWAY_KEY']}"},
        timeout=LIMIT,
        trust_env=False,
    )

    def patiently(ask: Callable[[], Any]) -> Any:
        """The answer, however long the gateway is away."""
        answers: list[Any] = []

        def answered() -> bool:
            try:
                answers.append(ask())
            except (httpx.TransportError, openai.APIConnectionError):
                return False
            except openai.InternalServerError:
                return False
            return getattr(answers[-1], "status_code", 200) not in (429, 503)

        eventually(answered, process, pause=0.2)
        return answers[-1]

    def say(session: dict[str, Any], said: list[Any]) -> str:
        with openai.OpenAI(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=0
        ) as policy:
            reply = patiently(
                lambda: policy.chat.completions.create(
                    model="policy", messages=said, max_tokens=4, timeout=LIMIT
                )
            )
        return str(reply.choices[0].message.content)

    def opened(number: int) -> dict[str, Any]:
        asked = {"group": f"{number // 2}"}
        answer = patiently(lambda: client.post("/sessions", json=asked))
        assert answer.status_code == 201
        session: dict[str, Any] = answer.json()
        return session

    sessions = [opened(number) for number in range(32)]

    def first(session: dict[str, Any]) -> list[Any]:
        said: list[Any] = [{"role": "user", "content": "abc"}]
        return [*said, {"role": "assistant", "content": say(session, said)}]

    with ThreadPoolExecutor(8) as agents:
        histories = [*agents.map(first, sessions)]

    status = json.loads((run_dir / "status" / "orchestrator.json").read_text())
    os.kill(status["pid"], signal.SIGKILL)

    def second(number: int) -> int:
        said = [*histories[number], {"role": "user", "content": "def"}]
        session = sessions[number]
        say(session, said)
        path = f"/sessions/{session['id']}/reward"
        answer = patiently(lambda: client.post(path, json={"reward": float(number % 2)}))
        return int(answer.status_code)

    with ThreadPoolExecutor(8) as agents:
        futures = [agents.submit(second, number) for number in range(32)]
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, output
        for future in futures:
            future.cancel()

    trained: list[str] = []
    for step in (1, 2, 3, 4):
        for rollout in trained_in(run_dir, step):
            trained.append(rollout.info["session"])
            assert rollout.num_turns >= 2  # a reply that got lost was sampled again
    assert len(trained) == len({*trained}) == 32
    assert {*trained} == {session["id"] for session in sessions}
    client.close()
