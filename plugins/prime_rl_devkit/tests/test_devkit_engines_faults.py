"""Every check of the engine suite can fail: a proxy before a sound engine does one thing wrong."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_proxy import GENERATE, Answer, Fault, Proxy, asking, sampling, telling

from prime_rl_broadcast.connection import Member
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_devkit.engines import CHECKS, EngineSubject, run_check
from prime_rl_devkit.engines.checkpoints import read, write
from prime_rl_devkit.engines.prompts import prompt_of
from prime_rl_devkit.engines.reference import distribution
from prime_rl_devkit.engines.replies import read_reply
from prime_rl_devkit.verdicts import Broken

Body = dict[str, Any]


def entries(reply: Body) -> list[Body]:
    return [entry for choice in reply["choices"] for entry in choice["logprobs"]["content"]]


def put(entry: Body, token: int, logprob: float) -> None:
    entry |= {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}


# -- routes -----------------------------------------------------------------------------


class ForgetsLength(Fault):
    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            del said["data"][0]["max_model_len"]
        return status, said


class OldVersion(Fault):
    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        return status, said | {"version": None} if path == "/health" else said


class SaysDetail(Fault):
    """FastAPI's own shape."""

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        return status, said if status < 400 else {"detail": said["error"]["message"]}


class Crashes(Fault):
    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        return 500 if status == 400 else status, said


class SaysNothing(Fault):
    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        return status, said if status < 400 else {"error": {"message": "bad request"}}


class LendsKeys(Fault):
    def __init__(self, key: str) -> None:
        self.key = key

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        headers["authorization"] = f"Bearer {self.key}"
        return body


def cuts_prompts(body: Body) -> None:
    body["token_ids"] = body["token_ids"][-500:]


def sixteen_by_default(params: Body) -> None:
    params.setdefault("max_tokens", 16)
    params["max_tokens"] = max(1, params["max_tokens"])


# -- sampling ---------------------------------------------------------------------------


def one_token_less(params: Body) -> None:
    params["max_tokens"] = max(1, params["max_tokens"] - 1)


def drops_stop_token(asked: Body, reply: Body) -> None:
    for choice in reply["choices"]:
        if choice["finish_reason"] == "stop":
            choice["token_ids"].pop()
            choice["logprobs"]["content"].pop()
            choice["weight_versions"][-1]["end"] -= 1
            reply["usage"]["completion_tokens"] -= 1


def without(*keys: str) -> type[Fault]:
    return sampling(lambda params: [params.pop(key, None) for key in keys])


def with_(**params: Any) -> type[Fault]:
    return sampling(lambda found: found.update(params))


class SeedsByArrival(sampling(lambda params: None)):  # type: ignore[misc]
    def __init__(self) -> None:
        self.count = itertools.count()

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == GENERATE:
            body["sampling_params"]["seed"] = next(self.count)
        return body


def repeats_the_first(asked: Body, reply: Body) -> None:
    first = reply["choices"][0]
    reply["choices"] = [first | {"index": i} for i in range(len(reply["choices"]))]


def greedy_is_certain(asked: Body, reply: Body) -> None:
    for entry in entries(reply):
        entry["logprob"] = 0.0


# -- logprobs ---------------------------------------------------------------------------


class RawLogprobs(Fault):
    """vLLM's default: before temperature and truncation."""

    def __init__(self, engine: EngineSubject) -> None:
        self.reference = engine.reference()

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == GENERATE and status == 200:
            row = self.reference.logits(asked["token_ids"])[-1].log_softmax(-1).tolist()
            for entry in entries(said):
                entry["logprob"] = row[entry["token_id"]]
        return status, said


class FavoursOne(Fault):
    """Every fourth sample is the most likely token, with its right logprob."""

    def __init__(self, engine: EngineSubject) -> None:
        self.reference = engine.reference()

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == GENERATE and status == 200:
            row = self.reference.logits(asked["token_ids"])[-1:]
            logprobs = distribution(row, asked["sampling_params"])[0]
            best = int(logprobs.argmax())
            for choice in said["choices"][::4]:
                choice["token_ids"] = [best]
                put(choice["logprobs"]["content"][0], best, float(logprobs[best]))
        return status, said


