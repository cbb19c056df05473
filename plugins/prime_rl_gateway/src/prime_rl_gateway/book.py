"""The book of sessions: what each one is, which of them make a group, and who may open another.

    open -- reward --> rewarded -- a group is requested --> given -- its group is scored --> taken
      |                   |                                   |
      +--> expired        +--> stale, alone                   +--> rejected, failed
      +--> discarded

Times are seconds by the clock that each call is given. Sessions outlive a process, so it goes on
where that of an earlier process has ended.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal[
    "open",
    "rewarded",
    "given",
    "taken",
    "rejected",
    "expired",
    "stale",
    "alone",
    "discarded",
    "failed",
]

WAYS_OUT: Mapping[State, str] = {
    "rewarded": "it has its reward and is closed",
    "given": "it has its reward and is closed",
    "taken": "it has its reward and is closed",
    "rejected": "it has its reward and is closed",
    "expired": "it expired: neither a request nor a reward came in time (session_timeout)",
    "stale": "its replies are too old to train (orchestrator.max_off_policy_steps)",
    "alone": "no other session of its group was rewarded in time (group_timeout)",
    "discarded": "it was deleted",
    "failed": "it cannot train",
}
"""Why a session takes no more requests, by its state."""

REWARDED = ("rewarded", "given", "taken", "rejected")
SETTLED: tuple[State, ...] = ("taken", "rejected")
"""States of sessions whose group the orchestrator has dealt with: a checkpoint may know of them."""
ENDED: tuple[State, ...] = ("expired", "stale", "alone", "discarded", "failed")
"""States of sessions that do not train, and of which no checkpoint knows."""
LARGEST_REWARD = 1e18
"""As in core: a group's rewards are squared and added in float32."""
KEPT_ENDED = 100_000
"""Ended sessions whose state is remembered. Of an older session only its existence is known."""
LONGEST_NAME = 256
"""Characters of a group's key, or of an idempotency key."""


class Refused(Exception):
    """A request that cannot be served: the answer's status and text."""

    def __init__(self, status: int, text: str, *, retry: bool = False) -> None:
        """``retry``: the same request may succeed later."""
        super().__init__(text)
        self.status = status
        self.retry = retry


@dataclass(eq=False, kw_only=True)
class Session:
    """One session of one agent."""

    id: str
    number: int
    """In the order in which sessions were opened."""
    tenant: str
    group: str
    """Sessions of one tenant with the same key are siblings."""
    task: int | None
    idempotency_key: str | None
    opened_at: float
    touched_at: float
    state: State = "open"
    reward: float | None = None
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """By the number of the reply."""
    rewarded_at: float = 0.0
    first_version: int | None = None
    """The policy's version at the first sampled token. None: there is none."""
    num_replies: int = 0
    num_requests: int = 0
    """Requests to the model that are in progress."""

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    @property
    def siblings(self) -> tuple[str, str]:
        """Equal for the sessions of one group."""
        return self.tenant, self.group


@dataclass
class Quota:
    """What a tenant may have at once."""

    max_sessions: int
    max_requests: int


