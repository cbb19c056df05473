"""The server of the page: who may read it, what it answers, and that it waits for news."""

import json
import re
import socket
import threading
from contextlib import ExitStack
from urllib.parse import quote

import httpx
import pytest
from report_runs import make_run
from waiting import eventually

from prime_rl.errors import ConfigError
from prime_rl_app.saved_rollouts import read_step, step_files
from prime_rl_tools.watch import server as watch_server
from prime_rl_tools.watch.server import Server, Watched


@pytest.fixture
def run_dir(tmp_path):
    make_run(tmp_path / "run", "centred")
    return tmp_path / "run"


@pytest.fixture
def server(run_dir):
    server = Server(Watched([run_dir]))
    server.start()
    yield server
    server.close()


def get(url, **headers):
    answer = httpx.get(url, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text, answer.headers


def facts(server, *have):
    return json.loads(get(f"{server.url}facts?have={quote(json.dumps(have))}")[0])


def test_only_the_token_and_this_machines_names_open_it(server):
    page, headers = get(server.url)
    assert re.match(r"http://127\.0\.0\.1:\d+/[\w-]{22}/$", server.url)
    assert "connect-src 'self'" in page and "{{" not in page
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    root = f"http://127.0.0.1:{server.server_port}/"
    names = ("chunk-99", "chunk-x", "../x", "facts?have=%7B")
    for url in (root, f"{root}wrong/", f"{root}wrong/facts", *(server.url + n for n in names)):
        assert httpx.get(url).status_code == 404
    elsewhere = {"Host": f"evil.example:{server.server_port}"}
    assert httpx.get(server.url, headers=elsewhere).status_code == 404


def test_a_page_gets_everything_once_then_what_is_new_then_all_of_a_resumed_run(server, run_dir):
    (all_of_it,) = facts(server)
    rows = all_of_it["table"]["columns"]["step"]
    assert len(rows) == sum(len(read_step(path).rollouts) for path in step_files(run_dir).values())
    chunk = json.loads(get(f"{server.url}chunk-0")[0])
    first = read_step(step_files(run_dir)[1]).rollouts[0].rollout
    assert chunk[0]["samples"][0]["ids"] == first.samples[0].token_ids.tolist()

    waiting = threading.Thread(target=lambda: found.extend(facts(server, all_of_it["has"])))
    found = []
    waiting.start()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss/rl": 0.5}\n')
    waiting.join(60)
    assert found[0]["curves"] == {"loss/rl": [[1, 0.5]]} and found[0]["reset"] is False
    assert found[0]["table"]["columns"]["step"] == []

    step_files(run_dir)[3].unlink()  # --resume from step 2
    (reset,) = facts(server, found[0]["has"])
    assert reset["reset"] is True and set(reset["table"]["columns"]["step"]) == {1, 2}


def test_the_frozen_page_is_one_file(server):
    page, headers = get(f"{server.url}report.html")
    assert headers["Content-Disposition"] == 'attachment; filename="run.html"'
    assert 'id="facts"' in page and "fetch(" not in page


def test_a_port_that_is_taken_is_named(server, run_dir):
    with pytest.raises(ConfigError, match=f"--port {server.server_port}: "):
        Server(Watched([run_dir]), server.server_port)


def threads_of(server):
    return [each for each in threading.enumerate() if "process_request_thread" in each.name]


def test_a_request_that_never_ends_frees_its_thread(run_dir, monkeypatch):
    monkeypatch.setattr(watch_server._Handler, "timeout", 0.05)
    server = Server(Watched([run_dir]))
    server.start()
    before = len(threads_of(server))
    with ExitStack() as stack:
        for text in (b"", b"GET /", b"GET / HTTP/1.1\r\nHost: a"):
            half = stack.enter_context(socket.create_connection(server.server_address))
            half.sendall(text)
            assert half.recv(1) == b""  # the server has closed it
        eventually(lambda: len(threads_of(server)) <= before)
        assert get(server.url)
    server.close()


def test_more_connections_than_there_is_room_for_are_closed_at_once(run_dir, monkeypatch):
    monkeypatch.setattr(watch_server, "MOST_CONNECTIONS", 2)
    server = Server(Watched([run_dir]))
    server.start()
    with ExitStack() as stack:
        halves = [socket.create_connection(server.server_address) for _ in range(2)]
        for half in halves:
            stack.enter_context(half).sendall(b"GET /")
        eventually(lambda: not server._room._value)
        third = stack.enter_context(socket.create_connection(server.server_address))
        assert third.recv(1) == b""
    eventually(lambda: server._room._value == 2)
    assert get(server.url)
    server.close()


def test_every_answer_has_a_policy_that_loads_nothing_from_elsewhere(server):
    for url in (server.url, f"{server.url}report.html", f"{server.url}chunk-99"):
        policy = httpx.get(url).headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ") and "frame-ancestors 'none'" in policy
        assert "http" not in policy and "*" not in policy
