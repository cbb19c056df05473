"""``prime-rl serve``: the real command over a tiny model, and what it refuses before starting."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import openai
import psutil
import pytest
import warm
from rich.console import Console
from waiting import LIMIT, eventually, exists

from prime_rl import ConfigError, EngineCommand, RunError
from prime_rl.rundir.machine import free_ports
from prime_rl_tools.serve import server as serving
from prime_rl_tools.serve.request import choose_port, read_settings

MAIN = "from prime_rl_app.cli import main; main()"
TINY = ["--model.warmup_exact", "0"]


class Served:
    """The command, running; its output so far."""

    def __init__(self, process, output):
        self.process, self.output = process, output

    @property
    def text(self):
        return self.output.read_text()

    def wait_ready(self):
        eventually(lambda: "ready; Ctrl-C" in self.text, self.process)

    @property
    def url(self):
        return next(line.split()[1] for line in self.text.splitlines() if line.startswith("url "))

    @property
    def engine_pid(self):
        return psutil.Process(self.process.pid).children()[0].pid


@contextmanager
def command(folder, *arguments, **env):
    output = folder / "output"
    with output.open("wb") as file:
        process = warm.Popen(
            [sys.executable, "-c", MAIN, "serve", *map(str, arguments)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PRIME_RL_CACHE": str(folder / "cache"), **env},
        )
    try:
        yield Served(process, output)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(LIMIT)
        finally:
            process.kill()  # its engine ends with it


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A model that is made first, behind a key; real processes."""
    options = ["--served-model-name", "small", "--api-key-var", "KEY", "--port", free_ports(1)[0]]
    folder = tmp_path_factory.mktemp("serve")
    given = ["tiny-reverse", *TINY, *options]
    with command(folder, *given, KEY="sesame") as served:
        served.wait_ready()
        yield served


# -- the real command -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_openai_client_works(served):
    with openai.OpenAI(base_url=served.url, api_key="sesame") as client:
        assert [model.id for model in client.models.list()] == ["small"]
        answer = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "abc"}], max_tokens=5, seed=1
        )
    assert answer.usage.completion_tokens <= 5 and answer.model == "small"


