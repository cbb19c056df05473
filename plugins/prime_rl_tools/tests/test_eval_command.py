"""``prime-rl eval`` against a scripted OpenAI endpoint: its numbers by hand, what it leaves, what
it refuses."""

import json
import re
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from prime_rl.cli.app import app
from prime_rl.config.load import build_config
from prime_rl.errors import ConfigError
from prime_rl.rundir.launch import Launch
from prime_rl_environments.tiny.tokenizer import build_tokenizer
from prime_rl_tools.eval.request import find_endpoint, read_envs, run_named, run_renderer

NUM_EXAMPLES = 4


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


def rows(folder, env="reverse-text"):
    return [json.loads(line) for line in (folder / env / "rollouts.jsonl").read_text().splitlines()]


def exact(word, times):
    """Every second try is right, all letters wrong in between."""
    return word[::-1] if times % 2 else "0" * len(word)


SIZE = ("--num-examples", NUM_EXAMPLES, "--group-size", 4)


def test_the_figures_are_those_counted_from_the_traces(tmp_path):
    with served(exact) as endpoint:
        done = command(endpoint, tmp_path / "out", *SIZE, "--json", "--temperature", 0.5,
                       "--max-tokens", 9, "--seed", 100)  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["envs"]["reverse-text"]
    found = rows(tmp_path / "out")
    assert not [(row["error_type"], row["error"]) for row in found if not row["ok"]]
    assert {(row["example"], row["member"]) for row in found} == {
        (e, m) for e in range(NUM_EXAMPLES) for m in range(4)
    }
    for row in found:  # by hand, from the conversation: a word that reads the same both ways aside
        asked, answered = (message["content"] for message in row["messages"])
        right = sum(a == b for a, b in zip(asked[::-1], answered, strict=True)) / len(asked)
        assert row["reward"] == pytest.approx(right)
        assert row["usage"] == [len(asked), 3]
    # Each example was right twice in four: pass@1 = 1/2, pass@2 = 1 - C(2,2)/C(4,2) = 5/6
    assert told["avg@4"] == pytest.approx(sum(row["reward"] for row in found) / 16)
    assert told["pass@1"] == told["pass^1"] == told["avg@4"] == 0.5
    assert (told["pass@2"], told["pass^2"]) == (pytest.approx(5 / 6), pytest.approx(1 / 6))
    assert (told["pass@4"], told["pass^4"]) == (1.0, 0.0)
    assert told["all/reward/stderr"] == 0.0 and told["all/num_output_tokens/mean"] == 3.0
    assert "policy_version" not in told and told["errors"] == {}
    sent = endpoint.bodies
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in sent} == {
        (0.5, 9, "small")
    }
    assert sorted(body["seed"] for body in sent) == list(range(100, 116))
    assert json.loads((tmp_path / "out/summary.json").read_text())["envs"]["reverse-text"] == told


def test_failures_are_told_by_kind_and_tried_again_on_resume(tmp_path):
    with served(lambda word, times: 500 if times <= 2 else word[::-1]) as endpoint:
        first = command(endpoint, tmp_path, *SIZE)
        assert first.exit_code == 0
        assert "reverse-text: 8 failed: ProviderError 500: " in first.stdout
        rates, *_ = re.split(r"(?m)^failed \(reward 0\) +8 *$", first.stdout)
        assert rates != first.stdout
        # Two of four failed, two are right: pass@1 = 1/2, pass@2 = 1 - C(2,2)/C(4,2) = 5/6
        assert re.search(r"pass@1 +0\.5000", rates) and re.search(r"pass@2 +0\.8333", rates)
        assert sum(endpoint.asked.values()) == 16
        before = [row for row in rows(tmp_path) if row["ok"]]
        with pytest.raises(ConfigError, match=r"holds an evaluation\. --resume goes on with it"):
            command(endpoint, tmp_path, *SIZE)
        second = command(endpoint, tmp_path, *SIZE, "--json", "--resume")
        assert sum(endpoint.asked.values()) == 24  # the eight that failed
        told = json.loads(second.stdout)["envs"]["reverse-text"]
        assert (told["num_rollouts"], told["num_failed"], told["pass^4"]) == (16, 0, 1.0)
        assert told["all/num_output_tokens/mean"] == 3.0 and told["all/num_branches/mean"] == 1.0
        assert [row for row in rows(tmp_path) if row["ok"]][: len(before)] == before
        with pytest.raises(ConfigError, match=r"sampling.temperature was None, is 0.0\. Name"):
            command(endpoint, tmp_path, *SIZE, "--resume", "--temperature", 0)


