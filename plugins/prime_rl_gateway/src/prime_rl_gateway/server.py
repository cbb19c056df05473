"""HTTP of the gateway: sessions, rewards, and the model's routes of each session.

    POST   /sessions                    {"task": 3} or {"group": "a text"} -> id, base_url, api_key
    GET    /sessions/ID                 its status
    DELETE /sessions/ID                 it will not train
    POST   /sessions/ID/reward          {"reward": 1.0}, {"turn": 0, "reward": 0.5}, {"final": true}
    POST   /sessions/ID/v1/chat/completions, .../v1/responses, .../v1/messages
    GET    /sessions/ID/v1/models
    GET    /health

Errors have the form of OpenAI's, on the route of messages that of Anthropic's.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from prime_rl_gateway import traces
from prime_rl_gateway.book import LONGEST_NAME, Book, Refused, Session
from prime_rl_gateway.dialects import Chat, Messages, Responses, SessionDialect
from prime_rl_gateway.policy import DIALECT, MODEL, Interception
from prime_rl_gateway.store import Record, Store
from prime_rl_gateway.traces import Written

log = logging.getLogger(__name__)

BODY_SECONDS = 30.0
"""A client may take so long to send a body."""
CLOSE_SECONDS = 5.0
"""For requests in progress to be answered when the gateway ends."""
BACKLOG = 4096
"""Connections that may wait to be accepted: all clients may come at the same moment."""
KERNEL_BACKLOG = Path("/proc/sys/net/core/somaxconn")
LAST_TASK = 99_999
"""The last example that an agent may ask for: an env without end makes those before it too."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

DIALECTS: Mapping[str, type[SessionDialect]] = {
    "chat/completions": Chat,
    "responses": Responses,
    "messages": Messages,
}
"""By the end of a route."""


_NAME = "prime_rl_gateway.write_reply"
# aiohttp 3.14 warns of a text as the key; earlier ones know no other.
WRITE_REPLY: Any = web.RequestKey(_NAME, object) if hasattr(web, "RequestKey") else _NAME
"""Key of the function that puts the reply to a request on disk. It raises ``Refused``."""


