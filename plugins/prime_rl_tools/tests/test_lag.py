"""The delay of the event loop, measured by blocking it."""

import asyncio
import time
from types import SimpleNamespace

from prime_rl import PluginConfig
from prime_rl_tools.lag import LAG_SECONDS, EventLoopLag


async def test_blocking_the_event_loop_shows_as_lag():
    lag = EventLoopLag(PluginConfig(), SimpleNamespace())
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(LAG_SECONDS + 0.2)  # blocks the event loop
    await asyncio.sleep(0.01)
    task.cancel()
    found = lag.take_metrics()
    assert found["event_loop_lag/max"] >= 0.19
    assert found["event_loop_lag/n"] >= 1
    assert lag.take_metrics() == {}