def test_where_everything_fails_the_exit_code_says_so(tmp_path):
    with served(lambda word, times: 429) as endpoint:
        done = command(endpoint, tmp_path, "--num-examples", 2)
    assert done.exit_code == 1
    assert "2 failed: ProviderError 429: " in done.stdout and "avg@1" in done.stdout


TWO = """
[orchestrator.eval.sampling]
temperature = 0.25
[[orchestrator.eval.env]]
id = "reverse-text"
name = "first/half"
num_examples = 2
[[orchestrator.eval.env]]
id = "reverse-text"
name = "greedy"
sampling = {temperature = 0.0}
num_examples = 3
"""


def test_a_runs_own_toml_gives_several_envs(tmp_path):
    (tmp_path / "two.toml").write_text(TWO)
    with served(lambda word, times: word[::-1], models=("small",)) as endpoint:
        done = command(endpoint, tmp_path / "out", "--orchestrator.eval.env.0.num_examples", 1,
                       what=[str(tmp_path / "two.toml")], model=None)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "first/half" in done.stdout and "greedy" in done.stdout
    assert len(rows(tmp_path / "out", "first_half")) == 1
    assert len(rows(tmp_path / "out", "greedy")) == 3
    assert Counter(body["temperature"] for body in endpoint.bodies) == {0.25: 1, 0.0: 3}


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


