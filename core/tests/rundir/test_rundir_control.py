"""The record of a run's supervisor."""

import os
import socket

import pytest
from waiting import exists

from prime_rl import RunError
from prime_rl.rundir.checkpoints import CHECKSUMS, durable, finished
from prime_rl.rundir.control import Stop, Supervisor, start_of, supervised


def test_a_run_records_its_outcome(tmp_path):
    def ended(error):
        with supervised(tmp_path):
            assert Supervisor.read(tmp_path).state == "running"
            if error:
                raise error

    ended(None)
    assert Supervisor.read(tmp_path).state == "done"
    for error, state in ((RunError("it broke"), "failed"), (KeyboardInterrupt(), "stopped")):
        with pytest.raises(type(error)):
            ended(error)
        assert Supervisor.read(tmp_path).state == state
    assert Supervisor.read(tmp_path).pid == os.getpid()


def test_a_later_process_with_the_same_id_is_not_the_supervisor(tmp_path):
    mine = start_of(os.getpid())
    assert mine > 0 and exists(os.getpid())
    host = socket.gethostname()
    assert Supervisor(os.getpid(), host, mine).is_alive
    assert not Supervisor(os.getpid(), host, mine - 1).is_alive
    assert not Supervisor(os.getpid(), "elsewhere", mine).is_alive


# -- what a run that ends at once keeps ---------------------------------------------------------


def trained(run_dir, last, text=""):
    lines = "".join(f'{{"step": {step}}}\n' for step in range(1, last + 1))
    (run_dir / "trainer.jsonl").write_text(lines + text)


def saved(run_dir, step):
    folder = finished(run_dir, step).directory
    folder.mkdir(parents=True)
    (folder / CHECKSUMS).touch()


def test_what_is_durable_names_the_newest_checkpoint_and_the_steps_that_are_repeated(tmp_path):
    assert durable(tmp_path) == "no checkpoint yet"
    trained(tmp_path, 1)
    assert durable(tmp_path) == "no checkpoint yet; step 1 will be trained again"
    trained(tmp_path, 148)
    assert durable(tmp_path) == "no checkpoint yet; steps 1 to 148 will be trained again"
    saved(tmp_path, 9)
    saved(tmp_path, 37)
    assert durable(tmp_path) == "newest checkpoint: step 37; steps 38 to 148 will be trained again"
    saved(tmp_path, 148)
    assert durable(tmp_path) == "newest checkpoint: step 148"


@pytest.mark.parametrize("text", ['{"step": 4', '{"stop": 4}\n', "[]\n", "null\n", "[[[", "\udc80"])
def test_a_damaged_line_of_the_trainer_hides_no_message(tmp_path, text):
    trained(tmp_path, 3)
    with (tmp_path / "trainer.jsonl").open("a", errors="surrogateescape") as file:
        file.write(text)
    assert durable(tmp_path) == "no checkpoint yet; steps 1 to 3 will be trained again"


def test_a_stop_says_what_a_second_signal_would_lose(tmp_path):
    said = []
    trained(tmp_path, 5)
    saved(tmp_path, 2)
    stop = Stop(tmp_path, 1, lambda: True, said.append)
    assert stop.is_asked and stop.is_asked
    assert said == [
        "stopping: finishing the step and saving (a second signal ends the run at once)",
        "after a second signal: newest checkpoint: step 2; steps 3 to 5 will be trained again",
    ]
