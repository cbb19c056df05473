"""``evals.jsonl``: what every evaluation of a run came to, a line each.

A run that goes on from a checkpoint finds here what was measured before its first step, so that
its summary sets the same model as ever against the trained one.
"""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path

from prime_rl.orchestrator.evals import EvalResult

log = logging.getLogger(__name__)

BEFORE, DURING, AFTER = "before", "during", "after"

FILE = "evals.jsonl"


def note(run_dir: Path, when: str, result: EvalResult) -> None:
    """Append one. A disk that refuses costs the line, not the run, and is logged."""
    line = {"step": result.policy_version, "when": when, **result.as_dict()}
    try:
        with (run_dir / FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        log.error("cannot write to %s: %s", run_dir / FILE, error)


def noted(run_dir: Path) -> dict[str, list[EvalResult]]:
    """What earlier attempts measured, by when. The end of one is in the midst of a run that goes
    on."""
    found: dict[str, list[EvalResult]] = {BEFORE: [], DURING: [], AFTER: []}
    path, names = run_dir / FILE, [each.name for each in fields(EvalResult)]
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        result = EvalResult(**{name: row[name] for name in names})
        found[BEFORE if row["when"] == BEFORE else DURING].append(result)
    return found
