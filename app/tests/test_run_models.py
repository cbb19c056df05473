"""Models made here: cached whole, one for each set of settings, nothing left by a crash."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from waiting import LIMIT

from prime_rl import ConfigError, ModelMaker, PluginConfig
from prime_rl.config.run import RunConfig
from prime_rl.plugins.status import read_status
from prime_rl.registry.manager import Hooks
from prime_rl.rundir.launch import READY, Launch, wait_for_model
from prime_rl.rundir.status import Status
from prime_rl_app import models
from prime_rl_app.models import cache_dir, cached_path, fetch, make, model_path
from prime_rl_app.supervisor import _failed


class Settings(PluginConfig):
    width: int = 8


class Tiny(ModelMaker):
    name = "tiny"
    config_class = Settings


def fills(text):
    """A maker's work: one file, into a folder that is empty."""

    def fill(directory):
        assert list(directory.iterdir()) == []
        (directory / "config.json").write_text(text)

    return fill


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIME_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_one_folder_for_each_set_of_settings_seed_and_version():
    base = cached_path(Tiny(Settings()), "1.0", 0, cache_dir())
    assert base.parent == cache_dir() and base.name.startswith("tiny-")
    assert base == cached_path(Tiny(Settings(width=8)), "1.0", 0, cache_dir())
    others = {
        cached_path(Tiny(Settings(width=9)), "1.0", 0, cache_dir()),
        cached_path(Tiny(Settings()), "1.1", 0, cache_dir()),
        cached_path(Tiny(Settings()), "1.0", 1, cache_dir()),
    }
    assert len(others | {base}) == 4


def test_the_cache_follows_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("PRIME_RL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "prime-rl" / "models"


def test_a_made_model_is_whole_and_alone(cache):
    make(fills("3"), cache / "m")
    assert (cache / "m" / "config.json").read_text() == "3" and (cache / "m" / READY).exists()
    assert [entry.name for entry in cache.iterdir()] == ["m"]


def test_an_incomplete_model_is_never_visible(cache):
    def fill(directory):
        fills("3")(directory)
        assert not (cache / "m").exists() and not (directory / READY).exists()

    make(fill, cache / "m")


def test_a_maker_that_fails_leaves_nothing(cache):
    def fill(directory):
        fills("3")(directory)
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        make(fill, cache / "m")
    assert list(cache.iterdir()) == []


def test_another_process_may_be_faster(cache):
    def overtaken(directory):
        fills("2")(directory)
        make(fills("1"), cache / "m")

    make(overtaken, cache / "m")
    assert (cache / "m" / "config.json").read_text() == "1"  # the first stays
    assert [entry.name for entry in cache.iterdir()] == ["m"]


def test_a_folder_in_the_way_that_is_no_model_is_an_error(cache):
    (cache / "m").mkdir(parents=True)
    (cache / "m" / "stray").touch()
    with pytest.raises(OSError, match="not empty"):
        make(fills("1"), cache / "m")
    assert [entry.name for entry in cache.iterdir()] == ["m"]


def run_of(name):
    return RunConfig.model_validate({"model": {"name": str(name)}, "max_steps": 1})


def test_a_folder_is_used_as_it_is(tmp_path, cache):
    (tmp_path / "config.json").write_text("{}")
    assert model_path(run_of(tmp_path), Hooks()) == (str(tmp_path), False)


def test_a_hub_model_is_fetched_once(cache):
    path, to_make = model_path(run_of("owner/name"), Hooks())
    assert to_make and path == str(cache / "hub--owner--name")
    make(fills("{}"), cache / "hub--owner--name")
    assert model_path(run_of("owner/name"), Hooks()) == (path, False)


def test_an_unreachable_hub_is_reported(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError) as caught:
        fetch("owner/name", tmp_path, Status(tmp_path / "model.json"))
    assert str(caught.value) == (
        "model.name: 'owner/name' is no folder here, and fetching it from the hub failed: no route"
    )
    assert read_status(tmp_path / "model.json").waiting_for == "Hugging Face hub"


MAKER = """
import sys, time
from pathlib import Path
from prime_rl import ModelMaker, PluginConfig
from prime_rl_app import models
from prime_rl.rundir.status import Status

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


@pytest.mark.slow  # three interpreters
def test_concurrent_makers_give_one_complete_model(cache):
    code = "models.make(lambda d: Slow(PluginConfig()).make(d, 0, None), Path(sys.argv[1]))"
    processes = [maker(code, cache / "m", 0.2) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=LIMIT)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [entry.name for entry in cache.iterdir()] == ["m"]
    assert (cache / "m" / READY).exists()


def test_a_maker_that_gets_sigterm_leaves_nothing(cache, tmp_path):
    """As when a user presses Ctrl-C while the model is being made."""
    code = f"""
models.build_model_maker = lambda config, hooks: Slow(PluginConfig())
models.load_plugins = lambda disabled: None
class Launch:
    initial = Path({str(cache / "m")!r})
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
    assert process.wait(LIMIT) == 143
    process.stdout.close()
    assert list(cache.iterdir()) == []


def test_a_run_does_not_try_a_model_again_that_cannot_be_made(cache, tmp_path, monkeypatch):
    """It reads the reason from the status; without one it would start again."""
    for folder in ("configs", "status"):
        (tmp_path / folder).mkdir()
    (tmp_path / "configs" / "run.json").write_text('{"model": {"name": "a/b"}, "max_steps": 1}')
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])
    monkeypatch.setattr(models, "exit_with_parent", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Launch, "read", lambda _: SimpleNamespace(initial=cache / "m"))

    def fetch(name, folder, status):
        raise ConfigError("no such package: install it")

    monkeypatch.setattr(models, "fetch", fetch)
    assert models.main() == 1
    report = read_status(tmp_path / "status" / "model.json")
    assert (report.state, report.detail) == ("failed", {"error": "no such package: install it"})
    process = SimpleNamespace(name="model", exit_code=1, log="", last_lines=list)
    assert _failed(process, tmp_path, "exited").reported


async def test_waiting_for_a_model_ends_when_it_is_whole(tmp_path):
    waiting = asyncio.create_task(wait_for_model(tmp_path / "m", poll=0.01))
    (tmp_path / "m").mkdir()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    (tmp_path / "m" / READY).touch()
    await asyncio.wait_for(waiting, LIMIT)
