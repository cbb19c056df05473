"""The time limit of episodes counts only time in which the engines are awake."""

from __future__ import annotations

import asyncio

import pytest
from waiting import Clock, skipping

from prime_rl.env.limits import AwakeTime


async def lasts(awake: AwakeTime, seconds: float, limit: float | None) -> float:
    """When an episode of so many seconds ended, or timed out."""
    try:
        async with awake.limit(limit):
            await asyncio.sleep(seconds)
    except TimeoutError as error:
        text = f"the episode exceeded its limit of {limit} s (timeout in the env's table)"
        assert str(error) == text
        return -asyncio.get_running_loop().time()
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("seconds", "limit", "end"),
    [
        (9, None, 1009),
        (5, 600, 1005),
        (5, 5.5, 1005),
        (9, 2, -1005),  # 1 s before they sleep at 1001, and 1 s after 1004
        (9, 0.5, -1000.5),
        (4.5, 1.75, 1004.5),  # it ends with 0.25 s left
    ],
)
def test_a_limit_stands_still_while_the_engines_sleep(
    seconds: float, limit: float | None, end: float
) -> None:
    async def main() -> float:
        awake = AwakeTime()
        playing = asyncio.create_task(lasts(awake, seconds, limit))
        await asyncio.sleep(1)
        awake.stop()
        awake.stop()  # as a batch after a version that was skipped
        await asyncio.sleep(3)
        awake.go_on()
        awake.go_on()
        return await playing

    assert skipping(Clock(), main) == end


def test_an_episode_that_begins_while_the_engines_sleep_has_all_of_its_time() -> None:
    async def main() -> float:
        awake = AwakeTime()
        awake.stop()
        playing = asyncio.create_task(lasts(awake, 9, 2))
        await asyncio.sleep(3)
        awake.go_on()
        return await playing

    assert skipping(Clock(), main) == -1005


def test_an_episode_that_does_not_end_at_its_limit_delays_no_other() -> None:
    """Its code has caught the cancellation when the engines fall asleep, and when they wake."""

    async def stubborn(awake: AwakeTime) -> None:
        async with awake.limit(1):
            try:
                await asyncio.sleep(9)
            except asyncio.CancelledError:
                await asyncio.sleep(9)
                raise

    async def main() -> tuple[float, BaseException]:
        awake = AwakeTime()
        late = asyncio.create_task(stubborn(awake))
        playing = asyncio.create_task(lasts(awake, 9, 4))
        await asyncio.sleep(2)
        awake.stop()
        await asyncio.sleep(3)
        awake.go_on()
        end = await playing
        (error,) = await asyncio.gather(late, return_exceptions=True)
        assert isinstance(error, BaseException)
        return end, error

    end, error = skipping(Clock(), main)
    assert end == -1007 and isinstance(error, TimeoutError)


async def test_a_time_out_of_the_episodes_own_keeps_its_text() -> None:
    with pytest.raises(TimeoutError, match=r"^the tool$"):
        async with AwakeTime().limit(60.0):
            raise TimeoutError("the tool")