def shifted(by: float) -> type[Fault]:
    def shift(asked: Body, reply: Body) -> None:
        for entry in entries(reply):
            entry["logprob"] -= by

    return telling(shift)


def hides_the_likeliest(asked: Body, reply: Body) -> None:
    for entry in entries(reply):
        tops = entry["top_logprobs"]
        tops.remove(max(tops, key=lambda top: top["logprob"]))
        tops.append(tops[0])


def tempered_scores(asked: Body, reply: Body) -> None:
    for row in reply["prompt_logprobs"] or []:
        for score in (row or {}).values():
            score["logprob"] *= 0.5


def offers_twenty(asked: Body, reply: Body) -> None:
    for row in reply["prompt_logprobs"] or []:
        for token in list(row or ())[20:]:
            del row[token]


def hides_the_likeliest_score(asked: Body, reply: Body) -> None:
    for row in reply["prompt_logprobs"] or []:
        others = list(row or ())[1:]
        if len(others) > 1:
            row["0"] = row.pop(max(others, key=lambda token: row[token]["logprob"]))


# -- traffic ----------------------------------------------------------------------------


class CrowdsDisturb(Fault):
    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == GENERATE and self.proxy.in_flight > 8:
            for entry in entries(said):
                entry["logprob"] -= 0.01
        return status, said


class Renames(Fault):
    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == "/metrics":
            said = said.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        return status, said


class CountsTwice(Fault):
    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == "/metrics":
            line = re.search(r"vllm:generation_tokens_total\{.*", said)
            assert line
            said = said.replace(line[0], f"{line[0]}\n{line[0]}")
        return status, said


class Gone(Fault):
    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path in self.paths:
            raise Answer(404, {"error": {"message": "no such route"}})
        return body


# -- weights ----------------------------------------------------------------------------


class Idle(Fault):
    """Says that it has done it."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path in self.paths:
            raise Answer(200, {"status": "ok"})
        return body


class LeavesBehind(Fault):
    """One tensor of every update stays what it was."""

    def __init__(self, engine: EngineSubject, part: str) -> None:
        self.engine, self.part = engine, part
        self.old = read(engine.model_folder)

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == "/update_weights" and "changed" in body["weight_dir"]:
            source = Path(body["weight_dir"])
            target = source.with_name(f"{source.name}-stale")
            shutil.rmtree(target, ignore_errors=True)
            tensors = read(source)
            (name,) = [name for name in tensors if self.part in name]
            write(source, target, tensors | {name: self.old[name]})
            return body | {"weight_dir": str(target)}
        return body


class TakesAnything(Fault):
    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        return (200, {"status": "ok"}) if path == "/update_weights" else (status, said)


class AttendsAndForgets(Fault):
    """Takes a broadcast with the version it has, so that nothing is new."""

    def __init__(self, engine: EngineSubject) -> None:
        self.folder = engine.model_folder

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path != "/update_weights" or "meeting" not in body:
            return body
        meeting = msgspec.convert(body["meeting"], BroadcastGroup)
        with Member().join(meeting, torch.device("cpu")) as group:
            group.receive(lambda header: None, lambda stream: None)
        return {"weight_dir": str(self.folder), "version": body["version"]}


class TakesHalf(Fault):
    """Refuses a damaged folder, and serves something else than before all the same."""

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == "/update_weights" and "damaged" in body["weight_dir"]:
            sound = sorted(Path(body["weight_dir"]).parent.glob("*-changed-3"))[-1]
            return body | {"weight_dir": str(sound), "version": body["version"] - 1}
        return body

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == "/update_weights" and "damaged" in asked["weight_dir"]:
            return 400, {"error": {"message": "broken"}}
        return status, said


def one_version(asked: Body, reply: Body) -> None:
    for choice in reply["choices"]:
        last = choice["weight_versions"][-1]
        choice["weight_versions"] = [last | {"start": 0}]


class RecomputesKV(Fault):
    """The logprobs after an update are those of the new weights over their own KV."""

    def __init__(self, engine: EngineSubject) -> None:
        self.engine = engine
        self.folder = engine.model_folder

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == "/update_weights":
            self.folder = Path(body["weight_dir"])
        return body

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == GENERATE and status == 200:
            for choice in said["choices"]:
                swap = choice["weight_versions"][0]["end"]
                ids = [*asked["token_ids"], *choice["token_ids"]]
                rows = self.engine.reference(self.folder).logits(ids)
                logprobs = rows[len(asked["token_ids"]) - 1 : -1].log_softmax(-1)
                for i, token in enumerate(choice["token_ids"][swap:], start=swap):
                    put(choice["logprobs"]["content"][i], token, float(logprobs[i, token]))
        return status, said


class ReusesOldKV(Fault):
    """Under the new salt too, the prompt's KV is of the first weights."""

    def __init__(self, engine: EngineSubject) -> None:
        self.engine = engine

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == "/update_weights":
            self.folder = Path(body["weight_dir"])
        return body

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == GENERATE and asked.get("cache_salt") == "b":
            prompt, (choice,) = asked["token_ids"], said["choices"]
            new, old = self.engine.reference(self.folder), self.engine.reference()
            every = [*prompt, *choice["token_ids"]]
            rows = new.logits_after(old, every, len(prompt) - 1)[:-1].log_softmax(-1)
            for i, token in enumerate(choice["token_ids"]):
                put(choice["logprobs"]["content"][i], token, float(rows[i, token]))
        return status, said


