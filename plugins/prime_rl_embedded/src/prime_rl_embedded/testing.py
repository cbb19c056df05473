"""For tests and benches: tiny models, and a real server process around one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from prime_rl import EngineLaunch
from prime_rl_devkit.engines.models import VOCAB_SIZE as VOCAB_SIZE
from prime_rl_devkit.engines.models import write_tokenizer
from prime_rl_embedded import Embedded, EmbeddedConfig

ADMIN_KEY = "test-admin-key"


def write_model(
    folder: Path,
    architecture: str = "Qwen3",
    *,
    seed: int = 0,
    tokenizer: bool = False,
    config: str | None = None,
    **settings: Any,
) -> Path:
    """A tiny random model of any architecture, with weights large enough for peaked distributions.

    ``config``: the name of its config class, if not ``{architecture}Config``.
    """
    import torch
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config_class = getattr(transformers, config or f"{architecture}Config")
    model = getattr(transformers, f"{architecture}ForCausalLM")(config_class(**sizes | settings))
    model.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    (folder / ".ready").touch()
    return folder


@dataclass
class Served:
    """A running server and its client."""

    url: str
    process: subprocess.Popen[bytes]
    http: httpx.Client = field(repr=False)

    def post(self, route: str, body: Any = None, admin: bool = False) -> httpx.Response:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"} if admin else {}
        return self.http.post(route, json=body, headers=headers)

    def generate(self, token_ids: list[int], **sampling: Any) -> dict[str, Any]:
        """The whole reply of one generate request, with logprobs by default."""
        body = {"token_ids": token_ids, "sampling_params": {"logprobs": 1} | sampling}
        answer = self.post("/inference/v1/generate", body)
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply

    def update_weights(self, folder: Path, version: int | None = None) -> httpx.Response:
        return self.post(
            "/update_weights", {"weight_dir": str(folder), "version": version}, admin=True
        )

    def metric(self, name: str, labels: str = "") -> float:
        """A metric's current value, by its name and a part of its labels."""
        pattern = rf"^{re.escape(name)}{{[^}}]*{re.escape(labels)}[^}}]*}} (\S+)$"
        match = re.search(pattern, self.http.get("/metrics").text, re.MULTILINE)
        assert match, f"no metric {name} {labels}"
        return float(match[1])

    def wait_for(self, name: str, at_least: float, labels: str = "", seconds: float = 300) -> None:
        """Poll a metric until it reaches a value."""
        deadline = time.monotonic() + seconds
        while self.metric(name, labels) < at_least:
            assert time.monotonic() < deadline, f"{name} stays under {at_least}"

    def leave_early(
        self, send: Callable[[], AbstractContextManager[Any]], running: int = 1, waiting: int = 0
    ) -> None:
        """Send a request, pause while it runs, and disconnect: only the disconnect can end it.

        A fast engine can end the request before the pause. Then it is sent again.

        Args:
            send: sends it and waits for a sign of life, the first chunk or the end of the reply.
            running, waiting: the choices of it that the paused engine must hold.
        """
        deadline = time.monotonic() + 300
        caught = False
        while not caught:
            assert time.monotonic() < deadline, "each request ended before the pause"
            with send():
                self.post("/pause", admin=True)
                numbers = [
                    self.metric(f"vllm:num_requests_{name}") for name in ("running", "waiting")
                ]
                caught = numbers == [running, waiting]

            while self.metric("vllm:num_requests_running"):
                assert time.monotonic() < deadline, "the engine keeps a request without a client"
            self.post("/resume", admin=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(
    model: Path,
    port: int,
    *,
    max_model_len: int = 256,
    status_path: Path | None = None,
    seed: int = 0,
    wait_for_model: bool = False,
    policy_version: int = 0,
    weights_roots: Sequence[Path] | None = None,
    env: dict[str, str] | None = None,
    **settings: Any,
) -> subprocess.Popen[bytes]:
    """Start the server with the plugin's own command, as the supervisor does."""
    launch = EngineLaunch(
        model_path=model,
        served_model_name="tiny",
        host="127.0.0.1",
        port=port,
        max_model_len=max_model_len,
        seed=seed,
        admin_key=ADMIN_KEY,
        status_path=status_path,
        wait_for_model=wait_for_model,
        policy_version=policy_version,
        weights_roots=weights_roots,
    )
    command = Embedded(EmbeddedConfig(**settings)).command(launch)
    return subprocess.Popen(command.argv, env=os.environ | dict(command.env) | (env or {}))


def wait_healthy(url: str, process: subprocess.Popen[Any], seconds: float = 600) -> None:
    """Wait until ``/health`` answers 200."""
    deadline = time.monotonic() + seconds
    while True:
        assert process.poll() is None, f"the server ended with code {process.returncode}"
        assert time.monotonic() < deadline, f"the server is not healthy after {seconds} s"
        try:
            if httpx.get(f"{url}/health", trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)


@contextmanager
def serve(model: Path, **options: Any) -> Iterator[Served]:
    """A healthy server, stopped at the end of the context."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = start(model, port, **options)
    try:
        wait_healthy(url, process)
        with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
            yield Served(url, process, http)
    finally:
        process.terminate()
        process.wait(60)
