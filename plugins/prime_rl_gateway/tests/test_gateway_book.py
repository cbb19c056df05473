"""The book of sessions: states, groups, quotas and time, without HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl_gateway.book import REWARDED, Book, Quota, Refused, Session

SETTINGS: dict[str, Any] = {
    "secret": b"secret",
    "quotas": {"a": Quota(3, 2), "b": Quota(100, 100)},
    "group_size": 1,
    "max_off_policy_steps": 2,
    "session_timeout": 100.0,
    "group_timeout": 50.0,
    "max_sessions": 50,
    "max_waiting": 20,
    "max_turns": 4,
}


def book(**changed: Any) -> Book:
    return Book(**SETTINGS | changed)


def replied(made: Book, session: Session, version: int = 0, now: float = 0.0) -> Session:
    """A session with one more reply."""
    made.begin(session, now)
    made.end(session, now)
    session.num_replies += 1
    session.first_version = version if session.first_version is None else session.first_version
    return session


def rewarded(made: Book, reward: float = 1.0, now: float = 0.0, **asked: Any) -> Session:
    session = replied(made, made.open("b", now, **asked))
    made.reward(session, now, version=0, reward=reward)
    made.enqueue(session)
    return session


def status_of(call: Any, *arguments: Any, **named: Any) -> int:
    with pytest.raises(Refused) as refusal:
        call(*arguments, **named)
    return refusal.value.status


def test_a_group_is_complete_with_its_last_reward_and_given_once() -> None:
    made = book(group_size=2)
    first = rewarded(made, group="x")
    assert made.next_group(0.0, 0) == []
    second = rewarded(made, group="x")
    assert made.next_group(0.0, 0) == [first, second]
    assert made.next_group(0.0, 0) == []
    made.settle(first.id)
    assert (first.state, second.state) == ("taken", "given")


def test_sessions_of_two_tenants_are_no_siblings() -> None:
    made = book(group_size=2)
    rewarded(made, group="x")
    other = replied(made, made.open("a", 0.0, group="x"))
    made.reward(other, 0.0, version=0, reward=1.0)
    made.enqueue(other)
    assert made.next_group(0.0, 0) == []


def test_a_task_is_a_group_and_without_either_a_comparing_run_refuses() -> None:
    made = book(group_size=2)
    members = [rewarded(made, task=5) for _ in range(2)]
    assert made.next_group(0.0, 0) == members
    assert status_of(made.open, "b", 0.0) == 400
    assert book().open("b", 0.0).group.startswith("session ")


def test_a_group_that_waits_too_long_trains_with_those_it_has_and_one_alone_does_not() -> None:
    made = book(group_size=3)
    pair = [rewarded(made, group="pair", now=1.0), rewarded(made, group="pair", now=2.0)]
    single = rewarded(made, group="single", now=1.0)
    assert made.next_group(50.9, 0) == []
    assert made.next_group(51.0, 0) == pair
    assert single.state == "alone"


def test_a_session_that_is_too_old_is_dropped_and_says_so() -> None:
    made = book()
    session = rewarded(made)
    assert made.next_group(0.0, 3) == []
    assert session.state == "stale"
    late = replied(made, made.open("b", 0.0), version=0)
    assert status_of(made.reward, late, 0.0, version=3, reward=1.0) == 410
    assert status_of(made.begin, late, 0.0) == 410


def test_two_versions_behind_is_young_enough_for_a_run_that_allows_two() -> None:
    made = book()
    session = rewarded(made)
    assert made.next_group(0.0, 2) == [session]


def test_a_silent_session_expires_and_one_with_a_request_in_progress_does_not() -> None:
    made = book()
    silent, busy = made.open("b", 0.0), made.open("b", 0.0)
    made.begin(busy, 0.0)
    assert made.expire(100.0) == []
    assert made.expire(100.1) == [silent]
    assert made.num_open == 1
    assert status_of(made.reward, silent, 101.0, version=0, reward=1.0) == 410


def test_quotas_are_each_tenants_own() -> None:
    made = book()
    sessions = [made.open("a", 0.0) for _ in range(3)]
    assert status_of(made.open, "a", 0.0) == 429
    assert made.open("b", 0.0).is_open
    made.begin(sessions[0], 0.0)
    made.begin(sessions[1], 0.0)
    assert status_of(made.begin, sessions[2], 0.0) == 429
    made.end(sessions[0], 0.0)
    made.begin(sessions[2], 0.0)


def test_no_session_opens_while_the_trainer_is_behind() -> None:
    made = book(max_waiting=2)
    rewarded(made)
    rewarded(made)
    assert status_of(made.open, "b", 0.0) == 503
    made.next_group(0.0, 0)
    assert made.open("b", 0.0).is_open


def test_rewards_of_turns_add_up_and_may_come_in_any_order() -> None:
    made = book()
    session = replied(made, replied(made, made.open("b", 0.0)))
    assert made.reward(session, 0.0, version=0, reward=0.5, turn=1, final=False)
    assert not made.reward(session, 0.0, version=0, reward=0.5, turn=1, final=False)
    assert made.reward(session, 0.0, version=0, reward=0.25, turn=0, final=True)
    assert session.reward == 0.75
    assert session.turn_rewards == {0: 0.25, 1: 0.5}


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"reward": float("nan")}, 400),
        ({"reward": float("inf")}, 400),
        ({"reward": 1e19}, 400),
        ({"reward": 1.0, "turn": 1}, 400),
        ({"reward": 1.0, "turn": -1}, 400),
        ({"reward": None, "turn": 0}, 400),
        ({"reward": None}, 400),
    ],
)
def test_a_reward_that_means_nothing_is_refused(asked: dict[str, Any], status: int) -> None:
    made = book()
    session = replied(made, made.open("b", 0.0))
    assert status_of(made.reward, session, 0.0, version=0, **asked) == status
    assert session.is_open


def test_a_reward_before_the_first_reply_is_refused() -> None:
    made = book()
    assert status_of(made.reward, made.open("b", 0.0), 0.0, version=0, reward=1.0) == 409


def test_the_same_reward_again_is_no_change_and_another_one_is_refused() -> None:
    made = book()
    session = rewarded(made, reward=0.5)
    for state in ("rewarded", "given", "taken"):
        assert session.state == state
        assert not made.reward(session, 9.0, version=90, reward=0.5)
        assert status_of(made.reward, session, 9.0, version=90, reward=0.6) == 409
        if state == "rewarded":
            made.next_group(9.0, 0)
        elif state == "given":
            made.settle(session.id)


def test_an_unknown_name_is_not_found_and_a_forgotten_one_is_gone() -> None:
    made = book()
    session = made.open("b", 0.0)
    assert made.find(session.id, "b") is session
    assert made.find(session.id, None) is session
    assert status_of(made.find, session.id, "a") == 404
    assert status_of(made.find, session.id[:-1] + "x", "b") == 404
    assert status_of(made.find, "ä-ö", "b") == 404
    assert status_of(book().find, session.id, "b") == 410
    assert status_of(book(secret=b"other").find, session.id, "b") == 404


def test_an_idempotency_key_opens_one_session() -> None:
    made = book()
    first = made.open("b", 0.0, group="x", idempotency_key="k")
    assert made.open("b", 0.0, group="x", idempotency_key="k") is first
    assert made.open("a", 0.0, group="x", idempotency_key="k") is not first
    assert status_of(made.open, "b", 0.0, group="y", idempotency_key="k") == 409


def test_sessions_without_an_idempotency_key_differ_though_one_has_an_empty_key() -> None:
    made = book()
    first = made.open("b", 0.0, group="x", idempotency_key="")
    assert made.open("b", 0.0, group="x", idempotency_key="") is first
    assert made.open("b", 0.0, group="x") is not first


def test_a_session_without_end_is_stopped_by_its_number_of_replies() -> None:
    made = book()
    session = made.open("b", 0.0)
    for _ in range(4):
        replied(made, session)
    assert status_of(made.begin, session, 0.0) == 400


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "reply", "reward", "again", "next", "take", "back", "expire"]),
        st.integers(0, 11),
        st.sampled_from(["x", "y", "z"]),
    ),
    max_size=80,
)


@given(OPERATIONS, st.integers(1, 3))
@settings(deadline=None, derandomize=True, max_examples=150)
def test_whatever_clients_do_each_rewarded_session_is_given_once(
    operations: list[tuple[str, int, str]], group_size: int
) -> None:
    made = book(group_size=group_size, max_off_policy_steps=10**6)
    sessions: list[Session] = []
    groups: list[list[Session]] = []
    now = 0.0
    for operation, number, group in operations:
        now += 1.0
        session = sessions[number % len(sessions)] if sessions else None
        try:
            if operation == "open":
                sessions.append(made.open("b", now, group=group))
            elif operation == "next" and (given := made.next_group(now, 0)):
                groups.append(given)
            elif operation == "back" and groups:
                made.give_back(groups.pop())
            elif operation == "expire":
                now += 60.0
                made.expire(now)
            elif session is not None and operation == "reply":
                replied(made, session, now=now)
            elif session is not None and operation == "reward":
                if made.reward(session, now, version=0, reward=float(number)):
                    made.enqueue(session)
            elif session is not None and operation == "take" and session.state == "given":
                made.settle(session.id)
        except Refused:
            pass

        given_now = [each for members in groups for each in members]
        assert len({each.id for each in given_now}) == len(given_now)
        assert all(each.state in ("given", "taken") for each in given_now)
        waiting = [each for each in sessions if each.state == "rewarded"]
        assert made.num_waiting == len(waiting)
        assert made.num_open == sum(each.is_open for each in sessions)
        for members in groups:
            assert len({each.group for each in members}) == 1
            assert 1 <= len(members) <= group_size

    for session in sessions:
        assert (session.reward is not None) == (session.state in (*REWARDED, "alone"))


def test_a_sibling_that_completes_a_waiting_group_opens_though_many_wait() -> None:
    made = book(group_size=2, max_waiting=3)
    for number in range(3):
        rewarded(made, group=f"g{number}")
    assert status_of(made.open, "b", 0.0, group="another") == 503
    rewarded(made, group="g0")
    assert made.num_ready == 1


def test_a_session_whose_engine_names_no_version_is_never_stale() -> None:
    made = book()
    session = made.open("b", 0.0)
    session.num_replies = 1
    made.reward(session, 0.0, version=9, reward=1.0)
    made.enqueue(session)
    assert made.next_group(0.0, 9) == [session]


def test_a_rejected_session_is_settled_and_its_reward_may_be_repeated() -> None:
    made = book()
    session = rewarded(made)
    made.next_group(0.0, 0)
    made.settle(session.id, "rejected")
    assert session.state == "rejected"
    assert session.id not in made.sessions
    assert not made.reward(session, 0.0, version=0, reward=1.0)


def test_a_session_that_could_not_be_written_leaves_nothing_behind() -> None:
    made = book()
    session = made.open("b", 0.0, group="x", idempotency_key="k")
    made.forget(session)
    assert (made.num_open, made.counts["opened"]) == (0, 0)
    assert made.open("b", 0.0, group="y", idempotency_key="k") is not session