class ForgetsAdapters(Fault):
    def __init__(self, engine: EngineSubject) -> None:
        self.engine = engine

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        if path == "/update_weights":
            return body | {"weight_dir": str(self.engine.model_folder)}
        return body


class WakesRunning(Fault):
    """Waking up lets requests go on."""

    def __init__(self, engine: EngineSubject) -> None:
        self.engine = engine

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        if path == "/wake_up":
            self.engine.http.post("/resume", headers=self.engine.headers(admin=True))
        return status, said


# check, fault (made of the sound engine and the proxy), what the failure says
FAULTS: list[tuple[str, Any, str]] = [
    ("alive", lambda e, p: ForgetsLength(), r'expected \{"data": .*max_model_len'),
    ("alive", lambda e, p: OldVersion(), "/health answers .* expected"),
    ("reply_shape", lambda e, p: with_(max_tokens=3)(), "max_tokens is 4"),
    ("reply_shape", lambda e, p: with_(logprobs=1)(), "without a request"),
    ("bad_requests", lambda e, p: SaysDetail(), r'expected \{"error"'),
    ("bad_requests", lambda e, p: Crashes(), "answers 500 .* expected 400"),
    ("bad_requests", lambda e, p: SaysNothing(), "the reason should name 'token_ids'"),
    ("overlong_prompt", lambda e, p: asking(cuts_prompts)(), "answers 200 .* expected 400"),
    (
        "overlong_prompt",
        lambda e, p: sampling(sixteen_by_default)(),
        "16 tokens and 'length', expected 40",
    ),
    ("admin_key", lambda e, p: LendsKeys(e.admin_key), "/pause with no key answers 200"),
    ("sampling_key", lambda e, p: LendsKeys(e.api_key), "with no key answers 200"),
    ("max_tokens", lambda e, p: sampling(one_token_less)(), "max_tokens 2 gives 1 tokens"),
    ("stop_tokens", lambda e, p: telling(drops_stop_token)(), "stop token .* is missing"),
    ("stop_tokens", lambda e, p: without("stop_token_ids")(), "is the first that stops"),
    ("end_of_sequence", lambda e, p: with_(ignore_eos=True)(), "the model's eos: .* 'length'"),
    ("min_tokens", lambda e, p: without("min_tokens")(), "min_tokens 6 with the stop tokens"),
    ("greedy", lambda e, p: with_(temperature=1.5)(), "nats from the most likely"),
    ("greedy", lambda e, p: telling(greedy_is_certain)(), "greedy logprob differs by"),
    ("seeds", lambda e, p: SeedsByArrival(), "of 16 seeded requests"),
    ("seeds", lambda e, p: with_(seed=0, temperature=0.0)(), "all give"),
    ("choices", lambda e, p: telling(repeats_the_first)(), "n=4 with seed 40 gives"),
    ("nothing_ignored", lambda e, p: without("allowed_token_ids")(), "Obey it, or answer 400"),
    ("sampled_distribution", lambda e, p: RawLogprobs(e), "temperature and truncation"),
    ("sampled_distribution", lambda e, p: FavoursOne(e), "standard deviations from the reported"),
    ("sampled_distribution", lambda e, p: without("top_p")(), "'top_p': 0.9}: a token that is cut"),
    (
        "sampled_distribution",
        lambda e, p: without("min_p")(),
        "'min_p': 0.02}: a token that is cut",
    ),
    ("generated_logprobs", lambda e, p: shifted(2e-3)(), r"differs by 0\.002 from transformers'"),
    ("alternatives", lambda e, p: telling(hides_the_likeliest)(), "top_logprobs of token 0"),
    ("prompt_logprobs", lambda e, p: telling(tempered_scores)(), "prompt_logprobs of 2 tokens"),
    ("prompt_logprobs", lambda e, p: without("prompt_logprobs")(), "is answered with null"),
    ("prompt_logprobs", lambda e, p: telling(offers_twenty)(), "place 1 has 20 tokens"),
    ("prompt_logprobs", lambda e, p: telling(hides_the_likeliest_score)(), "prompt_logprobs 3"),
    ("concurrency", lambda e, p: CrowdsDisturb(p), r"logprobs up to 0\.01 apart"),
    ("abort", lambda e, p: Fault(), "Watch for disconnects"),  # the proxy does not
    ("metrics", lambda e, p: Renames(), "no gauge vllm:kv_cache_usage_perc"),
    ("metrics", lambda e, p: CountsTwice(), r"'generation_tokens': 30\.0"),
    ("chat", lambda e, p: Gone("/v1/chat/completions"), "answers 404"),
    ("weight_update", lambda e, p: Idle("/update_weights"), "/health says version"),
    ("weight_update", lambda e, p: LeavesBehind(e, "embed_tokens"), "after an update: logprobs"),
    ("weight_update", lambda e, p: LeavesBehind(e, "1.self_attn.k_norm"), "logprobs differ by"),
    ("damaged_weights", lambda e, p: TakesAnything(), "with a truncated file answers 200"),
    ("damaged_weights", lambda e, p: TakesHalf(), "a truncated file was refused: logprobs differ"),
    ("pause", lambda e, p: Idle("/pause"), "while paused|ended under /pause"),
    ("in_flight", lambda e, p: telling(one_version)(), "lived through the update"),
    ("in_flight", lambda e, p: RecomputesKV(e), "The KV was computed again"),
    ("cache_salt", lambda e, p: ReusesOldKV(e), "old KV was used"),
    ("adapter", lambda e, p: ForgetsAdapters(e), "with an adapter, update 1 of 2: logprobs"),
    ("broadcast", lambda e, p: AttendsAndForgets(e), "after a broadcast: logprobs differ by"),
    (
        "refused_broadcast",
        lambda e, p: AttendsAndForgets(e),
        "/update_weights with a broadcast with a missing tensor answers 200",
    ),
    ("sleep", lambda e, p: Gone("/sleep"), "/sleep answers 404"),
    ("sleep", lambda e, p: WakesRunning(e), "between /sleep and /resume"),
    ("sleeping_update", lambda e, p: Idle("/update_weights"), "after an update of a sleeping"),
]


