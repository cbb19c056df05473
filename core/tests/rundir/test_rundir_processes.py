"""How a process of a run starts."""

import gc
import subprocess
import sys

import pytest

from prime_rl.rundir.processes import lasting_imports


@pytest.fixture(autouse=True)
def collector():
    """Put back as it was."""
    yield
    gc.enable()


def tracked(value):
    """Whether collections walk it."""
    return any(each is value for each in gc.get_objects())


def test_lasting_imports_disable_collection_and_freeze_the_new_objects():
    with lasting_imports():
        collecting, made = gc.isenabled(), [[]]
        assert tracked(made)
    assert not collecting and gc.isenabled()
    assert not tracked(made)
    later = [[]]
    assert tracked(later)


def test_an_import_that_fails_leaves_the_collector_on():
    with pytest.raises(ImportError), lasting_imports():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with lasting_imports(), lasting_imports():
        pass
    assert not gc.isenabled()


ASK = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)"  # PR_GET_DUMPABLE


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_a_process_hides_its_memory_and_environment_but_not_those_of_its_children():
    code = (
        "import subprocess, sys; from prime_rl.rundir.processes import hide_from_others\n"
        f"hide_from_others()\n{ASK}\nsubprocess.run([sys.executable, '-c', {ASK!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1"]