@dataclass
class OpenFile:
    """The file of a session that is open."""

    written: Written = field(default_factory=Written)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the file is written."""


class Server:
    """Serves the routes on one address."""

    def __init__(
        self,
        *,
        book: Book,
        store: Store,
        interception: Interception,
        keys: Mapping[str, str],
        task: Callable[[int], Mapping[str, Any]],
        version: Callable[[], int],
        changed: Callable[[], None],
        max_body: int,
        retry_after: int,
        clock: Callable[[], float],
    ) -> None:
        """``keys``: by tenant. ``task``: the fields of an example; raises ``LookupError``.
        ``version``: gives the policy's current version. ``changed`` is called when a session has
        its reward."""
        self.book = book
        self._store = store
        self._interception = interception
        self._keys = keys
        self._task = task
        self._version = version
        self._changed = changed
        self._max_body = max_body
        self._retry_after = retry_after
        self._clock = clock
        self._files: dict[str, OpenFile] = {}
        """Files of the open sessions, by id."""
        self._making = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._is_closing = False
        self.is_ready = False
        """Whether the sessions of an earlier process are there."""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Raises ``OSError`` if the address is taken."""
        app = web.Application(client_max_size=self._max_body, middlewares=[self._answer])
        app.on_response_prepare.append(_write_before_replying)
        app.router.add_get("/health", self._health)
        app.router.add_post("/sessions", self._open)
        app.router.add_get("/sessions/{id}", self._status)
        app.router.add_delete("/sessions/{id}", self._discard)
        app.router.add_post("/sessions/{id}/reward", self._reward)
        for version in ("/v1", ""):
            app.router.add_get(f"/sessions/{{id}}{version}/models", self._models)
            for route, dialect in DIALECTS.items():
                path = f"/sessions/{{id}}{version}/{route}"
                app.router.add_post(path, partial(self._model, dialect=dialect))

        # A client that goes away does not end its request: the reply is there when it asks again.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=False, shutdown_timeout=CLOSE_SECONDS
        )
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
        _warn_of_a_short_queue()
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()
        self.port = listener.getsockname()[1]

    async def close(self) -> None:
        """End all requests."""
        self._is_closing = True
        for session_id in [*self._interception.sessions]:
            self._interception.remove(session_id)
        if self._runner is not None:
            await self._runner.cleanup()

    # -- every request ----------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refusals as JSON, with the status that says what to do."""
        try:
            if self._is_closing:
                raise Refused(503, "the gateway is ending. Try again later.", retry=True)
            if not self.is_ready:
                text = "the gateway is reading the sessions of an earlier process"
                raise Refused(503, f"{text}. Try again later.", retry=True)
            return await handler(request)
        except Refused as refusal:
            headers = {"Retry-After": str(self._retry_after)} if refusal.retry else {}
            return self._error(request, refusal.status, str(refusal), headers)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body has more than {self._max_body:,} bytes (max_body)."
            return self._error(request, 413, text, {"Connection": "close"})
        except web.HTTPException as error:
            allowed = f" Allowed: {error.headers['Allow']}." if "Allow" in error.headers else ""
            text = f"{request.method} {request.path[:200]}: {error.reason}.{allowed}"
            return self._error(request, error.status, text, {})

    @staticmethod
    def _error(
        request: web.Request, status: int, text: str, headers: Mapping[str, str]
    ) -> web.Response:
        kind = {
            401: "authentication_error",
            404: "not_found_error",
            429: "rate_limit_error",
            503: "overloaded_error",
        }.get(status, "invalid_request_error")
        body: dict[str, Any] = {"error": {"message": text, "type": kind, "code": status}}
        if request.path.endswith("/messages"):
            body = {"type": "error", "error": {"type": kind, "message": text}}
        return web.json_response(body, status=status, headers=headers)

    def _tenant(self, request: web.Request) -> str | None:
        """Who asks, by the key. None: no tenant has it."""
        shown = _key_of(request)
        owner = None
        for tenant, key in self._keys.items():
            if hmac.compare_digest(key.encode(), shown):
                owner = tenant
        return owner

    def _session(self, request: web.Request, *, model: bool = False) -> Session:
        """The session of the path. ``model``: the session's own key is enough. Raises
        ``Refused``."""
        session_id = request.match_info["id"]
        tenant = self._tenant(request)
        session_key = self.book.session_key(session_id).encode()
        has_own = hmac.compare_digest(session_key, _key_of(request))
        if tenant is None and not has_own:
            raise Refused(401, "the key is wrong. Send it as Authorization: Bearer KEY.")
        if tenant is None and not model:
            raise Refused(403, "a session's own key opens the model's routes only.")
        return self.book.find(session_id, tenant)

    async def _table(self, request: web.Request) -> dict[str, Any]:
        """The body as a table; none is an empty one. Raises ``Refused``."""
        raw = await _read(request)
        try:
            table = json.loads(raw) if raw.strip() else {}
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is not JSON: {error}.") from error
        if not isinstance(table, dict):
            raise Refused(400, f"the body is {type(table).__name__}, expected a JSON object.")
        return table

    # -- sessions ---------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "policy_version": self._version()})

    async def _open(self, request: web.Request) -> web.Response:
        tenant = self._tenant(request)
        if tenant is None:
            raise Refused(401, "the key is wrong. Send it as Authorization: Bearer KEY.")
        asked = await self._table(request)
        _check_names(asked, {"task", "group"})
        task = asked.get("task")
        group = asked.get("group")
        key = request.headers.get("Idempotency-Key") or None
        if task is not None and (type(task) is not int or task < 0):
            raise Refused(400, f"task: got {task!r:.80}, expected the number of an example from 0.")
        if group is not None and not _is_name(group):
            size = f"a text of 1 to {LONGEST_NAME} characters"
            raise Refused(400, f"group: got {group!r:.80}, expected {size}.")
        if key is not None and len(key) > LONGEST_NAME:
            raise Refused(400, f"Idempotency-Key: expected at most {LONGEST_NAME} characters.")
        fields = None if task is None else await self._fields(task)

        before = self.book.counts["opened"]
        session = self.book.open(tenant, self._clock(), task=task, group=group, idempotency_key=key)
        is_new = self.book.counts["opened"] > before
        if is_new:
            await self._create(session)
        else:
            await self._created(session)
        root = f"{request.scheme}://{request.host}/sessions/{session.id}"
        answer = self.book.status(session) | {
            "base_url": f"{root}/v1",
            "anthropic_base_url": root,
            "api_key": self.book.session_key(session.id),
            "model": MODEL,
            "fields": fields,
            "policy_version": self._version(),
        }
        return web.json_response(answer, status=201 if is_new else 200)

    async def _create(self, session: Session) -> None:
        """Write a session that has just been opened. Raises ``Refused`` if the disk does."""
        self._interception.add(session.id, traces.new_trace())
        self._files[session.id] = OpenFile()
        try:
            await self._write(session)
        except OSError as error:
            self._interception.remove(session.id)
            self.book.forget(session)
            del self._files[session.id]
            raise _full("the session", error) from error

    async def _created(self, session: Session) -> None:
        """Wait until a session is on disk that another request has opened. Raises ``Refused``."""
        file = self._files.get(session.id)
        if file is not None:
            async with file.lock:
                if not file.written.size:
                    text = "the session could not be written. Try again later."
                    raise Refused(503, text, retry=True)

    def restore(self, session: Session, record: Record) -> None:
        """Serve an open session that another process has left in a file."""
        served = self._interception.add(session.id, traces.load(record))
        self._files[session.id] = OpenFile(traces.restore(served, record))

    async def _fields(self, task: int) -> Any:
        """The fields of an example that JSON has. In a thread: an env may make its examples."""
        if task > LAST_TASK:
            raise Refused(404, f"task: got {task}, expected at most {LAST_TASK}.")
        async with self._making:
            try:
                fields = await asyncio.to_thread(lambda: dict(self._task(task)))
            except LookupError as error:
                raise Refused(404, f"task: the env has no example {task}.") from error
            except Exception as error:  # code of an environment
                text = f"task: the env cannot make example {task}: {error}"
                raise Refused(502, text) from error
        return json.loads(json.dumps(fields, default=str))

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self.book.status(self._session(request)))

    async def _discard(self, request: web.Request) -> web.Response:
        session = self._session(request)
        self.book.discard(session)
        if session.state == "discarded":
            try:
                await self.forget(session)
            except OSError as error:
                raise _full("the deletion", error) from error
        return web.json_response(self.book.status(session))

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        asked = await self._table(request)
        _check_names(asked, {"reward", "turn", "final"})
        reward = asked.get("reward")
        turn = asked.get("turn")
        final = asked.get("final", turn is None)
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise Refused(400, f"reward: got {reward!r:.80}, expected a number.")
        if turn is not None and type(turn) is not int:
            raise Refused(400, f"turn: got {turn!r:.80}, expected the number of a reply from 0.")
        if not isinstance(final, bool):
            raise Refused(400, f"final: got {final!r:.80}, expected true or false.")

        was_open = session.is_open
        try:
            changed = self.book.reward(
                session,
                self._clock(),
                version=self._version(),
                reward=None if reward is None else _as_float(reward),
                turn=turn,
                final=final,
            )
        except Refused:
            if was_open and not session.is_open:  # too old
                with suppress(OSError):  # the source tries again
                    await self.forget(session)
            raise
        if changed or session.is_open:  # also where the first post could not be written
            await self._note_reward(session)
        elif session.state == "rewarded":
            await self._written(session)
        return web.json_response(self.book.status(session) | {"repeated": not changed})

    async def _written(self, session: Session) -> None:
        """Wait until the first post of a reward is on disk. Raises ``Refused`` if it failed."""
        file = self._files.get(session.id)
        if file is not None:
            async with file.lock:
                pass
        if session.reward is None:
            raise Refused(503, "the reward could not be written. Post it again.", retry=True)

    async def _note_reward(self, session: Session) -> None:
        """Write a reward. One that closes the session seals it first: requests in progress end, and
        what is written is what trains. Raises ``Refused`` if the disk is full or fails."""
        # Another post may close the session while this one is written: that one enqueues it.
        closes = not session.is_open
        served = self._served(session)
        if closes:
            self._interception.remove(session.id)

        def reopen() -> None:
            self.book.reopen(session)
            again = self._interception.add(session.id, served.trace)
            again.idempotent_requests = served.idempotent_requests

        try:
            if closes:
                await self._write(session, served, reopen)
            else:
                await self._write(session)
        except OSError as error:
            raise _full("the reward", error) from error
        if closes:
            self._files.pop(session.id, None)
            self.book.enqueue(session)
            self._changed()

    # -- the model --------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request, model=True)
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "prime-rl"}
        return web.json_response({"object": "list", "data": [card]})

    async def _model(
        self, request: web.Request, dialect: type[SessionDialect]
    ) -> web.StreamResponse:
        """A request to the model, by verifiers' handler. The reply is on disk before it leaves."""
        session = self._session(request, model=True)
        self.book.begin(session, self._clock())
        try:
            await _read(request)
            self.book.check_open(session)
            self._served(session)
            request[WRITE_REPLY] = partial(self._write_reply, session)
            try:
                response: web.StreamResponse = await self._interception.handle(
                    request, session.id, dialect
                )
            except web.HTTPException:
                raise
            except asyncio.CancelledError:
                if session.is_open:
                    raise
                # Its reward has come meanwhile, which ends the requests in progress.
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                self.book.check_open(session)
                raise
            except Exception as error:  # nothing was sampled: verifiers could not read it
                text = f"the request cannot be read: {type(error).__name__}: {error}"
                log.info("session %s: %s", session.id, text, exc_info=error)
                raise Refused(400, text[:2000]) from error

            if response.status == 200:
                try:
                    await self._write_reply(session)
                except Refused:
                    if not response.prepared:
                        raise  # else the client has had the refusal as an event, or is gone
            return response
        finally:
            self.book.end(session, self._clock())

    async def _write_reply(self, session: Session) -> None:
        """Raises ``Refused`` if the disk does: the reply is there when the client asks again."""
        if not session.is_open:
            return
        trace = self._served(session).trace
        session.num_replies = trace.num_turns
        session.first_version = traces.first_version(trace)
        try:
            await self._write(session)
        except OSError as error:
            raise _full("the reply", error) from error

    def _served(self, session: Session) -> Any:
        """Raises ``Refused`` while the gateway ends: no session is served any more."""
        served = self._interception.sessions.get(session.id)
        if served is None:
            raise Refused(503, "the gateway is ending. Try again later.", retry=True)
        return served

    # -- files ------------------------------------------------------------------------------------

    async def _write(
        self, session: Session, served: Any = None, undo: Callable[[], None] | None = None
    ) -> None:
        """Append what is new to the session's file. ``served``: that of a session that is closed
        now; None: it may have been closed meanwhile, and then its reward is written with the same
        replies. Raises ``OSError``, after ``undo``."""
        file = self._files[session.id]

        async def write() -> None:
            async with file.lock:
                if served is None and not session.is_open:
                    return
                line, after = traces.news(session, served or self._served(session), file.written)
                try:
                    size = await asyncio.to_thread(self._store.append, line, file.written.size)
                except OSError:
                    if undo is not None:  # before others see that the file is written
                        undo()
                    raise
                file.written = replace(after, size=size)

        # A request that is cancelled leaves its thread behind: the lock is held until that ends.
        await asyncio.shield(write())

    async def forget(self, session: Session) -> None:
        """A session has ended and nothing of it is needed any more. Raises ``OSError``."""
        self._interception.remove(session.id)
        lock = self._files[session.id].lock if session.id in self._files else asyncio.Lock()

        async def delete() -> None:
            async with lock:
                await asyncio.to_thread(self._store.delete, [session.id])

        await asyncio.shield(delete())
        self._files.pop(session.id, None)