@pytest.mark.parametrize(
    ("check", "make", "says"), FAULTS, ids=[f"{check}-{i}" for i, (check, *_) in enumerate(FAULTS)]
)
def test_an_engine_with_one_fault_fails_that_check(
    engine: EngineSubject, faulty: EngineSubject, proxy: Proxy, check: str, make: Any, says: str
) -> None:
    proxy.fault = make(engine, proxy)
    outcome = run_check(faulty, check)
    assert outcome.status == "failed", outcome
    assert re.search(says, outcome.message, re.DOTALL), outcome.message


def test_a_key_on_the_command_line_is_seen(faulty: EngineSubject) -> None:
    faulty.argv = ["serve", f"--key={faulty.admin_key}"]
    outcome = run_check(faulty, "command_line")
    assert outcome.status == "failed" and "EngineCommand.env" in outcome.message


def test_a_server_that_dies_of_sigterm_is_seen(faulty: EngineSubject) -> None:
    faulty.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    outcome = run_check(faulty, "ends_on_sigterm")
    assert outcome.status == "failed" and "ends with code -15, expected 0" in outcome.message


def test_every_check_can_fail() -> None:
    elsewhere = {"command_line", "ends_on_sigterm"}
    assert {check for check, _, _ in FAULTS} | elsewhere == set(CHECKS)


