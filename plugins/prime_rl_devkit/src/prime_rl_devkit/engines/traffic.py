"""Checks of concurrent requests, of disconnecting clients, of metrics and of chat."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from prime_rl.proxies import is_loopback
from prime_rl_devkit.engines.logprobs import same_choice
from prime_rl_devkit.engines.prompts import prompt_of
from prime_rl_devkit.engines.subject import GENERATE, EngineSubject
from prime_rl_devkit.verdicts import Broken

CROWD = 64


def concurrency(engine: EngineSubject) -> str:
    """64 concurrent requests get the same results as one at a time."""
    bodies = [_mixed(engine, number) for number in range(CROWD)]
    alone = engine.replies(bodies, at_once=1)
    together = engine.replies(bodies, at_once=CROWD)
    compared = [
        same_choice(engine, a.choices[0], b.choices[0])
        for a, b in zip(alone, together, strict=True)
    ]
    same = sum(equal for equal, _ in compared)
    gap = max(gap for _, gap in compared)
    if same < (CROWD if engine.exact else CROWD // 2) or gap > 2 * engine.bound:
        raise Broken(
            f"{same} of {CROWD} requests get the tokens they get alone, with logprobs up to "
            f"{gap:.3g} apart (at most {2 * engine.bound:g})"
        )

    return f"{same} of {CROWD} with the same tokens, logprobs up to {gap:.2g} apart"


def _mixed(engine: EngineSubject, number: int) -> dict[str, Any]:
    """Long and short prompts, some shared, with different sampling parameters."""
    ways: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 40},
    ]
    length = (1, 5, 18, 33)[number // 4 % 4]
    prompt = prompt_of(engine, length, number // 16)
    return engine.body(prompt, "same", max_tokens=3 + number % 6, seed=number, **ways[number % 4])


def abort(engine: EngineSubject) -> str:
    """A client that disconnects frees its place at once, and other requests continue
    undisturbed."""
    prompt = prompt_of(engine, 4)
    long = engine.max_model_len - len(prompt) - 1
    neighbour = engine.body(prompt, max_tokens=20, seed=1)
    alone = engine.replies([neighbour])[0].choices[0]
    before = engine.metric("generation_tokens")
    others = 8
    beside = asyncio.run(_leave(engine, neighbour, others=others, long=long))

    def idle() -> bool:
        engine.reply([1], max_tokens=1)  # some engines count only when they step
        return engine.metric("num_requests_running") == 0

    engine.wait(idle, "vllm:num_requests_running does not fall to 0 after the clients have gone")
    made = engine.metric("generation_tokens") - before
    if made >= others * long:
        raise Broken(
            f"{others} clients left their requests of {long} tokens, and the engine sampled "
            f"{made:.0f} tokens all the same. Watch for disconnects."
        )

    if same_choice(engine, alone, beside)[0] is False and engine.exact:
        raise Broken(f"a request beside them got {beside.token_ids}, and alone {alone.token_ids}")
    return f"{made:.0f} tokens sampled of {others * long}"


async def _leave(engine: EngineSubject, neighbour: dict[str, Any], others: int, long: int) -> Any:
    """Start ``others`` long requests, disconnect once they run, and return another request's
    reply."""
    from prime_rl_devkit.engines.replies import read_reply

    limits = httpx.Limits(max_connections=others + 2)
    options: dict[str, Any] = {"base_url": engine.url, "timeout": engine.timeout, "verify": False}
    options["trust_env"] = not is_loopback(engine.url)
    async with httpx.AsyncClient(limits=limits, **options) as http:
        bodies = [
            engine.body(prompt_of(engine, 4, i), max_tokens=long, seed=i) for i in range(others)
        ]
        key = engine.headers()
        posts = [
            asyncio.create_task(http.post(GENERATE, json=body, headers=key)) for body in bodies
        ]
        while engine.metric("num_requests_running") < 1 and not any(p.done() for p in posts):
            await asyncio.sleep(0.002)
        beside = asyncio.create_task(http.post(GENERATE, json=neighbour, headers=key))
        await asyncio.sleep(0.01)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)
        answer = await beside

    return read_reply(engine.ok(answer), neighbour).choices[0]


GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = ("prompt_tokens", "generation_tokens")


def metrics(engine: EngineSubject) -> None:
    """``/metrics`` is in Prometheus' text format with vLLM's names, and counts the sampled
    tokens."""
    page = engine.page()
    for names, table, kind in (
        (GAUGES, page.gauges, "gauge"),
        (COUNTERS, page.counters, "counter"),
    ):
        for name in names:
            if name not in table:
                raise Broken(
                    f"/metrics has no {kind} vllm:{name}; its {kind}s: {', '.join(sorted(table))}"
                )

    before = {name: engine.metric(name) for name in COUNTERS}
    engine.replies([engine.body(prompt_of(engine, 6, i), max_tokens=5) for i in range(3)])
    expected = {"prompt_tokens": 18.0, "generation_tokens": 15.0}

    def counted() -> bool:
        return all(engine.metric(name) - before[name] >= expected[name] for name in COUNTERS)

    engine.wait(counted, f"after 3 requests the counters have not grown by {expected}", 5.0)
    grown = {name: engine.metric(name) - before[name] for name in COUNTERS}
    if grown != expected:
        raise Broken(f"3 requests have made the counters grow by {grown}, expected {expected}")


def chat(engine: EngineSubject) -> None:
    """``/v1/chat/completions`` answers in OpenAI's format, by the folder's chat template."""
    engine.need("chat")
    asked = [{"role": "user", "content": "ab"}]
    body = {"model": engine.model, "messages": asked, "max_tokens": 4, "seed": 1, "logprobs": True}
    answer = engine.http.post("/v1/chat/completions", json=body, headers=engine.headers())
    choice = engine.ok(answer)["choices"][0]
    entries = (choice.get("logprobs") or {}).get("content") or []
    if not isinstance(choice.get("message", {}).get("content"), str) or not entries:
        raise Broken(f"the reply's choice is {choice}, expected message.content and logprobs")
    if not all(-1e9 < entry["logprob"] <= 1e-4 for entry in entries):
        raise Broken(f"logprobs of the reply are {entries}, expected finite numbers, at most 0")