def test_a_run_is_evaluated_with_its_renderer(tmp_path):
    run_dir = make_run(tmp_path)
    tokenizer, asked = build_tokenizer(), []

    class Tokens(Endpoint):
        """Answers the engine contract's token route with the word of the prompt, backwards."""

        routes = ("/inference/v1/generate",)

        def chat(self, body):
            if not body:
                return 400, {"error": {"message": "no tokens"}}
            asked.append(tokenizer.decode(body["token_ids"]))
            word = asked[-1].split("\n")[1].removesuffix("<|im_end|>")
            ids = tokenizer.encode(word[::-1] + "<|im_end|>", add_special_tokens=False)
            logprobs = [{"token": f"token_id:{i}", "token_id": i, "logprob": -1.0} for i in ids]
            choice = {"index": 0, "token_ids": ids, "finish_reason": "stop",
                      "logprobs": {"content": logprobs}}  # fmt: skip
            return 200, {"request_id": "x", "choices": [choice]}

    with served(exact, kind=Tokens) as endpoint:
        done = command(endpoint, tmp_path / "out", "--json", what=[str(run_dir)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["envs"]["reverse-text"]["avg@1"] == 1.0
    assert len(asked) == 3  # as the run's config says
    assert all(
        prompt.startswith("<|im_start|>user\n")
        and prompt.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        for prompt in asked
    )
    for row in rows(tmp_path / "out"):  # for --resume: 18 - 6 tokens beside the word's; its end
        word = row["messages"][0]["content"]
        assert row["usage"] == [len(word) + 12, len(word) + 1]
    record = json.loads((tmp_path / "out/eval.json").read_text())
    assert record["renderer"] == {
        "name": "qwen3",
        "enable_thinking": False,
        "thinking_retention": None,
    }


def test_a_run_is_found_by_its_name_unless_a_taskset_is_called_so(tmp_path):
    make_run(tmp_path)
    make_run(tmp_path, "reverse-text")
    assert run_named(["a-run"], tmp_path) == tmp_path / "a-run"
    assert run_named(["reverse-text"], tmp_path) is None
    path = str(tmp_path / "reverse-text")
    assert run_named([path], tmp_path) == tmp_path / "reverse-text"
    assert run_named(["b-run"], tmp_path) is None


# -- refusals -------------------------------------------------------------------------------


def refusal(call, *arguments, **settings):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **settings)
    return str(caught.value)


def test_an_endpoint_that_cannot_be_used_says_why(monkeypatch):
    assert "does not answer (ConnectError" in refusal(
        find_endpoint, "http://127.0.0.1:9/v1", None, None
    )
    assert "expected http(s)://HOST" in refusal(find_endpoint, "localhost:8000", None, None)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert "NO_SUCH_KEY is not set" in refusal(find_endpoint, "http://x/v1", None, "NO_SUCH_KEY")
    monkeypatch.setenv("WRONG", "guess")
    monkeypatch.setenv("RIGHT", "sesame")
    with served(exact, key="sesame") as endpoint:
        assert "it wants a key" in refusal(find_endpoint, endpoint.url, "small", None)
        assert "the key in WRONG" in refusal(find_endpoint, endpoint.url, "small", "WRONG")
        found = find_endpoint(endpoint.url + "/", "small", "RIGHT")
        assert (found.name, found.base_url, found.client) == ("small", endpoint.url, "chat")
        assert "no model 'smal' at" in refusal(find_endpoint, endpoint.url, "smal", "RIGHT")
        assert "Did you mean 'small'" in refusal(find_endpoint, endpoint.url, "smal", "RIGHT")
        assert "which model at" in refusal(find_endpoint, endpoint.url, None, "RIGHT")
    with served(exact, models=None) as endpoint:  # it lists none: what is asked for is believed
        assert find_endpoint(endpoint.url, "mine", None).name == "mine"
        assert "answers 404" in refusal(find_endpoint, endpoint.url, None, None)


def test_a_command_line_that_cannot_be_meant_says_why(tmp_path):
    assert "expected one ENV, one RUN or TOML files" in refusal(read_envs, ["a", "b"], [], {}, {})
    assert "expected one ENV, one RUN or TOML files" in refusal(
        read_envs, ["a"], ["--bogus", "3"], {}, {}
    )
    assert "expected one ENV, one RUN or TOML files" in refusal(read_envs, [], [], {}, {})
    empty = tmp_path / "run.toml"
    empty.write_text("seed = 1\n")
    assert "no table [[orchestrator.eval.env]]" in refusal(read_envs, [str(empty)], [], {}, {})
    empty.write_text("[orchestrator.evals]\n")
    assert "evals" in refusal(read_envs, [str(empty)], [], {}, {})
    assert "num_examples" in refusal(read_envs, ["a"], [], {"num_examples": 0}, {})
    known = read_envs(["a"], [], {"num_examples": None, "args": {"x": 1}}, {"temperature": 0.0})
    assert known.env[0].args == {"x": 1} and known.env[0].num_examples == 64
    assert known.env[0].sampling.temperature == 0.0


def test_an_endpoint_that_takes_no_tokens_is_refused_for_a_run(tmp_path):
    run_dir = make_run(tmp_path)
    with (
        served(exact) as endpoint,
        pytest.raises(ConfigError, match=r"POST .*/inference/v1/generate answers 404"),
    ):
        command(endpoint, tmp_path / "out", what=[str(run_dir)])
    for file in (run_dir / "model").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer in .*weights nor in .*model"):
        run_renderer(run_dir)


def test_envs_that_are_not_there_or_share_a_name_are_refused(tmp_path):
    with served(exact) as endpoint:
        with pytest.raises(ConfigError, match=r"no taskset 'reverse-tex'.*Did you mean"):
            command(endpoint, tmp_path, what=["reverse-tex"])
        twice = tmp_path / "twice.toml"
        twice.write_text('[[orchestrator.eval.env]]\nid = "reverse-text"\n' * 2)
        with pytest.raises(ConfigError, match="2 envs are called 'reverse-text'"):
            command(endpoint, tmp_path, what=[str(twice)])
        with pytest.raises(ConfigError, match="--env-args: not JSON"):
            command(endpoint, tmp_path, "--env-args", "{")
        with pytest.raises(ConfigError, match="args"):
            command(endpoint, tmp_path / "x", "--env-args", '{"no_such": 1}')
    assert endpoint.bodies == []