def test_an_engine_that_cannot_load_its_first_weights_again_fails(
    engine: EngineSubject, faulty: EngineSubject, proxy: Proxy
) -> None:
    class Refuses(Fault):
        count = 0

        def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
            self.count += path == "/update_weights"
            if self.count > 2:
                raise Answer(500, {"error": {"message": "no memory"}})
            return body

    proxy.fault = Refuses()
    outcome = run_check(faulty, "weight_update")
    assert outcome.status == "failed" and "cannot load its first weights again" in outcome.message


# -- replies ----------------------------------------------------------------------------

ASKED = {"token_ids": [5, 6], "sampling_params": {"logprobs": 1}}


def reply(**changes: Any) -> Body:
    choice = {
        "index": 0,
        "token_ids": [7],
        "finish_reason": "length",
        "stop_reason": None,
        "logprobs": {"content": [{"token": "token_id:7", "token_id": 7, "logprob": -0.5}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    return {"choices": [choice | changes], "usage": usage, "prompt_logprobs": None}


def logprob(value: Any, token: str = "token_id:7") -> Body:
    return {"logprobs": {"content": [{"token": token, "logprob": value}]}}


def test_a_valid_reply_is_read() -> None:
    (choice,) = read_reply(reply(), ASKED).choices
    assert (choice.token_ids, choice.logprobs, choice.versions) == ([7], [-0.5], [("3", 0, 1)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_ids": None}, "token_ids is None, expected a list"),
        ({"finish_reason": "abort"}, "expected 'stop' or 'length'"),
        ({"index": 1}, "index is 1"),
        ({"logprobs": {"content": []}}, "1 tokens and 0 logprobs"),
        (logprob(-0.5, "leaf"), "expected 'token_id:7'"),
        (logprob(-9999.0), "expected a finite number"),
        (logprob(math.nan), "expected a finite number"),
        (logprob(0.5), "at most 0"),
        ({"weight_versions": None}, "weight_versions is None"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 0}]}, "without gaps"),
        ({"weight_versions": [{"start": 0}]}, "expected spans"),
        ({"token_ids": [7, 8]}, "2 tokens and 1 logprobs"),
    ],
)
def test_an_invalid_reply_is_refused(changes: Body, says: str) -> None:
    with pytest.raises(Broken, match=re.escape(says)):
        read_reply(reply(**changes), ASKED)


def test_prompt_logprobs_begin_with_null_and_the_prompts_own_token() -> None:
    sound = reply() | {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}]}
    assert read_reply(sound, ASKED).prompt_logprobs == [{6: -1.0}]
    for scores, says in (
        ([None], "expected one for each of 2"),
        ([{"5": {"logprob": 0.0}}] * 2, "expected null"),
        ([None, {"9": {"logprob": -1.0}}], "the prompt's own token '6'"),
    ):
        with pytest.raises(Broken, match=says):
            read_reply(reply() | {"prompt_logprobs": scores}, ASKED)


def test_prompts_are_ordinary_tokens_and_the_same_in_every_run(engine: EngineSubject) -> None:
    assert prompt_of(engine, 4) == prompt_of(engine, 4) != prompt_of(engine, 4, 1)
    assert all(10 <= token < 256 for token in prompt_of(engine, 100))
