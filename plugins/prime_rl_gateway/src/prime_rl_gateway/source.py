"""``gateway``: rollouts of agents that run elsewhere.

    an agent opens a session, talks to the policy, posts a reward      server, book
    a group of rewarded sessions is complete                           ``group`` gives its rollouts
    its rollouts are in the buffer, or rejected                        ``settled``

Each rewarded session trains once. A checkpoint has the names of those that are settled; the files
have all others, and a run that continues from it gives these again. In a run without checkpoints,
which begins again if it fails, the file of a session goes when it is settled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from prime_rl import (
    ConfigError,
    Host,
    LiveSampling,
    Rollout,
    Source,
    SourceRequest,
)
from prime_rl_gateway.book import ENDED, SETTLED, Book, Quota, Session, State
from prime_rl_gateway.settings import DEFAULT_TENANT, GatewayConfig, Tenant
from prime_rl_gateway.store import Address, Record, Store, log_lost

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks for sessions that have expired and groups that have waited long enough."""
KEPT_CHECKPOINTS = 8
"""Complete checkpoints whose sessions keep their files: a run that goes back to an earlier one
gives them again."""
FOLDER = "gateway"
SETTLED_FILE = "settled.json"
RETRY_SECONDS = 5.0
"""After a file could not be read."""
FIRST_REQUESTS = 256
"""Requests that the default tenant may have at once."""


_serving: set[Gateway] = set()
"""The gateways of this process that listen."""


class DiskError(Exception):
    """A file cannot be read now."""


