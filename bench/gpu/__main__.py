"""What has to hold on a GPU, in nine minutes: a table, one line for each stage.

    python -m bench.gpu                       every stage, the most telling first
    python -m bench.gpu parity kernels        these
    python -m bench.gpu --minutes 4           start no stage after that
    python -m bench.gpu --prepare IMAGE.txt   wheels for a machine without a registry (wheels.py)

A stage that crashes, hangs or runs out of memory says so in its line, and the next one runs.
Without a GPU the stages run at toy size on the CPU, where they can, so that the script itself is
tested. ``--out`` gets ``table.txt``, ``results.json`` and ``logs.tar``. Exit code: the number of
stages that failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.device import show
from bench.gpu.results import describe_device, record_results, write_results
from bench.gpu.stages import STAGES, Outcome, run_apart, run_here
from bench.gpu.wheels import prepare
from bench.records import WRITES

FOLDER = "gpu-wheels"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run stages, or prepare; the number of stages that failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--minutes", type=float, default=8.5, help="for all stages")
    parser.add_argument("--out", type=Path, help="folder of the results (default: a temporary one)")
    parser.add_argument("--results", type=Path, help="record this results.json, run nothing")
    parser.add_argument(
        "--prepare", type=Path, metavar="IMAGE", help="pip freeze of a machine without a registry"
    )
    parser.add_argument("--python", default="3.12", help="version of Python on that machine")
    parser.add_argument("--wheels", type=Path, default=Path(FOLDER), help="folder of the wheels")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.stages if name not in STAGES]
    if unknown:
        parser.error(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")

    if chosen.stage:
        run_here(chosen.stage)
    if chosen.prepare:
        return prepare(chosen.prepare, python=chosen.python, folder=chosen.wheels)
    if chosen.results:
        return record(chosen.results)

    out = chosen.out or Path(tempfile.mkdtemp(prefix="gpu_"))
    out.mkdir(parents=True, exist_ok=True)
    outcomes = run_stages(chosen.stages or [*STAGES], minutes=chosen.minutes, out=out)
    pack_logs(out)
    failed = sum(each.failed for each in outcomes.values())
    print(f"\n{failed} of {len(outcomes)} stages failed; results and logs in {out}")
    if os.environ.get(WRITES):
        record(out / "results.json")
    return failed


def run_stages(names: Sequence[str], minutes: float, out: Path) -> dict[str, Outcome]:
    """One after the other, a line for each. The files are complete after each stage."""
    device = describe_device()
    end = time.perf_counter() + 60 * minutes
    command = os.environ.get(WRITES) or " ".join(["python -m bench gpu", *sys.argv[1:]])
    outcomes: dict[str, Outcome] = {}
    lines = [device or "no GPU: toy sizes on the CPU"]
    print(lines[0], flush=True)
    for name in names:
        outcome = run_apart(name, end - time.perf_counter(), out)
        outcomes[name] = outcome
        lines.append(
            f"{name:<11}{outcome.state:<8}{outcome.seconds:6.1f} s  {show(outcome.figures)}"
        )
        print(lines[-1], flush=True)
        write_results(out / "results.json", device, outcomes, command)
        (out / "table.txt").write_text("\n".join(lines) + "\n", "utf-8")

    return outcomes


def pack_logs(out: Path) -> None:
    """Put the stages' logs into one file, ``logs.tar``."""
    with tarfile.open(out / "logs.tar", "w") as archive:
        for log in sorted(out.glob("*.log")):
            archive.add(log, arcname=log.name)
            log.unlink()


def record(results: Path) -> int:
    """Into ``docs/benchmarks.json``. Exit code 1: nothing was recorded."""
    try:
        number = record_results(results)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"recorded {number} figures; now run python -m tools.docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
