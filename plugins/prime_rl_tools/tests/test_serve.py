"""``prime-rl serve``: the real command over a tiny model, and what it refuses before starting."""

import json
import os
import signal
import socket
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
from waiting import LIMIT, eventually

from prime_rl import ConfigError, EngineCommand, RunError
from prime_rl.run.children import free_ports
from prime_rl.rundir.control import exists
from prime_rl_tools.serve import server as serving
from prime_rl_tools.serve.request import Request, choose_port, model_context, read_request

MAIN = "from prime_rl.cli import main; main()"
TINY = ["--model.warmup_exact", "0", "--model.hidden_size", "16", "--model.num_layers", "1"]


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
def command(folder, *arguments, popen=warm.Popen, **env):
    output = folder / "output"
    with output.open("wb") as file:
        process = popen(
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
    with command(folder, *given, popen=subprocess.Popen, KEY="sesame") as served:
        served.wait_ready()
        yield served


# -- the real command -----------------------------------------------------------------------


@pytest.mark.slow
def test_the_openai_client_talks_to_it(served):
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
def test_without_the_key_nothing_is_sampled(served, headers):
    body = {"token_ids": [1], "messages": [], "sampling_params": {"max_tokens": 1}}
    for route in ("/v1/chat/completions", "/inference/v1/generate"):
        url = served.url.removesuffix("/v1") + route
        assert httpx.post(url, json=body, headers=headers).status_code == 401


@pytest.mark.slow
def test_it_says_how_a_run_uses_it_and_tells_no_key(served):
    snippet = "\n".join(line for line in served.text.splitlines() if line.startswith("    "))
    assert tomllib.loads(snippet) == {
        "name": "small",
        "base_url": [served.url],
        "api_key_var": "KEY",
    }
    assert "context  2,048 tokens" in served.text
    assert "sesame" not in served.text and "ADMIN_KEY" not in served.text


@pytest.mark.slow
def test_an_evaluation_of_it_gives_the_number_counted_from_the_traces(served, tmp_path):
    """The real ``prime-rl eval``, by the key."""
    told = evaluated(served, tmp_path)
    lines = (tmp_path / "reverse-text/rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert told["num_rollouts"] == len(rows) == 16
    rewards = []
    for row in rows:
        question, *answer = (message.get("content") or "" for message in row["messages"])
        expected, answer = question[::-1], answer[0]
        places = zip(expected, answer, strict=False)
        rewards.append(sum(a == b for a, b in places) / max(len(expected), len(answer)))
    assert told["avg@2"] == pytest.approx(sum(rewards) / 16)
    assert told["num_failed"] == 0 and all(row["usage"][1] <= 8 for row in rows)


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


# -- refusals -------------------------------------------------------------------------------


def request(model="tiny-reverse", overrides=(), **inference):
    return read_request(model, list(overrides), seed=0, inference=inference, served_model_name=None)


@pytest.mark.parametrize(
    ("model", "overrides", "reason"),
    [
        ("nowhere", [], "'nowhere' is no folder, no hub id"),
        ("no/such/folder", [], "model.name: 'no/such/folder' is no folder"),
        ("tiny-reverse", ["--prot", "80"], "--prot: unknown option. prime-rl serve takes"),
        ("tiny-reverse", ["--trainer.lr", "1"], "--trainer.lr: unknown option"),
        ("tiny-reverse", ["--inference.port", "1"], "--inference.port: unknown option"),
        ("tiny-reverse", ["--model.name", "x"], "--model.name: unknown option"),
        ("tiny-reverse", ["--inference.other.x", "1"], "--inference.other.x: unknown option"),
        ("tiny-reverse", ["--model.hiden_size", "1"], "did you mean 'hidden_size'"),
        ("tiny-reverse", ["--inference.embedded.slots", "1"], "did you mean 'num_slots'"),
        ("tiny-reverse", ["another"], "'another': expected one MODEL, then options"),
        ("--model.hidden_size", ["3"], "'--model.hidden_size': expected one MODEL"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(model, overrides, reason):
    with pytest.raises(ConfigError) as caught:
        request(model, overrides)
    assert reason in str(caught.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        request(str(tmp_path))
    with pytest.raises(ConfigError, match="is no folder, no hub id"):
        request(str(tmp_path / "weights"))  # two parts could be owner/name, but for the slashes


def test_a_folder_that_is_not_there_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert request("outputs/weights").config.model.name == "outputs/weights"
    (tmp_path / "outputs").mkdir()
    with pytest.raises(ConfigError, match="'outputs/weights' is no folder"):
        request("outputs/weights")


def test_settings_reach_the_model_and_the_engine():
    asked = request(overrides=["--model.hidden-size", "16", "--inference.embedded.num-slots", "3"])
    assert asked.config.model.settings == {"hidden_size": 16}
    assert asked.config.inference.settings == {"num_slots": 3}
    assert asked.served_model_name == "tiny-reverse"


def test_a_port_that_is_taken_is_refused_if_asked_for_and_passed_over_if_not(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port: {port} is taken on 127\.0\.0\.1"):
            choose_port("127.0.0.1", port)
        monkeypatch.setattr("prime_rl_tools.serve.request.PORT", port)
        assert choose_port("127.0.0.1", None) not in (port, 0)
    assert choose_port("127.0.0.1", None) == port


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.1 --port 1234: "):
        choose_port("203.0.113.1", 1234)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32}, 32),
        ({"text_config": {"max_position_embeddings": 8}, "max_position_embeddings": 9}, 8),
    ],
)
def test_the_context_is_the_models_own(tmp_path, config, context):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context(tmp_path) == context


def test_a_config_that_names_no_context_asks_for_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"give --max-model-len"):
        model_context(tmp_path)


def test_a_key_variable_that_is_not_set_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_KEY_HERE", raising=False)
    asked = read_request(
        "tiny-reverse", [], seed=0, inference={}, served_model_name=None, api_key_var="NO_KEY_HERE"
    )
    with pytest.raises(ConfigError, match="NO_KEY_HERE is not set or empty"):
        serving.serve(asked, Console(quiet=True))


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
    """Serve with a process of our own making in place of an engine."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    asked = request(str(tmp_path))
    monkeypatch.setenv("KEY", "sesame")

    def run(code, **options):
        def start(launch):
            return EngineCommand([sys.executable, "-c", code, str(launch.port)])

        engine = SimpleNamespace(command=start)
        monkeypatch.setattr(serving, "build_engine", lambda *_: engine)
        changed = Request(asked.config, "m", **options)
        serving.serve(changed, Console(quiet=True))

    return run


def test_an_engine_that_ends_by_itself_ends_the_command(with_engine):
    with pytest.raises(RunError, match="the engine 'embedded' exited with 3: see above"):
        with_engine("import sys; sys.exit(3)")


def test_an_engine_that_is_killed_is_said_to_be(with_engine):
    with pytest.raises(RunError, match="the engine 'embedded' was ended by SIGKILL"):
        with_engine("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_an_engine_that_does_not_honour_its_key_is_not_served(with_engine):
    with pytest.raises(RunError, match="answers without the key it was given"):
        with_engine(STUB, api_key_var="KEY")


def test_an_address_for_everybody_without_a_key_is_warned_of(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    asked = request(str(tmp_path), host="0.0.0.0")
    server = serving.Server(asked, "0.0.0.0", 1234, admin_key="secret", api_key="")
    card = serving.describe(server, 64)
    assert server.url == "http://127.0.0.1:1234"
    assert "warning: listens beyond this machine and needs no key" in card
    assert "secret" not in card
