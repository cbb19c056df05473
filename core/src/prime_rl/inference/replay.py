"""A branch of a rollout: its episode runs again, with the replies that are recorded up to a token.

    env -> request -> the prompt is on a recorded path, before its end   -> the recorded reply
                      the prompt reaches the end of the recorded part    -> the engine, from now on
                      neither                                            -> 409: it went another way

An environment cannot be copied in the middle of an episode. It is played again from its start: its
tools run again, its state is built again, and only the model's part comes from the record. So it
works for every harness, in environment workers too: ``ReplayServer`` stands in the place of an
engine on loopback, and a request names its branch by its ``cache_salt``.

Shapes: T = tokens of a path.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from prime_rl.streams import BoolColumn, FloatColumn, IntColumn

ROUTE = "/inference/v1/generate"
OTHER_WAY = 409
"""Status of a request that is on no recorded path. Not retried."""
LARGEST_REQUEST = 1 << 28
"""Bytes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedPath:
    """A token sequence of a rollout, and which of its tokens were sampled."""

    token_ids: IntColumn
    """[T]"""
    sampled: BoolColumn
    """[T]"""
    logprobs: FloatColumn
    """[T] log μ of sampled tokens."""
    starts: BoolColumn
    """[T] where a sampled token is the first of its reply."""
    policy_versions: IntColumn | None
    """[T]; -1: unknown."""
    end: int
    """Tokens that are recorded; what follows is not used."""

    def reply(self, start: int) -> slice:
        """The tokens of the reply that begins at ``start``, as far as they are recorded."""
        stop = start + 1
        while stop < self.end and self.sampled[stop] and not self.starts[stop]:
            stop += 1
        return slice(start, stop)


@dataclass(eq=False, kw_only=True)
class Branch:
    """One episode that runs again."""

    paths: Sequence[RecordedPath]
    """The first is the path to the end of the recorded part."""
    may_go_on: bool
    """Whether the policy may sample once the record ends."""
    cuts_reply: bool
    """Whether the record ends inside a reply of the first path."""
    stop_token_ids: frozenset[int]
    cache_salt: str
    """The salt of requests that reach the engine."""
    engine: str = ""
    """Its address, without ``/v1``."""
    is_live: bool = False
    """The record has ended."""
    fault: str | None = None
    """Why a request was refused."""
    replayed: list[tuple[list[int], int]] = field(default_factory=list)
    """Tokens up to the end of each reply that came from the record, and where it begins."""

    def restart(self, engine: str) -> None:
        """The episode begins."""
        self.engine = engine
        self.is_live = False
        self.fault = None
        self.replayed.clear()

    def recorded(self, prompt: Sequence[int]) -> tuple[RecordedPath, slice] | None:
        """The reply to ``prompt`` that is recorded. None: there is none."""
        length = len(prompt)

        for path in self.paths:
            if (
                length < path.end
                and path.sampled[length]
                and np.array_equal(path.token_ids[:length], prompt)
            ):
                return path, path.reply(length)
        return None

    def reaches_end(self, prompt: Sequence[int]) -> bool:
        """Whether ``prompt`` has all that is recorded of the first path."""
        path = self.paths[0]
        return len(prompt) >= path.end and np.array_equal(
            path.token_ids[: path.end], prompt[: path.end]
        )

    def refuse(self, prompt: Sequence[int]) -> str:
        """Why ``prompt`` can neither be answered nor passed on."""
        if self.reaches_end(prompt):
            return f"the episode goes on after the {self.paths[0].end} tokens of the sample"
        known = self.paths[0].token_ids[: min(len(prompt), self.paths[0].end)]
        differs = np.flatnonzero(known != np.asarray(prompt[: len(known)]))
        place = int(differs[0]) if differs.size else len(known)
        return (
            f"the environment went another way than before: prompt token {place} differs. A branch "
            "needs an environment whose tools and users answer alike when they are asked again"
        )


