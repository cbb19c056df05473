"""Runs in a slow world: what takes long is waited for, and the view says what it is."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from waiting import LIMIT, eventually

from prime_rl_app.recovery import LOG

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 9.0
"""How much longer each stage takes: half as long again as the largest of ``LIMITS``, and more than
any pause between two attempts. ``--slow-seconds 90`` is how a real model behaves, with the limits
of a user."""
LIMITS = [
    *("--recovery.stopped_timeout", "5", "--recovery.lost_timeout", "5"),
    *("--observers.watchdog.timeout", "5", "--inference.hang_timeout", "6"),
]
SMALL = [
    *(str(ROOT / "configs" / "reverse_text" / "grpo.toml"), "--model.warmup_exact", "0.15"),
    *("--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env.0.num_examples", "4", "--orchestrator.eval.env.0.interval", "1"),
    *("--orchestrator.max_off_policy_steps", "0", "--inference.embedded.num_slots", "1"),
    *("--max-steps", "2", "--view.type", "lines", "--ckpt.interval", "2"),
]


def start(folder: Path, name: str, model_cache: Path, *words: str, **env: str) -> Any:
    """A run by ordinary processes: forks of the nursery have its environment."""
    command = [sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run", *SMALL]
    return subprocess.Popen(
        [*command, "--output_dir", str(folder), "--run.name", name, *words],
        env={**os.environ, "PRIME_RL_CACHE": str(model_cache), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: Any) -> str:
    try:
        output: str = process.communicate(timeout=LIMIT)[0]
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def check_same(one: Path, other: Path) -> None:
    """The same weights, bit for bit."""
    weights = [load_file(run / "weights" / "model.safetensors") for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(tensor.equal(weights[1][name]) for name, tensor in weights[0].items())


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Path:
    """A run that nothing delays."""
    folder = tmp_path_factory.mktemp("fast")
    finish(start(folder, "run", model_cache))
    return folder / "run"


def test_each_stage_in_turn_takes_long_and_nothing_is_restarted(
    tmp_path: Path, model_cache: Path, fast: Path, request: pytest.FixtureRequest
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(Path(__file__).with_name("slow_calls.py"), site / "sitecustomize.py")
    asked = request.config.getoption("--slow-seconds")
    (site / "slow_seconds").write_text(str(asked or SECONDS))
    words = ([] if asked else LIMITS) + ["--orchestrator.env_workers", "1"]
    output = finish(start(tmp_path, "run", model_cache, *words, PYTHONPATH=str(site)))
    run_dir = tmp_path / "run"

    logs = "".join(path.read_text() for path in run_dir.glob("logs/*/*.log"))
    stages = [
        *("prime_rl.trainer.model.load_model", "prime_rl_embedded.model.load_model"),
        *("find_packing", "BatchUpdate.run", "_move_into_place", "export", "write_shard"),
        *("read_weights", "Scheduler.step", "position_score", "TextReversalTaskset.load"),
    ]
    late = [stage for stage in stages if f"{stage}\n" not in logs]
    assert late == []  # each was delayed
    assert not (run_dir / LOG).exists() and "starting" not in output, output
    assert [path.name for path in run_dir.glob("logs/attempt_*")] == ["attempt_1"]
    check_same(fast, run_dir)
    for said in (
        "trainer: loading weights",
        "inference: loading weights",
        "orchestrator: waiting (waits for inference (engine start))",
        "orchestrator: evaluating",
        "inference: generating",
        "trainer: training",
        "(waits for trainer (weights of step 1))",
        "trainer: exporting the trained model",
    ):
        assert said in output, (said, output)


OPERATIONS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#define PART "/slow-disk/"
static void slowly(const char *path) {
    struct timespec pause = {0, 100000000};
    if (path && strstr(path, PART)) nanosleep(&pause, 0);
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
int rename(const char *from, const char *to);
int rename(const char *from, const char *to) {
    REAL(rename); slowly(to); if (strstr(to, "/broadcasts/")) sleep(7);
    return real(from, to);
}
int mkdir(const char *path, mode_t mode);
int mkdir(const char *path, mode_t mode) { REAL(mkdir); slowly(path); return real(path, mode); }
int unlink(const char *path);
int unlink(const char *path) { REAL(unlink); slowly(path); return real(path); }
int rmdir(const char *path);
int rmdir(const char *path) { REAL(rmdir); slowly(path); return real(path); }
void *opendir(const char *path);
void *opendir(const char *path) { REAL(opendir); slowly(path); return real(path); }
int open(const char *path, int flags, ...);
int open(const char *path, int flags, ...) {
    REAL(open); va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t);
    va_end(rest); slowly(path); return real(path, flags, mode);
}
int open64(const char *path, int flags, ...);
int open64(const char *path, int flags, ...) {
    REAL(open64); va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t);
    va_end(rest); slowly(path); return real(path, flags, mode);
}
"""


def library(folder: Path, code: str) -> str:
    """A shared object for LD_PRELOAD."""
    if shutil.which("gcc") is None or sys.platform != "linux":
        pytest.skip("needs gcc and LD_PRELOAD")
    (folder / "slow.c").write_text(code)
    built = folder / "slow.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(built), str(folder / "slow.c"), "-ldl"]
    subprocess.run(command, check=True)
    return str(built)


def test_slow_file_operations_slower_publications_and_long_logs_are_waited_for(
    tmp_path: Path, model_cache: Path, fast: Path
) -> None:
    """0.1 s for each operation in the run directory, 7 s for each file of a version, and logs of
    200 MB before the run says anything."""
    slow = library(tmp_path, OPERATIONS)
    folder = tmp_path / "slow-disk"
    words = ("--recovery.lost_timeout", "5")
    process = start(folder, "run", model_cache, *words, LD_PRELOAD=slow)
    log = folder / "run" / "logs" / "attempt_1" / "orchestrator.log"
    eventually(log.exists, process)
    with log.open("ab") as file:
        for _ in range(200):
            file.write((b"x" * 1023 + b"\n") * 1024)
    output = finish(process)
    assert "trainer: writing weights version 1 (waits for disk)" in output
    assert not (folder / "run" / LOG).exists()
    check_same(fast, folder / "run")


WAITS = """
import os, time
from pathlib import Path
if "PRIME_RL_PROCESS" in os.environ and ":trainer:" in os.environ["PRIME_RL_PROCESS"]:
    folder = Path(__file__).parent
    if not (folder / "seen").exists():
        (folder / "seen").touch()
        time.sleep(600)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_that_gets_sigterm_before_its_first_status_is_started_again(
    tmp_path: Path, model_cache: Path, site: Callable[..., None], ranks: int
) -> None:
    """With two ranks, its agent. A plugin delays the import of the first trainer."""
    site("waits", "[prime_rl.trainer]\nwaits = waits\n", WAITS)
    seen, words = tmp_path / "site" / "seen", ("--trainer.num_ranks", str(ranks))
    process = start(tmp_path, "run", model_cache, *words)
    eventually(seen.exists, process)
    name = "prime_rl.trainer" if ranks == 1 else "prime_rl_app.agent"
    victims = []
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # others come and go
            victims += [each] if name in each.cmdline() else []
    (victim,) = victims
    assert not (tmp_path / "run" / "status" / "trainer.json").exists()
    victim.send_signal(signal.SIGTERM)
    output = finish(process)
    assert "trainer was ended by SIGTERM, after step 0: starting again from the start" in output