async def _write_before_replying(request: web.Request, response: web.StreamResponse) -> None:
    """Events of a long reply begin with keep-alives, before the reply is there. Let the reply wait
    for the disk, or send the refusal as an event."""
    write_reply = request.get(WRITE_REPLY)
    if write_reply is None or isinstance(response, web.Response):
        return
    dialect: Any = request[DIALECT]
    keep_alives = [dialect.stream_keepalive(is_first) for is_first in (True, False)]
    send = response.write

    async def write(data: bytes | bytearray | memoryview) -> None:
        events = data
        if data not in keep_alives:
            try:
                await write_reply()
            except Refused as refusal:
                events = dialect.stream_error(dialect.error_body(str(refusal)))
        await send(events)

    response.write = write  # type: ignore[method-assign]


def _full(what: str, error: OSError) -> Refused:
    return Refused(503, f"{what} cannot be written: {error}. Try again later.", retry=True)


def _warn_of_a_short_queue() -> None:
    """The kernel may let fewer connections wait than we ask for, and resets the others."""
    with suppress(OSError, ValueError):
        most = int(KERNEL_BACKLOG.read_text("utf-8"))
        if most < BACKLOG:
            log.warning(
                "the kernel lets %d new connections wait, and resets those beyond it: when more"
                " clients come at the same moment, set net.core.somaxconn to %d.",
                most,
                BACKLOG,
            )


def _key_of(request: web.Request) -> bytes:
    """As OpenAI's clients send it, or as Anthropic's."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return (request.headers.get("x-api-key") or bearer).encode("utf-8", "surrogateescape")


async def _read(request: web.Request) -> bytes:
    """The body. Raises ``Refused`` for a client that is too slow or has gone away."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_SECONDS:.0f} s.") from error
    except ConnectionError as error:
        raise Refused(400, "the body is cut off.") from error


def _check_names(asked: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted({*asked} - known)
    if unknown:
        names = ", ".join(sorted(known))
        raise Refused(400, f"unknown key {unknown[0]!r:.80}; expected some of {names}.")


def _is_name(group: Any) -> bool:
    """Whether it is a text that files can have: half a character is none."""
    if not isinstance(group, str) or not 0 < len(group) <= LONGEST_NAME:
        return False
    try:
        group.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_float(number: float) -> float:
    """An integer may be larger than any float."""
    with suppress(OverflowError):
        return float(number)
    return float("inf")
