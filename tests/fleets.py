"""A fleet over engines that answer the admin routes on loopback."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web
from loopback import Server
from waiting import LIMIT, until

from prime_rl import EngineError
from prime_rl.inference.fleet import Fleet, FleetOptions
from prime_rl.inference.timing import RetryPolicy
from prime_rl.weights.versions import Weights

FIRST = Weights(Path("first"), 0)
ONCE = RetryPolicy(attempts=1)


class Engine:
    """Answers the admin routes; the attributes say how."""

    def __init__(self, version=0, model="m"):
        self.version, self.calls, self.refuse, self.model = version, [], {}, model
        self.server, self.away = None, False
        self.dropped = 0  # connections to drop before it answers again
        self.mute = self.pauses_itself = False
        self.paused_seconds = None
        self.looks = self.muted = 0
        self.hold = asyncio.Event()
        self.hold.set()

    @property
    def away(self):
        """Its process has ended: connections end, and nothing listens at its address."""
        return self._away

    @away.setter
    def away(self, away):
        if self.server is not None and away != self._away:
            if away:
                self.server.refuse()
            else:
                self.server.accept()
        self._away = away

    async def handle(self, request):
        self.looks += request.path == "/health"
        if self.away or self.dropped > 0:
            self.dropped -= not self.away
            request.transport.abort()
            await asyncio.Event().wait()  # aiohttp cancels the handler of an ended connection
        if self.mute:
            self.muted += request.path == "/health"
            await asyncio.sleep(60)
        path = request.path
        if path == "/health" and path in self.refuse:
            return web.Response(status=self.refuse[path], text="loading")
        if path == "/v1/models":
            return web.json_response({"data": [{"id": self.model}]})
        if path == "/health":
            answer = {"version": self.version, "pauses_itself": self.pauses_itself}
            return web.json_response(answer)
        self.calls.append(path)
        if path in self.refuse:
            return web.Response(status=self.refuse[path], text="the reason")
        if path == "/update_weights":
            await self.hold.wait()
            body = await request.json()
            self.version, self.loaded = body["version"], body["weight_dir"]
            if self.paused_seconds is not None:
                answer = {"status": "ok", "paused_seconds": self.paused_seconds}
                return web.json_response(answer)
        return web.json_response({"status": "ok"})

    def restart(self, version=0):
        self.version, self.away = version, False

    async def looked_at(self, times=3):
        """Until it was asked for its health so many more times."""
        enough = self.looks + times
        await until(lambda: self.looks >= enough)


@asynccontextmanager
async def serving(engine):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    engine.server = Server(app, handler_cancellation=True, shutdown_timeout=0.1)
    await engine.server.ready()
    if engine.away:
        engine.server.refuse()
    try:
        yield engine.server.url
    finally:
        await engine.server.close()
        engine.server = None


@asynccontextmanager
async def fleet_of(*engines, ready=True, first=FIRST, **options):
    """A fleet that watches its engines."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(engine)) for engine in engines]
        settings = {"model": "m", "retry": ONCE, "poll": 0.02} | options
        delivery = settings.pop("delivery", None)
        fleet = Fleet(urls, "k", first, FleetOptions(**settings), delivery)
        fleet.urls = [engine.url for engine in fleet.engines]
        stack.push_async_callback(fleet.close)
        if ready:
            await fleet.wait_ready(LIMIT)
        keeping = asyncio.create_task(fleet.run())
        fleet.keeping = keeping
        try:
            yield fleet
        finally:
            keeping.cancel()
            with suppress(asyncio.CancelledError, EngineError):
                await keeping
