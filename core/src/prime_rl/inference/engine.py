"""One engine of a pool: its state, and what it has in flight.

    state     meaning                                                            gets requests
    STARTING  it has not served since its process started, as far as we know     no
    SERVING   it answers, and has the weights that it should have                yes
    ASLEEP    it has given its memory back (colocated); silence means nothing    no
    WAITING   the weights that it has loaded are old by now; it loads the next   no
              ones with the others
    AWAY      it has served, and does not serve now                              no
    HUNG      it has served, and has answered nothing for long                   no

    from                  event                                                  to
    STARTING, AWAY        it answers and has the weights; they are loaded first  SERVING
    STARTING, AWAY        it has loaded weights, and others have newer ones      WAITING
    WAITING               it has loaded new weights with the others              SERVING
    WAITING               no new weights came, or no other engine is in          AWAY
                          service; it loads the current ones
    STARTING, AWAY        it answers while the fleet sleeps: it is put to sleep  ASLEEP
    SERVING               the fleet is put to sleep                              ASLEEP
    ASLEEP                new weights are loaded                                 SERVING
    SERVING, WAITING      no good answer for 30 s; silent and alone: no change   AWAY
    SERVING, ASLEEP,      another version; an update failed, or is late          AWAY
    WAITING
    SERVING, AWAY         silent for ``hang_timeout``, or through an update      HUNG
    HUNG                  it answers                                             STARTING
    any                   nothing listens; a connection to an engine that does   STARTING
                          not say its version ends, or cannot be made

Weights are loaded under the lock ``loading``: a serving engine that holds it goes on serving, an
engine that is away and holds it is a straggler and is left alone until it is done.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto

from prime_rl.inference import timing
from prime_rl.inference.client import EngineClient, EngineSilent, NoAnswer, NotListening
from prime_rl.plugins.weight_transports import Receives


class EngineState(Enum):
    STARTING = auto()
    SERVING = auto()
    ASLEEP = auto()
    WAITING = auto()
    AWAY = auto()
    HUNG = auto()


class Replica:
    """Only its pool changes it."""

    def __init__(self, number: int, client: EngineClient, started_with: int | None = None) -> None:
        """``started_with``: the version that its process started with; None: unknown."""
        self.number = number
        self.client = client
        self.state = EngineState.STARTING
        self.version = started_with
        """The version of its weights. None: unknown, so weights are loaded before it serves."""

        self.problem: BaseException | None = None
        """Why it does not serve, or why its last request failed."""
        self.hangs = 0
        """Times that it was found hung."""

        self.running = 0
        """Requests in flight."""
        self.asked = 0
        """Requests so far."""
        self.retried = 0
        """Requests that were sent again to another engine."""

        self.lost: asyncio.Future[None] | None = None
        """Done when what is in flight is lost; None before it first serves or sleeps."""
        self.flights: set[asyncio.Future[None]] = set()
        """One future for each request in flight: with a shared one, leaving takes time for each
        waiter."""

        self.loading = asyncio.Lock()
        self.looking = asyncio.Lock()
        self.looked_at = 0.0
        """When the last look ended; this and the next four are times of ``time.monotonic``."""
        self.heard_at = 0.0
        """When it last answered."""
        self.ready_at = 0.0
        """When it last gave a good answer."""
        self.join_at = 0.0
        """It does not try to join before, because its last attempt failed."""
        self.waits_until = 0.0
        """While it is WAITING, it does not load the current weights by itself before."""

        self.down_since: float | None = None
        self.down = 0.0
        """Seconds that it was away, until it last came back."""

    @property
    def url(self) -> str:
        """Without ``/v1``."""
        return self.client.url

    @property
    def receives(self) -> Receives | None:
        """How it can receive weights, as of the last look."""
        return self.client.health.receives

    @property
    def session(self) -> object:
        """Another object each time it joins."""
        return self.lost

    @property
    def serving(self) -> bool:
        """It gets requests."""
        return self.state is EngineState.SERVING

    @property
    def in_service(self) -> bool:
        """It serves, or will when it is woken: its requests in flight are kept."""
        return self.state in (EngineState.SERVING, EngineState.ASLEEP)

    @property
    def takes_weights(self) -> bool:
        """New weights are loaded into it: it is in service, or waits for them."""
        return self.in_service or self.state is EngineState.WAITING

    @property
    def is_ready(self) -> bool:
        """It gave a good answer to the last look."""
        return self.ready_at >= self.looked_at

    @property
    def has_served(self) -> bool:
        """Ever, or it was put to sleep, or has waited for weights."""
        return self.lost is not None

    @property
    def reason(self) -> str:
        return "" if self.problem is None else str(self.problem)

    def serve(self) -> float | None:
        """It serves now. Returns the seconds it was away, None at the start."""
        away = None if self.down_since is None else time.monotonic() - self.down_since
        self.down += away or 0.0

        self.state = EngineState.SERVING
        self.down_since = None
        self.problem = None
        self.mark_ready()
        self._begin_session()
        return away

    def mark_ready(self) -> None:
        """It has just given a good answer."""
        now = time.monotonic()
        self.heard_at = now
        self.ready_at = now

    def rest(self) -> None:
        """It was put to sleep when it came, and waits with the others for new weights."""
        self.state = EngineState.ASLEEP
        self.problem = None
        self._begin_session()

    def wait(self, until: float) -> None:
        """It takes part in the next update, and serves then."""
        self.state = EngineState.WAITING
        self.waits_until = until
        self.problem = None
        self._begin_session()

    def _begin_session(self) -> None:
        # Sleep does not end a session: requests in flight are kept.
        if self.lost is None or self.lost.done():
            self.lost = asyncio.get_running_loop().create_future()

    def after(self, problem: Exception, hang_timeout: float, alone: bool = False) -> EngineState:
        """The state after a look that failed. ``alone``: no other engine serves."""
        now = time.monotonic()
        silent = isinstance(problem, EngineSilent)
        if not silent:
            self.heard_at = now

        # One that does not say its version may be another process at the next look.
        is_discreet = self.version is not None and self.client.health.version is None
        if isinstance(problem, NotListening) or (isinstance(problem, NoAnswer) and is_discreet):
            self.client.asleep = False  # the next process is awake
            return EngineState.STARTING

        if self.state in (EngineState.STARTING, EngineState.ASLEEP):
            return self.state
        if silent and now - self.heard_at > hang_timeout:
            return EngineState.HUNG
        if self.state is EngineState.HUNG:
            return EngineState.HUNG if silent else EngineState.STARTING
        # An engine that loads weights may be too busy to answer; the update has its own limits. The
        # requests of a silent one would be lost and could go nowhere else if it is alone.
        busy = self.loading.locked() or (silent and alone)
        patient = busy or now - self.ready_at <= timing.PATIENCE_SECONDS
        return self.state if patient else EngineState.AWAY

    def leave(self, state: EngineState) -> None:
        """It serves no more, and what is in flight there is lost."""
        if self.in_service:
            self.down_since = time.monotonic()
        if self.takes_weights:
            for each in filter(None, {self.lost, *self.flights}):
                if not each.done():  # otherwise its request is ending
                    each.set_result(None)

        if state is EngineState.HUNG and self.state is not EngineState.HUNG:
            self.hangs += 1
        self.state = state