@pytest.mark.slow
def test_it_scores_a_prompt(served):
    answer = httpx.post(
        served.url.replace("/v1", "/inference/v1/generate"),
        json={"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}},
        headers={"Authorization": "Bearer sesame"},
    ).json()
    assert [next(iter(entry), None) for entry in answer["prompt_logprobs"][1:]] == ["2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_sampling_without_the_key_is_refused(served, headers):
    body = {"token_ids": [1], "messages": [], "sampling_params": {"max_tokens": 1}}
    for route in ("/v1/chat/completions", "/inference/v1/generate"):
        url = served.url.removesuffix("/v1") + route
        assert httpx.post(url, json=body, headers=headers).status_code == 401


@pytest.mark.slow
def test_it_prints_the_toml_for_a_run_and_no_key(served):
    snippet = "\n".join(line for line in served.text.splitlines() if line.startswith("    "))
    assert tomllib.loads(snippet) == {
        "name": "small",
        "base_url": [served.url],
        "api_key_var": "KEY",
    }
    assert "context  2,048 tokens" in served.text
    assert "sesame" not in served.text and "ADMIN_KEY" not in served.text


@pytest.mark.slow
def test_an_evaluation_of_it_gives_the_figures_counted_from_the_traces(served, tmp_path):
    """The real ``prime-rl eval``, by the key."""
    figures = evaluated(served, tmp_path)
    lines = (tmp_path / "reverse-text/rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert figures["num_rollouts"] == len(rows) == 16
    rewards = []
    for row in rows:
        question, *answer = (message.get("content") or "" for message in row["messages"])
        expected, answer = question[::-1], answer[0]
        places = zip(expected, answer, strict=False)
        rewards.append(sum(a == b for a, b in places) / max(len(expected), len(answer)))
    assert figures["avg@2"] == pytest.approx(sum(rewards) / 16)
    assert figures["num_failed"] == 0 and all(row["usage"][1] <= 8 for row in rows)


def evaluated(served, folder):
    options = ["--base-url", served.url, "--api-key-var", "KEY", "--output", folder, "--json"]
    options += ["--num-examples", 8, "--group-size", 2, "--max-tokens", 8]
    done = warm.run(
        [sys.executable, "-c", MAIN, "eval", "reverse-text", *map(str, options)],
        env={**os.environ, "KEY": "sesame"},
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["envs"]["reverse-text"]


@pytest.mark.slow
def test_ctrl_c_ends_it_and_its_engine_and_frees_the_port(tmp_path, served):
    """From the folder that the other server's model is in."""
    (folder,) = (served.output.parent / "cache").glob("tiny-reverse-*")
    (port,) = free_ports(1)
    arguments = [folder, "--port", port, "--max-model-len", 64, "--show-admin-key"]
    with command(tmp_path, *arguments, PRIME_RL_ADMIN_KEY="boss") as other:
        other.wait_ready()
        assert "context  64 tokens" in other.text and "PRIME_RL_ADMIN_KEY=boss" in other.text
        assert "api_key_var" not in other.text
        assert httpx.get(f"{other.url}/models").json()["data"][0]["id"] == str(folder)
        url = other.url.removesuffix("/v1") + "/pause"
        assert httpx.post(url, headers={"Authorization": "Bearer boss"}).status_code == 200
        engine = other.engine_pid
        other.process.send_signal(signal.SIGINT)
        assert other.process.wait(LIMIT) == 0
        assert not exists(engine) and other.text.endswith("stopped\n")
        assert choose_port("127.0.0.1", port) == port


def test_a_refusal_is_one_line_and_code_2(tmp_path):
    with command(tmp_path, "tiny-reverse", "--engine", "warp") as refused:
        assert refused.process.wait(LIMIT) == 2
    assert refused.text.count("\n") == 1
    assert refused.text.startswith("error: inference.engine: no installed plugin offers the engine")


def test_a_key_variable_that_is_not_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    with pytest.raises(ConfigError, match="NO_KEY_HERE is not set or empty"):
        serving.serve(
            read_settings("tiny-reverse", [], {"api_key_var": "NO_KEY_HERE"}), Console(quiet=True)
        )


# -- engines that misbehave -----------------------------------------------------------------

STUB = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def with_engine(tmp_path, monkeypatch):
    """Serve with the given Python code in place of an engine."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    settings = read_settings(str(tmp_path), [], {})
    monkeypatch.setenv("KEY", "sesame")

    def run(code, **options):
        def start(launch):
            return EngineCommand([sys.executable, "-c", code, str(launch.port)])

        engine = SimpleNamespace(command=start)
        monkeypatch.setattr(serving, "build_engine", lambda *_: engine)
        serving.serve(settings.model_copy(update=options), Console(quiet=True))

    return run


def test_an_engine_that_ends_by_itself_ends_the_command(with_engine):
    with pytest.raises(RunError, match="the engine 'embedded' exited with 3: see above"):
        with_engine("import sys; sys.exit(3)")


def test_a_killed_engine_is_reported_with_its_signal(with_engine):
    with pytest.raises(RunError, match="the engine 'embedded' was ended by SIGKILL"):
        with_engine("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_an_engine_that_ignores_its_key_is_not_served(with_engine):
    with pytest.raises(RunError, match="answers requests without the key"):
        with_engine(STUB, api_key_var="KEY")


def test_an_open_address_without_a_key_gives_a_warning(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    settings = read_settings(str(tmp_path), [], {"host": "0.0.0.0"})
    server = serving.Server(settings, 1234, admin_key="secret", api_key="")
    card = serving.describe(server, 64)
    assert server.url == "http://127.0.0.1:1234"
    assert "warning: listens beyond this machine without a key" in card
    assert "secret" not in card