class Gateway(Source):
    """Serves the policy to agents, and gives their sessions as rollouts."""

    name = "gateway"
    config_class = GatewayConfig
    config: GatewayConfig
    from_policy = True
    feeds = frozenset({"rl", "ce", "ref_kl"})
    needs_siblings = False

    _host: Host

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(config)
        self._changed = asyncio.Event()
        self._waiting = 0
        """Requests for a group that wait."""
        self._settled: dict[str, State] = {}
        """What became of the sessions of settled groups whose files are there."""
        self._checkpointed: list[list[str]] = []
        """Those of them that each of the last complete checkpoints was the first to have."""
        self._gone: list[Session] = []
        """Sessions that have ended without training, and their files may be there."""
        self._superfluous: list[str] = []
        """Sessions whose files no run can need."""
        self._counted = Counter[str]()
        self._looks: asyncio.Task[None] | None = None
        self._began = time.time() - time.monotonic()
        """What ``_clock`` shows at the zero of the monotonic clock."""
        self.server: Any = None

    async def setup(self, host: Host) -> None:
        """Listen, and read the sessions of an earlier process. Raises ``ConfigError``."""
        other = next((each for each in _serving if each is not self), None)
        if other is not None:
            raise ConfigError(
                f"env {host.env!r}: algo.sampling.source: env {other._host.env!r} has a gateway "
                "already, and a run serves one: while the agents of one are away, requests for it "
                "would hold the places of the other. Let all agents use one env."
            )
        # verifiers takes seconds to import.
        from prime_rl_gateway.policy import Interception, PolicyClient
        from prime_rl_gateway.server import Server

        self._host = host
        self._live: LiveSampling = await asyncio.to_thread(
            host.live, max_concurrency=self.config.max_concurrency
        )
        self._store = Store(host.folder / FOLDER)
        client = PolicyClient(self._live, host.env, host.seq_len, host.max_completion_tokens)
        self._interception = Interception(client)
        keys = self._keys()
        self.book = self._book(keys)
        self.server = Server(
            book=self.book,
            store=self._store,
            interception=self._interception,
            keys=keys,
            task=host.task,
            version=lambda: host.step,
            changed=self._wake,
            max_body=self.config.max_body,
            retry_after=self.config.retry_after,
            clock=lambda: self._clock(),
        )
        # Clients whose connection is refused give up sooner than those that are told to wait.
        await self._listen()
        await self._restore()
        self.server.is_ready = True
        await self._publish_address(keys)
        _serving.add(self)
        self._looks = asyncio.create_task(self._look())

    async def close(self) -> None:
        _serving.discard(self)
        if self._looks is not None:
            self._looks.cancel()
        if self.server is not None:
            await self.server.close()

    def _keys(self) -> dict[str, str]:
        """The key of each tenant. One that the run makes stays the same for all of its
        processes."""
        where = f"env {self._host.env!r}: algo.sampling.source"
        if self.config.tenants:
            keys = {tenant.name: tenant.key(where) for tenant in self.config.tenants}
            if len({*keys.values()}) < len(keys):
                raise ConfigError(f"{where}.tenants: two have the same key; give each its own")
            return keys

        before = self._store.address()
        made = None if before is None else before.keys.get(DEFAULT_TENANT)
        return {DEFAULT_TENANT: made or f"sk-gateway-{secrets.token_hex(24)}"}

    def _book(self, keys: Mapping[str, str]) -> Book:
        config = self.config
        tenants = config.tenants or (
            Tenant.model_construct(
                name=DEFAULT_TENANT,
                key_var="",
                max_sessions=config.max_sessions,
                max_requests=max(FIRST_REQUESTS, config.max_sessions),
            ),
        )
        quotas = {each.name: Quota(each.max_sessions, each.max_requests) for each in tenants}
        return Book(
            secret=self._store.secret(),
            quotas=quotas,
            group_size=self._live.group_size,
            max_off_policy_steps=self._live.max_off_policy_steps,
            session_timeout=config.session_timeout,
            group_timeout=config.group_timeout,
            max_sessions=config.max_sessions,
            max_waiting=config.max_waiting,
            max_turns=config.max_turns,
        )

    async def _restore(self) -> None:
        """Sessions go on where an earlier process has left them. Only those that are open are read
        whole, one after the other."""
        restored = Counter[str]()
        places = await asyncio.to_thread(self._store.places)
        times = [max(place.touched_at, place.rewarded_at) for place in places]
        ended_at = max(times, default=self._clock())
        for place in places:
            session = place.session()
            if session.tenant not in self.book.quotas:
                restored["of tenants that are gone"] += 1
                if ended_at - session.touched_at > self.config.session_timeout:
                    self._superfluous.append(session.id)
                continue
            if session.is_open:
                try:
                    record = await asyncio.to_thread(self._store.read, session.id)
                except (OSError, ValueError) as error:
                    log_lost(session.id, error)
                    continue
                self.server.restore(session, record)
            restored[session.state] += 1
            self.book.restore(session)
        self._began = ended_at - time.monotonic()
        if restored:
            counts = ", ".join(f"{number} {state}" for state, number in restored.items())
            log.info("sessions of an earlier process: %s", counts)

    async def _listen(self) -> None:
        before = self._store.address()
        port = self.config.port or (0 if before is None else before.port)
        try:
            await self.server.start(self.config.host, port)
        except OSError as error:
            place = f"{self.config.host}:{port}"
            raise ConfigError(
                f"env {self._host.env!r}: the gateway cannot listen on {place}: {error}. Choose "
                "another algo.sampling.source.port, or 0 for a free one in a new run."
            ) from error

    async def _publish_address(self, keys: Mapping[str, str]) -> None:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        address = Address(
            env=self._host.env,
            url=f"http://{host}:{self.server.port}",
            port=self.server.port,
            keys={} if self.config.tenants else dict(keys),
            key_vars={tenant.name: tenant.key_var for tenant in self.config.tenants},
        )
        await asyncio.to_thread(self._store.write_address, address)
        text = "the gateway of env %r listens on %s; prime-rl gateway prints its key"
        log.info(text, self._host.env, address.url)

    # -- groups -----------------------------------------------------------------------------------

    @property
    def num_examples(self) -> int | None:
        """None: the agents choose."""
        return None

    @property
    def is_ready(self) -> bool:
        """Whether a group is there that no request waits for. The only env of a run is always
        ready: its requests wait."""
        return len(self._host.envs) == 1 or self.book.num_ready > self._waiting

    def task(self, example_id: int) -> Mapping[str, Any] | None:
        return {}

    async def group(self, request: SourceRequest) -> Sequence[Rollout]:
        """The rollouts of the next group of sessions. Waits until there is one."""
        self._waiting += 1
        try:
            while True:
                self._changed.clear()
                version = max(request.policy_version, self._host.step)
                members = self.book.next_group(self._clock(), version)
                if members:
                    rollouts = await self._rollouts(members, request, version)
                    if rollouts:
                        return rollouts
                else:
                    await self._changed.wait()
        finally:
            self._waiting -= 1

    async def _rollouts(
        self, members: list[Session], request: SourceRequest, version: int
    ) -> list[Rollout]:
        """The rollouts of sessions that can train. Empty after an ``OSError``: the sessions wait
        again."""
        rollouts = []
        try:
            for session in members:
                try:
                    record = await asyncio.to_thread(self._read, session)
                    rollouts.append(
                        await asyncio.to_thread(self._rollout, session, record, request, version)
                    )
                except DiskError as error:
                    log.warning("session %s cannot be read, trying again: %s", session.id, error)
                    await asyncio.sleep(RETRY_SECONDS)
                    self.book.give_back(members)
                    return []
                except Exception as error:  # a damaged file, or the env's code
                    log.warning("session %s cannot train: %s", session.id, error)
                    self.book.fail(session)
        except asyncio.CancelledError:
            self.book.give_back(members)
            raise
        return rollouts

    def _read(self, session: Session) -> Record:
        """Raises ``DiskError`` if it may succeed later; ``FileNotFoundError``, ``EOFError`` or
        ``ValueError`` if not."""
        try:
            return self._store.read(session.id)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DiskError(str(error)) from error

    def _rollout(
        self, session: Session, record: Record, request: SourceRequest, version: int
    ) -> Rollout:
        """The rollout of one session, from its file. Raises ``StreamError`` or ``ValueError``."""
        from prime_rl_gateway import traces

        trace = traces.load(record, newest=version)
        assert session.reward is not None
        traces.conclude(trace, session.reward, session.turn_rewards)
        example = session.task
        if example is None:
            example = zlib.crc32(session.group.encode()) >> 1
        first = traces.first_version(trace)
        rollout = self._live.rollout(
            trace,
            example_id=example,
            group_id=request.group_id,
            policy_version=version if first is None else first,
        )
        rollout.episode_id = session.number
        rollout.info |= {"session": session.id, "tenant": session.tenant, "key": session.group}
        prompts = [each for each in rollout.messages if each.get("role") == "user"]
        rollout.task = {"prompt": prompts[0]["content"] if prompts else ""}
        if session.task is not None:
            with suppress(LookupError):
                rollout.task |= self._host.task(session.task)
        return rollout

    def settled(self, rollouts: Sequence[Rollout], reason: str | None) -> None:
        """The sessions of a group are scored, or rejected."""
        state: State = "taken" if reason is None else "rejected"
        for rollout in rollouts:
            session_id = rollout.info["session"]
            self.book.settle(session_id, state)
            if self._host.has_checkpoints:
                self._settled[session_id] = state
            else:
                self._superfluous.append(session_id)

    # -- time -------------------------------------------------------------------------------------

    def _clock(self) -> float:
        """Seconds, at the run's first start those since the epoch. They pass only while its gateway
        serves: agents are not silent while it is away, or while the machine sleeps."""
        return self._began + time.monotonic()

    def _wake(self) -> None:
        self._changed.set()

    async def _look(self) -> None:
        """Expire sessions, delete the files of what is gone, and wake groups that wait."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.book.expire(self._clock())
            await self._tidy()
            self._wake()

    async def _tidy(self) -> None:
        """Delete files. What fails is tried again at the next look."""
        self._gone += self.book.take_gone()
        superfluous = [*self._superfluous]
        try:
            while self._gone:
                await self.server.forget(self._gone[0])
                del self._gone[0]
            if superfluous:
                await asyncio.to_thread(self._store.delete, superfluous)
        except OSError as error:
            log.warning("files of sessions that have ended cannot be deleted: %s", error)
            return

        # Checkpoints name a session as long as its file is there.
        del self._superfluous[: len(superfluous)]
        for session_id in superfluous:
            self._settled.pop(session_id, None)

    # -- metrics and checkpoint -------------------------------------------------------------------

    def metrics(self) -> Mapping[str, float]:
        """``open``, ``waiting`` and ``requests`` now; sessions that were ``opened``, ``rewarded``,
        ``taken``, ``rejected``, ``expired``, ``stale``, ``alone``, ``discarded`` or ``failed``
        since the last call."""
        new = self.book.counts - self._counted
        self._counted = Counter(self.book.counts)
        states = ("opened", "rewarded", *SETTLED, *ENDED)
        return {
            "open": float(self.book.num_open),
            "waiting": float(self.book.num_waiting),
            "requests": float(self.book.requests.total()),
            **{state: float(new[state]) for state in states},
        }

    def save(self, directory: Path) -> None:
        """Write what became of the sessions that are settled."""
        (directory / SETTLED_FILE).write_text(json.dumps(self._settled), "utf-8")

    def checkpoint_complete(self, directory: Path) -> None:
        """Files of the sessions that older complete checkpoints have are superfluous. One that the
        trainer has given up counts for nothing: the run may go back to the one before."""
        try:
            named = self._read_settled(directory)
        except ConfigError as error:  # nothing is deleted for it
            log.warning("%s", error)
            return
        known = {session_id for names in self._checkpointed for session_id in names}
        known |= {*self._superfluous}
        new = [each for each in named if each in self._settled and each not in known]
        self._checkpointed.append(new)
        while len(self._checkpointed) > KEPT_CHECKPOINTS:
            self._superfluous += self._checkpointed.pop(0)

    def load(self, directory: Path) -> None:
        """Sessions that the checkpoint has are not given again. Raises ``ConfigError``."""
        self._settled = self._read_settled(directory)
        for session_id, state in self._settled.items():
            self.book.settle(session_id, state)
        self._checkpointed = []  # `checkpoint_complete` names this checkpoint next

    def _read_settled(self, directory: Path) -> dict[str, State]:
        """What ``save`` wrote. Raises ``ConfigError``."""
        path = directory / SETTLED_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, State])
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"env {self._host.env!r}: expected the state of its gateway in {path}: {error}"
            ) from error
