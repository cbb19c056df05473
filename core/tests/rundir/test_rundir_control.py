"""The record of a run's supervisor."""

import os
import socket

import pytest
from waiting import exists

from prime_rl import RunError
from prime_rl.rundir.control import Supervisor, start_of, supervised


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
