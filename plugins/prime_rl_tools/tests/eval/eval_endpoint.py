"""A scripted OpenAI-compatible endpoint, and ``prime-rl eval`` against it."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typer.testing import CliRunner

from prime_rl.errors import ConfigError
from prime_rl.rundir.launch import Launch
from prime_rl_app.cli.app import app
from prime_rl_app.config import build_config
from prime_rl_environments.tiny.tokenizer import build_tokenizer


class Endpoint:
    """Answers chat requests by ``script(word, how often it was asked)``: a text, or a status."""

    routes = ("/v1/chat/completions",)

    def __init__(self, script, key=None, models=("small", "large")):
        self.script, self.key, self.models = script, key, models
        self.asked = Counter()
        self.bodies = []
        self.url = ""

    def chat(self, body):
        self.bodies.append(body)
        word = body["messages"][-1]["content"]
        self.asked[word] += 1
        answer = self.script(word, self.asked[word])
        if isinstance(answer, int):
            return answer, {"error": {"message": f"no {word} today"}}
        choice = {"index": 0, "finish_reason": "stop",
                  "message": {"role": "assistant", "content": answer}}  # fmt: skip
        usage = {"prompt_tokens": len(word), "completion_tokens": 3, "total_tokens": len(word) + 3}
        return 200, {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"],
                     "choices": [choice], "usage": usage}  # fmt: skip


@contextmanager
def served(script, kind=None, **settings):
    endpoint = (kind or Endpoint)(script, **settings)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            if endpoint.key and self.headers.get("Authorization") != f"Bearer {endpoint.key}":
                self.answer(401, {"error": "key"})
            elif self.path == "/v1/models" and endpoint.models is not None:
                self.answer(200, {"data": [{"id": name} for name in endpoint.models]})
            else:
                self.answer(404, {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            known = self.path in endpoint.routes
            self.answer(*(endpoint.chat(body) if known else (404, {})))

        def log_message(self, *arguments):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # rollouts that knock at once

    server = Server(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def command(endpoint, folder, *arguments, what=("reverse-text",), model="small"):
    options = ["--base-url", endpoint.url, "--output", str(folder)]
    options += ["--model", model] if model else []
    done = CliRunner().invoke(app, ["eval", *what, *options, *map(str, arguments)])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done


def make_run(folder, name="a-run"):
    """What an evaluation reads of a run."""
    (folder / name / "configs").mkdir(parents=True)
    table = {
        "model": {"name": "tiny-reverse"},
        "max_steps": 1,
        "orchestrator": {
            "renderer": {"name": "qwen3", "enable_thinking": False},
            "eval": {"env": [{"id": "reverse-text", "num_examples": 3}]},
        },
    }
    config = build_config(table)
    (folder / name / "configs/run.json").write_text(config.model_dump_json())
    build_tokenizer().save_pretrained(folder / name / "model")
    Launch(
        model_path=str(folder / name / "model"),
        served_model_name="",
        engine_urls=[],
        transport_type="zmq",
        transport_host="",
        transport_ports=[],
    ).write(folder / name)
    return folder / name


def exact(word, times):
    """Every second try is right, all letters wrong in between."""
    return word[::-1] if times % 2 else "0" * len(word)
