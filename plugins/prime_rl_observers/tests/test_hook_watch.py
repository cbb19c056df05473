"""Hooks that do not return and hooks that block are named. The clock is the test's."""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl import Algorithm, PluginConfig, hookimpl
from prime_rl.registry.calls import RUNNING
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rundir.status import Status
from prime_rl.testing import make_group
from prime_rl_observers.hooks import HookWatch, HookWatchConfig


class Passes:
    @hookimpl(wrapper=True)
    def score_group(self, group: Any) -> Any:
        yield


class Hangs(Algorithm):
    name = "hangs"

    @hookimpl
    async def score_group(self, group: Any) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def watch() -> HookWatch:
    run = SimpleNamespace(status=Status(None))
    host = SimpleNamespace(shared=SimpleNamespace(run=run), num_waiting=lambda: 24)
    return HookWatch(HookWatchConfig(waits=30, blocks=1), host)  # type: ignore[arg-type]


async def test_a_hook_that_hangs_is_named_with_the_rollouts_that_wait(
    watch: HookWatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    hooks = scope("math", Hooks(), [Passes(), Hangs(PluginConfig())])
    task = asyncio.create_task(hooks.score_group(make_group([1.0, 0.0])))
    await asyncio.sleep(0)
    wrapper, call = RUNNING.values()
    assert (wrapper.plugin, call.plugin) == ("Passes", "hangs")
    for seconds in (29, 31, 61, 63):  # named after 30 s, again after twice 31 s
        watch._beat = call.started + seconds
        watch.look(call.started + seconds, None, threading.get_ident())
    told = [record.getMessage() for record in caplog.records]
    head = "plugin 'hangs', score_group, env 'test', group 0 has not returned for"
    assert [text.split(";")[0] for text in told] == [f"{head} 31 s", f"{head} 63 s"]
    assert all("; 24 rollouts wait." in text for text in told)
    assert watch.host.shared.run.status.last.waiting_for == told[-1]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert RUNNING == {}


def test_a_hook_that_blocks_is_named_with_its_line(
    watch: HookWatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Blocks(Algorithm):
        name = "blocks"

        @hookimpl
        def score_group(self, group: Any) -> None:
            (call,) = RUNNING.values()
            watch._beat = call.started
            own = threading.get_ident()
            for seconds in (0.9, 1.5, 2.5):  # named once: 2.5 is not yet twice 1.5
                watch.look(call.started + seconds, call.task, own)

    hooks = scope("math", Hooks(), [Blocks(PluginConfig())])
    asyncio.run(hooks.score_group(make_group([1.0, 0.0])))
    (record,) = caplog.records
    text = record.getMessage()
    assert (
        "plugin 'blocks', score_group, env 'test', group 0 has blocked the event loop for 1.5 s"
        in text
    )
    assert "asyncio.to_thread" in text
