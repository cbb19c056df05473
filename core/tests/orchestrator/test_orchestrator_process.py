"""The orchestrator's process: how it ends."""

import asyncio
import os
import signal
from contextlib import suppress

import msgspec
import pytest

from prime_rl.config.run import RunConfig
from prime_rl.errors import EngineError, RunError
from prime_rl.orchestrator import __main__ as process
from prime_rl.orchestrator.__main__ import ENDED
from prime_rl.plugins.status import read_status
from prime_rl.registry.calls import running
from prime_rl.rundir.control import STOP
from prime_rl.rundir.directory import new_attempt
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import DONE, Status


@pytest.fixture
def run_dir(tmp_path):
    new_attempt(tmp_path)
    launch = Launch(
        model_path="m",
        served_model_name="m",
        engine_urls=[],
        transport_type="files",
        transport_host="",
        transport_ports=[],
    )
    launch.write(tmp_path)
    return tmp_path


@pytest.fixture
def codes(monkeypatch):
    """The exit codes of processes whose closing hangs."""
    codes = []
    monkeypatch.setattr(process, "_exit_within", lambda seconds, code: codes.append(code))
    return codes


@pytest.fixture
def run(run_dir, monkeypatch):
    """Runs the orchestrator with another way of being built."""

    async def run_with(build, during=None):
        async def build_it(stack, run):
            return await build()

        monkeypatch.setattr(process, "_build", build_it)
        status = Status(run_dir / "status" / "orchestrator.json")
        config = RunConfig(model={"name": "m"}, max_steps=1)
        task = asyncio.create_task(process._run(run_dir, config, status))
        if during is not None:
            await during(task)
        with pytest.raises((asyncio.CancelledError, EngineError)):
            await task
        return status.last

    return run_with


async def test_a_stop_while_starting_ends_with_code_0_also_where_closing_hangs(run, run_dir, codes):
    async def build():
        (run_dir / STOP).touch()
        await asyncio.Event().wait()

    last = await run(build)
    assert (last.state, last.detail["last_step"]) == (DONE, 0)
    assert codes == [0]


async def test_a_start_that_fails_ends_with_code_1_also_where_closing_hangs(run, codes):
    async def build():
        raise EngineError("no engine answers")

    assert (await run(build)).state == "failed"
    assert codes == [1]


async def test_the_orchestrator_is_hidden_before_programs_of_rollouts_run(run, monkeypatch, codes):
    order = []

    class Loop:
        async def run(self, stop):
            order.append("rollouts")
            raise EngineError("over")

    async def build():
        return Loop()

    monkeypatch.setattr(process, "hide_from_others", lambda: order.append("hidden"))
    await run(build)
    assert order == ["hidden", "rollouts"]


async def test_a_taskset_that_cannot_be_imported_fails_before_the_model_is_waited_for(
    run_dir, tmp_path, monkeypatch
):
    (tmp_path / "needs_a_helper.py").write_text("import a_helper_beside_the_script")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "_build", pytest.fail)  # which waits for the model first
    table = {"train": {"env": [{"id": "needs-a-helper", "name": "a"}]}}
    config = RunConfig(model={"name": "m"}, max_steps=1, orchestrator=table)
    assert await process._supervised(run_dir, config) == 1
    error = read_status(run_dir / "status" / "orchestrator.json").detail["error"]
    assert error.startswith("env 'a': ")
    assert "(No module named 'a_helper_beside_the_script') (line 1 of " in error
    assert "The processes of a run" in error
    assert "PYTHONPATH" in error


@pytest.mark.parametrize("how", ["terminated", "cancelled_inside", "stopped_first", "failed"])
async def test_the_exit_code_tells_a_run_that_is_done_from_one_that_was_ended(
    run_dir, monkeypatch, how
):
    async def run_it(run_dir, config, status):
        if how == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        if how == "failed":
            raise EngineError("no engine answers")
        if how == "stopped_first":
            status.report(DONE, last_step=0)
        raise asyncio.CancelledError

    monkeypatch.setattr(process, "_run", run_it)
    config = RunConfig.model_validate({"model": {"name": "m"}, "max_steps": 1})
    loop = asyncio.get_running_loop()
    try:
        code = await process._supervised(run_dir, config)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.set_exception_handler(None)
    expected = {"terminated": ENDED, "cancelled_inside": 1, "stopped_first": 0, "failed": 1}
    assert code == expected[how]
    report = read_status(run_dir / "status" / "orchestrator.json")
    error = None if report is None else report.detail.get("error")
    assert error == {
        "cancelled_inside": "an environment or a plugin raised CancelledError, or cancelled all "
        "tasks",
        "failed": "no engine answers",
    }.get(how)


def test_an_error_of_a_plugin_is_reported_with_its_name(run_dir):
    status = Status(run_dir / "status" / "orchestrator.json")

    class Odd:
        pass

    error = RunError("no score")
    with suppress(RunError), running("odd", hook="score_group", owner=Odd()):
        raise error
    process._report(error, status)
    assert status.last.detail["error"] == "plugin 'odd', score_group: no score"


def test_a_stop_while_starting_names_the_step_before_the_first(run_dir):
    async def stopped():
        status = Status(run_dir / "status" / "orchestrator.json")
        launch = msgspec.structs.replace(Launch.read(run_dir), first_step=5)
        stop = asyncio.ensure_future(asyncio.sleep(0))
        try:
            with process._cancelled_by(stop, launch, status):
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            return status.last

    last = asyncio.run(stopped())
    assert (last.state, last.detail["last_step"]) == (DONE, 4)
