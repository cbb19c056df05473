"""Models made here: cached whole, one for each set of settings, nothing left by a crash."""

import os
import signal
import subprocess
import sys
import time

import pytest

from prime_rl import ModelMaker, PluginConfig
from prime_rl.run.launch import READY, wait_for_model
from prime_rl.run.models import cache_dir, cached_path, make
from prime_rl.run.status import Status, read_status


class Settings(PluginConfig):
    width: int = 8


class Tiny(ModelMaker):
    name = "tiny"
    config_class = Settings

    def make(self, directory, seed, progress):
        assert list(directory.iterdir()) == []
        progress("warming up", 0.5)
        (directory / "config.json").write_text(str(seed))


class Breaks(Tiny):
    def make(self, directory, seed, progress):
        (directory / "half").touch()
        raise RuntimeError("no memory")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_one_folder_for_each_set_of_settings_seed_and_version():
    base = cached_path(Tiny(Settings()), "1.0", 0)
    assert base.parent == cache_dir() and base.name.startswith("tiny-")
    assert base == cached_path(Tiny(Settings(width=8)), "1.0", 0)
    others = {
        cached_path(Tiny(Settings(width=9)), "1.0", 0),
        cached_path(Tiny(Settings()), "1.1", 0),
        cached_path(Tiny(Settings()), "1.0", 1),
    }
    assert len(others | {base}) == 4


def test_the_cache_follows_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PRIME_RL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "prime-rl" / "models"


def test_a_made_model_is_whole_and_alone(cache):
    status = cache.parent / "model.json"
    make(Tiny(Settings()), cache / "m", 3, Status(status))
    assert (cache / "m" / "config.json").read_text() == "3" and (cache / "m" / READY).exists()
    assert [entry.name for entry in cache.iterdir()] == ["m"]
    assert (read_status(status).state, read_status(status).progress) == ("warming up", 0.5)


def test_a_maker_that_fails_leaves_nothing(cache):
    with pytest.raises(RuntimeError, match="no memory"):
        make(Breaks(Settings()), cache / "m", 0, Status(None))
    assert list(cache.iterdir()) == []


def test_another_process_may_be_faster(cache):
    class Overtaken(Tiny):
        def make(self, directory, seed, progress):
            super().make(directory, seed, progress)
            make(Tiny(Settings()), cache / "m", 1, Status(None))

    make(Overtaken(Settings()), cache / "m", 2, Status(None))
    assert (cache / "m" / "config.json").read_text() == "1"  # the first stays
    assert [entry.name for entry in cache.iterdir()] == ["m"]


def test_a_folder_in_the_way_that_is_no_model_is_an_error(cache):
    (cache / "m").mkdir(parents=True)
    (cache / "m" / "stray").touch()
    with pytest.raises(OSError, match="not empty"):
        make(Tiny(Settings()), cache / "m", 0, Status(None))


MAKER = """
import sys, time
from pathlib import Path
from prime_rl import ModelMaker, PluginConfig
from prime_rl.run import models
from prime_rl.run.status import Status

class Slow(ModelMaker):
    name = "slow"
    def make(self, directory, seed, progress):
        (directory / "config.json").write_text("{}")
        print("half", flush=True)
        time.sleep(float(sys.argv[2]))
"""


def maker(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", MAKER + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_makers_side_by_side_give_one_whole_model(cache):
    code = "models.make(Slow(PluginConfig()), Path(sys.argv[1]), 0, Status(None))"
    processes = [maker(code, cache / "m", 0.2) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [entry.name for entry in cache.iterdir()] == ["m"]
    assert (cache / "m" / READY).exists()


def test_a_maker_that_is_asked_to_end_leaves_nothing(cache, tmp_path):
    """As when a user presses Ctrl-C while the model is being made."""
    code = f"""
models.build_model_maker = lambda config, hooks: Slow(PluginConfig())
models.load_plugins = lambda disabled: None
class Launch:
    model_path = {str(cache / "m")!r}
    read = classmethod(lambda cls, run_dir: cls)
models.Launch = Launch
sys.argv[1] = {str(tmp_path / "run")!r}
models.main()
"""
    (tmp_path / "run" / "configs").mkdir(parents=True)
    (tmp_path / "run" / "status").mkdir()
    (tmp_path / "run" / "configs" / "run.json").write_text(
        '{"model": {"name": "slow"}, "max_steps": 1}'
    )
    process = maker(code, "", 600)
    assert process.stdout.readline() == "half\n"
    assert len(list(cache.iterdir())) == 1
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 143
    process.stdout.close()
    assert list(cache.iterdir()) == []


async def test_waiting_for_a_model_ends_when_it_is_whole(tmp_path):
    import asyncio

    waiting = asyncio.create_task(wait_for_model(tmp_path / "m", poll=0.01))
    (tmp_path / "m").mkdir()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    (tmp_path / "m" / READY).touch()
    start = time.monotonic()
    await waiting
    assert time.monotonic() - start < 30
