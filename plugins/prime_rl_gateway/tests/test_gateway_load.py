"""Five hundred sessions at once, of clients that vanish, repeat, post twice or late, over loopback:
each rewarded session trains exactly once, also if the process ends in between."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest
from gateway_texts import END, text_of
from waiting import until

from prime_rl import SourceRequest

pytestmark = pytest.mark.slow

NUM_SESSIONS = 500
GROUP_SIZE = 4


def script(prompt: str) -> str:
    last = prompt.rpartition("<|im_start|>user\n")[2].partition(END)[0]
    return f"{last}!{END}"


async def patiently(ask: Any) -> httpx.Response:
    """The answer to a request that is repeated while the gateway says so."""
    while True:
        answer: httpx.Response = await ask()
        if answer.status_code not in (429, 503):
            return answer
        assert int(answer.headers["Retry-After"]) > 0
        await asyncio.sleep(0.25)


async def live(running: Any, number: int, kind: str, rewarded: dict[str, float]) -> None:
    """One client's session. ``rewarded`` gets what has been acknowledged."""
    rng = random.Random(number)
    asked = {"group": f"g{number // GROUP_SIZE}"}
    opened = {"Idempotency-Key": f"client {number}"}
    session: dict[str, Any] = {}
    for _ in range(2 if kind == "repeats" else 1):
        answer = await patiently(lambda: running.http.post("/sessions", json=asked, headers=opened))
        assert session.get("id") in (None, answer.json()["id"])
        session = answer.json()

    said: list[tuple[str, str]] = []
    for turn in range(rng.randint(1, 3)):
        said.append(("user", f"{number}.{turn}"))
        if kind == "vanishes" and turn == 0:
            asking = asyncio.create_task(running.chat(session, *said))
            await asyncio.sleep(rng.random() * 0.05)
            asking.cancel()
            return
        reply = (await running.chat(session, *said)).json()["choices"][0]["message"]["content"]
        assert reply == f"{number}.{turn}!"
        if kind == "repeats":
            body = [{"role": role, "content": text} for role, text in said]
            again = await running.http.post(
                f"/sessions/{session['id']}/v1/chat/completions",
                json={"model": "policy", "messages": body},
                headers={"x-stainless-retry-count": "1"},
            )
            assert again.json()["choices"][0]["message"]["content"] == reply
        said.append(("assistant", reply))
        if kind == "by turns":
            assert (await running.reward(session, turn=turn, reward=1.0)).status_code == 200

    if kind == "late":
        await asyncio.sleep(rng.random())
    if kind == "deletes":
        assert (await running.http.delete(f"/sessions/{session['id']}")).status_code == 200
        assert (await running.reward(session, reward=1.0)).status_code == 410
        return
    last = {"final": True} if kind == "by turns" else {"reward": float(number)}
    posts = [running.reward(session, **last) for _ in range(3 if kind == "twice" else 1)]
    for answer in await asyncio.gather(*posts):
        assert answer.status_code == 200
        rewarded[session["id"]] = answer.json()["reward"]


KINDS = ("plain", "vanishes", "repeats", "twice", "late", "by turns", "deletes")


async def test_five_hundred_clients_of_every_kind_train_what_they_rewarded_once(
    gateway: Any, tmp_path: Any
) -> None:
    rewarded: dict[str, float] = {}
    trained: Counter[str] = Counter()
    settings: dict[str, Any] = {
        "host": {"group_size": GROUP_SIZE},
        "group_timeout": 1e6,
        "max_waiting": 300,
    }
    samples = []

    async with gateway(script, **settings) as running:

        async def orchestrate() -> None:
            for group_id in range(10**9):
                rollouts = await running.source.group(SourceRequest(group_id, 0, 0))
                assert 1 < len(rollouts) <= GROUP_SIZE
                running.source.settled(rollouts, None)
                for rollout in rollouts:
                    trained[rollout.info["session"]] += 1
                    assert rollout.reward == rewarded.get(rollout.info["session"], rollout.reward)
                    samples.extend(rollout.samples)

        takers = [asyncio.create_task(orchestrate()) for _ in range(8)]
        clients = [
            live(running, number, KINDS[number % len(KINDS)], rewarded)
            for number in range(NUM_SESSIONS)
        ]
        await asyncio.gather(*clients)
        book = running.source.book
        await until(lambda: book.num_ready == 0)
        late = running.source._clock() + 2e6
        running.source._clock = lambda: late
        await until(lambda: all(each.is_open for each in book.sessions.values()))
        for task in takers:
            task.cancel()
        alone = {each.id for each in book.ended.values() if each.state == "alone"}
        assert book.requests.total() == 0
        vanished = sum(kind == "vanishes" for kind in kinds())
        await until(lambda: book.counts["expired"] == vanished)
        assert book.num_open == 0
        policy = running.policy

    assert set(trained.values()) == {1}
    assert set(trained) | alone == set(rewarded)
    assert len(rewarded) > 300
    assert len(trained) > 300

    known = Counter(tuple(reply) for _, reply, _ in policy.sampled)
    for sample in samples:
        mask = np.flatnonzero(sample.loss_mask)
        for part in np.split(mask, np.flatnonzero(np.diff(mask) > 1) + 1):
            reply = tuple(sample.token_ids[part].tolist())
            known[reply] -= 1
            assert known[reply] >= 0, text_of(reply)


def kinds() -> list[str]:
    return [KINDS[number % len(KINDS)] for number in range(NUM_SESSIONS)]


async def test_a_process_that_ends_in_the_middle_loses_and_repeats_nothing(
    gateway: Any, tmp_path: Any
) -> None:
    """Clients go on while the gateway is away. What a checkpoint had taken is not given again."""
    rewarded: set[str] = set()
    checkpointed: list[str] = []
    given_after: list[str] = []
    sessions: list[dict[str, Any]] = []

    async with gateway(script) as running:
        sessions += await asyncio.gather(*(running.open() for _ in range(60)))
        for session in sessions[:40]:
            await running.say(session, ("user", session["id"]))
        for session in sessions[:30]:
            assert (await running.reward(session, reward=1.0)).status_code == 200
            rewarded.add(session["id"])
        for _ in range(10):
            running.source.settled(group := await running.group(), None)
            checkpointed += [rollout.info["session"] for rollout in group]
        running.source.save(tmp_path)
        for _ in range(5):  # scored after the checkpoint: the run that continues has not seen them
            running.source.settled(await running.group(), None)
        await running.group()  # and one on its way

    async with gateway(script, load=tmp_path) as running:
        for session in sessions[:30]:
            answer = await running.reward(session, reward=1.0)
            assert answer.json()["repeated"]
        for session in sessions[30:]:
            await running.say(session, ("user", "again"))
            assert (await running.reward(session, reward=1.0)).status_code == 200
            rewarded.add(session["id"])
        for _ in range(50):
            given_after += [rollout.info["session"] for rollout in await running.group()]
        assert running.source.book.num_waiting == 0

    assert len(given_after) == len({*given_after})
    assert {*given_after} | {*checkpointed} == rewarded
    assert {*given_after}.isdisjoint(checkpointed)