class Book:
    """All sessions of one gateway."""

    def __init__(
        self,
        *,
        secret: bytes,
        quotas: Mapping[str, Quota],
        group_size: int,
        max_off_policy_steps: int,
        session_timeout: float,
        group_timeout: float,
        max_sessions: int,
        max_waiting: int,
        max_turns: int,
    ) -> None:
        """``secret`` signs the names of sessions: a name that was never given out is unknown, and
        one that is no longer in the book is gone."""
        self._secret = secret
        self.quotas = quotas
        self.group_size = group_size
        self._max_off_policy_steps = max_off_policy_steps
        self._session_timeout = session_timeout
        self._group_timeout = group_timeout
        self._max_sessions = max_sessions
        self._max_waiting = max_waiting
        self._max_turns = max_turns
        self.sessions: dict[str, Session] = {}
        """Open, rewarded and given sessions, by id."""
        self.ended: OrderedDict[str, Session] = OrderedDict()
        """Ended sessions, oldest first."""
        self._opened: dict[tuple[str, str], str] = {}
        """Ids by tenant and idempotency key."""
        self._waiting: dict[tuple[str, str], list[Session]] = {}
        """Rewarded sessions by tenant and group, in the order of their rewards."""
        self._gone: list[Session] = []
        self._number = 0
        self._open = Counter[str]()
        """Open sessions by tenant."""
        self.requests = Counter[str]()
        """Requests in progress by tenant."""
        self.counts = Counter[str]()
        """Sessions that came into a state."""

    # -- names ------------------------------------------------------------------------------------

    def _sign(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:16]

    def session_key(self, session_id: str) -> str:
        """The key of one session: it opens the model's routes, and posts no reward."""
        signature = hmac.new(self._secret, b"key " + session_id.encode(), hashlib.sha256)
        return f"sk-session-{signature.hexdigest()[:40]}"

    def find(self, session_id: str, tenant: str | None) -> Session:
        """``tenant``: None for the session's own key. Raises ``Refused``: 404 for a name that was
        never given out, or is another tenant's; 410 for one that is forgotten."""
        session = self.sessions.get(session_id) or self.ended.get(session_id)
        if session is None:
            name, _, signature = session_id.rpartition("-")
            if name.isascii() and hmac.compare_digest(
                self._sign(name).encode(), signature.encode("utf-8", "replace")
            ):
                raise Refused(410, f"session {session_id!r} is gone. Open another one.")
        if session is None or tenant not in (None, session.tenant):
            raise Refused(
                404, f"there is no session {session_id[:80]!r}. POST /sessions opens one."
            )
        return session

    # -- opening ----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Rewarded sessions that no group has got."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_open(self) -> int:
        return self._open.total()

    def open(
        self,
        tenant: str,
        now: float,
        *,
        task: int | None = None,
        group: str | None = None,
        idempotency_key: str | None = None,
    ) -> Session:
        """A new session, or the one that was opened with the same ``idempotency_key``. Raises
        ``Refused``."""
        known = None
        if idempotency_key is not None:
            known = self._opened.get((tenant, idempotency_key))
        if known is not None:
            session = self.find(known, tenant)
            if session.task != task or group not in (None, session.group):
                raise Refused(
                    409, "the Idempotency-Key opened a session with another task or group."
                )
            return session

        if group is None and task is not None:
            group = f"task {task}"
        # A sibling of sessions that wait may complete their group.
        completes = (tenant, group) in self._waiting
        if self.num_waiting >= self._max_waiting and not completes:
            text = (
                f"{self.num_waiting} rewarded sessions wait for the trainer, or for siblings "
                "(max_waiting)"
            )
            raise Refused(503, f"{text}. Try again later.", retry=True)
        if self.num_open >= self._max_sessions:
            text = f"{self.num_open} sessions are open (max_sessions)"
            raise Refused(503, f"{text}. Close some, or try again later.", retry=True)
        quota = self.quotas[tenant].max_sessions
        if self._open[tenant] >= quota:
            text = f"tenant {tenant!r} has {quota} open sessions (its max_sessions)"
            raise Refused(429, f"{text}. Close some, or try again later.", retry=True)

        if group is None and self.group_size > 1:
            raise Refused(
                400,
                f'this run compares groups of {self.group_size} sessions: give "group", a text '
                'that sessions with the same task share, or "task". Or train with an algorithm '
                "without siblings and orchestrator.group_size = 1.",
            )

        self._number += 1
        name = f"s{self._number}-{secrets.token_hex(8)}"
        session = Session(
            id=f"{name}-{self._sign(name)}",
            number=self._number,
            tenant=tenant,
            group=f"session {name}" if group is None else group,
            task=task,
            idempotency_key=idempotency_key,
            opened_at=now,
            touched_at=now,
        )
        self.counts["opened"] += 1
        self._enter(session)
        return session

    def forget(self, session: Session) -> None:
        """A session that could not be written: as if it had not been opened."""
        del self.sessions[session.id]
        self._open[session.tenant] -= 1
        self.counts["opened"] -= 1
        if session.idempotency_key is not None:
            self._opened.pop((session.tenant, session.idempotency_key), None)

    def restore(self, session: Session) -> None:
        """A session that another process has left in a file."""
        self._number = max(self._number, session.number)
        self._enter(session)
        if session.state == "rewarded":
            self._waiting.setdefault(session.siblings, []).append(session)

    def _enter(self, session: Session) -> None:
        self.sessions[session.id] = session
        if session.is_open:
            self._open[session.tenant] += 1
        if session.idempotency_key is not None:
            self._opened[session.tenant, session.idempotency_key] = session.id

    # -- requests to the model --------------------------------------------------------------------

    def begin(self, session: Session, now: float) -> None:
        """A request to the model begins. Raises ``Refused``."""
        self.check_open(session)
        quota = self.quotas[session.tenant].max_requests
        if self.requests[session.tenant] >= quota:
            text = f"tenant {session.tenant!r} has {quota} requests in progress (its max_requests)"
            raise Refused(429, f"{text}. Try again later.", retry=True)
        if session.num_replies >= self._max_turns:
            raise Refused(400, f"the session has {self._max_turns} replies (max_turns).")
        session.touched_at = now
        session.num_requests += 1
        self.requests[session.tenant] += 1

    def end(self, session: Session, now: float) -> None:
        """The request has its answer."""
        session.touched_at = now
        session.num_requests -= 1
        self.requests[session.tenant] -= 1

    @staticmethod
    def check_open(session: Session) -> None:
        """Raises ``Refused`` with 410."""
        if not session.is_open:
            raise Refused(410, f"session {session.id!r}: {WAYS_OUT[session.state]}.")

    # -- rewards ----------------------------------------------------------------------------------

    def reward(
        self,
        session: Session,
        now: float,
        *,
        version: int,
        reward: float | None,
        turn: int | None = None,
        final: bool = True,
    ) -> bool:
        """Note the reward of a reply, or of the session, which closes it: ``enqueue`` it when that
        is on disk. A reward that is there already changes nothing, whatever has become of the
        session. Returns whether something has changed. Raises ``Refused``."""
        if reward is not None and not (math.isfinite(reward) and abs(reward) <= LARGEST_REWARD):
            size = f"a finite number, at most {LARGEST_REWARD:g} in size"
            raise Refused(400, f"reward: got {reward!r}, expected {size}.")
        if turn is not None and not 0 <= turn < session.num_replies:
            replies = f"the session has {session.num_replies} replies, counted from 0"
            raise Refused(400, f"turn: got {turn}, and {replies}.")
        if turn is not None and reward is None:
            raise Refused(400, "reward: a turn needs one.")
        if session.reward is not None:
            return self._same_again(session, reward, turn)

        self.check_open(session)
        if session.num_replies == 0:
            raise Refused(409, "the session has no reply yet: there is nothing to train.")
        self._check_age(session, version)
        session.touched_at = now
        is_new = turn not in session.turn_rewards
        if turn is not None and reward is not None:
            before = session.turn_rewards.setdefault(turn, reward)
            if before != reward:
                raise Refused(409, f"reply {turn} has the reward {before!r} already.")
        if not final:
            return is_new

        if turn is None and reward is not None:
            session.reward = reward
        elif session.turn_rewards:
            session.reward = math.fsum(session.turn_rewards.values())
        else:
            raise Refused(400, "reward: the session has none, and neither has one of its replies.")
        session.rewarded_at = now
        self._move(session, "rewarded")
        return True

    def enqueue(self, session: Session) -> None:
        """The reward of a session is on disk: the session waits for its group."""
        self._waiting.setdefault(session.siblings, []).append(session)

    def reopen(self, session: Session) -> None:
        """The reward of a session could not be written: as if it had not come."""
        session.state = "open"
        session.reward = None
        self._open[session.tenant] += 1

    @staticmethod
    def _same_again(session: Session, reward: float | None, turn: int | None) -> bool:
        before = session.reward if turn is None else session.turn_rewards.get(turn)
        if reward is not None and reward != before:
            whose = "the session" if turn is None else f"reply {turn}"
            raise Refused(
                409, f"{whose} has the reward {before!r} already, got {reward!r}; it is closed."
            )
        return False

    def _check_age(self, session: Session, version: int) -> None:
        age = _age(session, version)
        if age > self._max_off_policy_steps:
            self._move(session, "stale")
            raise Refused(
                410,
                f"session {session.id!r}: its first reply is {age} versions old, and at most "
                f"{self._max_off_policy_steps} may train (orchestrator.max_off_policy_steps).",
            )

    def discard(self, session: Session) -> bool:
        """Delete an open session. Returns whether it was open. Raises ``Refused`` for a rewarded
        one."""
        if session.state in REWARDED:
            raise Refused(409, f"session {session.id!r}: {WAYS_OUT[session.state]}.")
        was_open = session.is_open
        if was_open:
            self._move(session, "discarded")
        return was_open

    # -- groups -----------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        """Whole groups that wait."""
        return sum(len(waiting) // self.group_size for waiting in self._waiting.values())

    def next_group(self, now: float, version: int) -> list[Session]:
        """The sessions of the next group, which are given then; empty if none is complete. A whole
        group comes before one that has waited for ``group_timeout``; of both kinds the one that
        was rewarded first."""
        self._drop_stale(version)
        key = self._next_key(now)
        if key is None:
            return []
        waiting = self._waiting[key]
        members = waiting[: self.group_size]
        del waiting[: self.group_size]
        if not waiting:
            del self._waiting[key]
        for session in members:
            self._move(session, "given")
        return members

    def _next_key(self, now: float) -> tuple[str, str] | None:
        whole = [key for key, each in self._waiting.items() if len(each) >= self.group_size]
        if whole:
            return min(whole, key=lambda key: self._waiting[key][self.group_size - 1].rewarded_at)
        late = [
            key
            for key, waiting in self._waiting.items()
            if now - waiting[0].rewarded_at >= self._group_timeout
        ]
        for key in late:
            if len(self._waiting[key]) == 1:
                (session,) = self._waiting.pop(key)
                self._move(session, "alone")
        late = [key for key in late if key in self._waiting]
        return min(late, key=lambda key: self._waiting[key][0].rewarded_at, default=None)

    def _drop_stale(self, version: int) -> None:
        for key, waiting in [*self._waiting.items()]:
            old = [
                session
                for session in waiting
                if _age(session, version) > self._max_off_policy_steps
            ]
            for session in old:
                waiting.remove(session)
                self._move(session, "stale")
            if not waiting:
                del self._waiting[key]

    def give_back(self, members: list[Session]) -> None:
        """A group that was given has not arrived."""
        for session in members:
            if session.state == "given":
                session.state = "rewarded"
                self._waiting.setdefault(session.siblings, []).append(session)

    def fail(self, session: Session) -> None:
        """A given session cannot train."""
        self._move(session, "failed")

    def settle(self, session_id: str, state: State = "taken") -> None:
        """A group with this session is scored, or rejected. Nothing happens if it is in no
        book."""
        session = self.sessions.get(session_id)
        if session is not None and session.state in ("given", "rewarded"):
            waiting = self._waiting.get(session.siblings, [])
            if session in waiting:  # after a restart: a checkpoint has it
                waiting.remove(session)
                if not waiting:
                    del self._waiting[session.siblings]
            self._move(session, state)

    # -- time -------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Session]:
        """Close the sessions that neither a request nor a reward has reached in time."""
        late = [
            session
            for session in self.sessions.values()
            if session.is_open
            and not session.num_requests
            and now - session.touched_at > self._session_timeout
        ]
        for session in late:
            self._move(session, "expired")
        return late

    def take_gone(self) -> list[Session]:
        """The sessions that have ended without training since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def _move(self, session: Session, state: State) -> None:
        if session.is_open:
            self._open[session.tenant] -= 1
        session.state = state
        self.counts[state] += 1
        if state in ("rewarded", "given"):
            return
        self.sessions.pop(session.id, None)
        self.ended[session.id] = session
        if state in ENDED:
            self._gone.append(session)
        while len(self.ended) > KEPT_ENDED:
            _, oldest = self.ended.popitem(last=False)
            if oldest.idempotency_key is not None:
                self._opened.pop((oldest.tenant, oldest.idempotency_key), None)

    def status(self, session: Session) -> dict[str, Any]:
        """What a tenant may know of a session."""
        return {
            "id": session.id,
            "status": session.state,
            "group": session.group,
            "task": session.task,
            "replies": session.num_replies,
            "reward": session.reward,
            "turn_rewards": {str(turn): value for turn, value in session.turn_rewards.items()},
            "policy_version": session.first_version,
        }


def _age(session: Session, version: int) -> int:
    """Versions between the first sampled token and ``version``; 0 if the engine has named none."""
    return 0 if session.first_version is None else version - session.first_version