class ReplayServer:
    """Answers as an engine for the episodes of branches."""

    def __init__(self) -> None:
        self.url = ""
        """Ends in ``/v1``."""
        self._branches: dict[str, Branch] = {}
        self._runner: web.AppRunner | None = None
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=LARGEST_REQUEST)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post(ROUTE, self._generate)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

        limits = aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        """Stop listening."""
        if self._http is not None:
            await self._http.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def add(self, branch: Branch) -> str:
        """Register a branch. Returns the ``cache_salt`` of its requests: 128 random bits."""
        key = f"branch {secrets.token_hex(16)}"
        self._branches[key] = branch
        return key

    def remove(self, key: str) -> None:
        """Forget it."""
        del self._branches[key]

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """No card: a limit of the context is the engine's own, which refuses what is too long."""
        return web.json_response({"data": []})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = msgspec.json.decode(await request.read())
        branch = self._branches.get(str(body.get("cache_salt")))
        if branch is None:
            return web.json_response({"error": "no such branch"}, status=404)

        prompt = [int(token) for token in body["token_ids"]]
        if branch.is_live:
            return await self._forward(request, branch, body)

        if branch.reaches_end(prompt) and branch.may_go_on:
            branch.is_live = True
            return await self._forward(request, branch, body)

        recorded = None if branch.reaches_end(prompt) else branch.recorded(prompt)
        if recorded is not None:
            path, reply = recorded
            is_cut = branch.cuts_reply and path is branch.paths[0] and reply.stop == path.end
            if is_cut and branch.may_go_on:
                branch.is_live = True
                return await self._continue(request, branch, body=body, path=path, reply=reply)
            branch.replayed.append((path.token_ids[: reply.stop].tolist(), reply.start))
            return web.json_response(_answer(path, reply, branch.stop_token_ids))

        branch.fault = branch.refuse(prompt)
        return web.json_response({"error": branch.fault}, status=OTHER_WAY)

    async def _forward(
        self, request: web.Request, branch: Branch, body: dict[str, Any]
    ) -> web.Response:
        """Ask the engine."""
        assert self._http is not None
        headers = {"Content-Type": "application/json"}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        # The request's salt names its branch. The engine needs the salt of its own cache.
        content = msgspec.json.encode({**body, "cache_salt": branch.cache_salt})

        try:
            async with self._http.post(
                f"{branch.engine}{ROUTE}", data=content, headers=headers
            ) as answer:
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    content_type="application/json",
                )
        except aiohttp.ClientError as error:
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=503)

    async def _continue(
        self,
        request: web.Request,
        branch: Branch,
        body: dict[str, Any],
        path: RecordedPath,
        reply: slice,
    ) -> web.Response:
        """A reply whose first tokens are recorded: the engine samples the others."""
        first = path.token_ids[reply].tolist()
        settings = dict(body["sampling_params"])
        branch.replayed.append((path.token_ids[: reply.stop].tolist(), reply.start))
        # The limit covers the whole reply, recorded tokens included.
        if settings.get("max_tokens") is not None:
            settings["max_tokens"] -= len(first)
            if settings["max_tokens"] < 1:
                return web.json_response(_answer(path, reply, frozenset()))

        longer = {
            **body,
            "token_ids": [*body["token_ids"], *first],
            "sampling_params": settings,
        }
        answer = await self._forward(request, branch, longer)
        if answer.status != 200:
            return answer
        assert isinstance(answer.body, bytes)

        given: dict[str, Any] = msgspec.json.decode(answer.body)
        recorded = _answer(path, reply, frozenset())["choices"][0]
        choice = given["choices"][0]
        choice["token_ids"] = [*first, *choice["token_ids"]]
        content = recorded["logprobs"]["content"]
        choice["logprobs"]["content"] = content + choice["logprobs"]["content"]

        if choice.get("weight_versions") is not None:
            moved = [
                {**span, "start": span["start"] + len(first), "end": span["end"] + len(first)}
                for span in choice["weight_versions"]
            ]
            choice["weight_versions"] = recorded.get("weight_versions", []) + moved

        return web.json_response(given)


def _answer(path: RecordedPath, reply: slice, stop_token_ids: frozenset[int]) -> dict[str, Any]:
    """What the engine has answered, in its form."""
    token_ids = path.token_ids[reply].tolist()
    content = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}
        for token, logprob in zip(token_ids, path.logprobs[reply].tolist(), strict=True)
    ]
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": token_ids,
        "finish_reason": "stop" if token_ids[-1] in stop_token_ids else "length",
        "logprobs": {"content": content},
    }

    if path.policy_versions is not None:
        choice["weight_versions"] = spans(path.policy_versions[reply].tolist())
    return {"request_id": "recorded", "choices": [choice]}


def spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Runs of equal versions, as an engine reports them; -1 is left out."""
    runs: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if runs and runs[-1]["version"] == version and runs[-1]["end"] == place:
            runs[-1]["end"] = place + 1
        elif version >= 0:
            runs.append({"version": version, "start": place, "end": place + 1})
    return runs
