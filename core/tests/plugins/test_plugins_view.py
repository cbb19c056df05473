"""The view of core, which prints lines."""

from prime_rl import PluginConfig, RunView
from prime_rl.rundir.control import Supervisor
from prime_rl.rundir.status import Status


def test_a_line_when_a_process_reports_another_state(tmp_path, capsys):
    folder = tmp_path / "status"
    folder.mkdir()
    Supervisor(1, "here", 0.0).write(tmp_path)  # no report of what a process does
    trainer, engine = (Status(folder / f"{name}.json") for name in ("trainer", "inference"))
    with RunView(PluginConfig(), tmp_path, 10) as view:
        engine.report("loading weights")
        trainer.report("waiting", waiting_for="batch 1")
        view.refresh()
        engine.report("loading weights", progress=0.5)
        trainer.report("training")
        view.refresh()
        view.print("a restart")
    view.ended()
    view.stopped(3, True, "prime-rl run a.toml")
    assert capsys.readouterr().out.splitlines() == [
        "inference: loading weights",
        "trainer: waiting (waits for batch 1)",
        "trainer: training",
        "a restart",
        f"done: {tmp_path}",
        f"stopped: {tmp_path}",
    ]
