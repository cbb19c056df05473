"""How a process of a run starts."""

import gc

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
