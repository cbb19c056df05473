"""``python tests/family_page.py``: write docs/model-families.md, a few minutes on two cores.

``test_model_families.py`` compares the page with what it measures.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from family_models import FAMILIES, Family
from family_verdicts import HOW, engine_verdict, trainer_verdict, verdict

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "model-families.md"
CONSTRAINTS = ROOT / "constraints.txt"
REGISTRY = Path(__file__).with_name("vllm_registry.json")
"""What vLLM's registry lists of these families; ``test_vllm_registry.py`` compares it with vLLM."""

INTRO = """\
# Model families

<!-- Written by `make docs-families`: change tests/family_page.py instead. -->

The model families that the trainer and the engines support. Each row was measured on a tiny random
model of transformers' own class, in float32 on a CPU, with transformers {transformers}. No family
does worse with the lowest and the newest version that are admitted (`make test-lowest`,
`make test-newest`); some do better, because the modes below are measured, not listed. "Works"
means:

- **Trainer**: a packed row of four documents has the log-probabilities and the gradients that
  transformers computes for each document alone, within 1e-4. At start-up the trainer compares the
  two on your model as well, and uses the first of three modes that agrees: shared prompts computed
  once; all documents in one call; documents *apart*, in padded batches of similar length, which is
  the slowest. Recurrent and convolution layers were measured without their GPU kernels.
- **Embedded engine**: greedy answers to three prompts at once are those of transformers'
  `generate`, token by token, and log-probabilities agree within 1e-4. At start-up the engine
  compares its logits with the model's own.
- **vLLM**: not run. The column says what the model registry of vLLM {vllm} lists: a model of
  vLLM's own, or transformers' code run by vLLM. For other architectures, vLLM tries transformers'
  code too.

Text only: there is no training on images, so the language model of a vision family is what works.
Experts are sharded like other weights; with `trainer.expert_parallel` tokens travel to them.

A family that is not in the table works if it passes the checks at start-up. Otherwise they refuse
it before training starts, with the reason and the fix.

| family | architecture | trainer | embedded engine | vLLM {vllm} |
|---|---|---|---|---|
"""


RANKS = [*HOW.values()]
"""Verdicts that a model works, best first."""


def measured_version() -> str:
    """Of transformers: the one that `make setup` installs."""
    match = re.search(r"^transformers==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert match is not None, f"{CONSTRAINTS} does not pin transformers"
    return match[1]


def intro() -> str:
    """The page up to the first family."""
    text = INTRO.replace("{transformers}", measured_version())
    return text.replace("{vllm}", json.loads(REGISTRY.read_text())["vllm"])


def is_as_good(row: str, expected: str) -> bool:
    """Whether a family's line promises at least what another one does. A defect promises less
    than a refusal."""
    cells = row.split(" | ")
    others = expected.split(" | ")
    same = [cells[number] == others[number] for number in (0, 1, 4)]
    verdicts = zip(cells[2:4], others[2:4], strict=True)
    return all(same) and all(_rank(each) <= _rank(other) for each, other in verdicts)


def _rank(verdict: str) -> int:
    if verdict in RANKS:
        return RANKS.index(verdict)
    return len(RANKS) + verdict.startswith("DEFECT")


def row(family: Family, folder: Path) -> str:
    """The family's line. ``folder`` takes the model."""
    family.write(folder)
    cells = (
        family.name,
        f"`{family.architecture}`",
        verdict(trainer_verdict, folder),
        verdict(engine_verdict, folder),
        vllm_cell(family.architecture),
    )
    return f"| {' | '.join(cells)} |"


def vllm_cell(architecture: str) -> str:
    """What vLLM's registry says of it."""
    found = json.loads(REGISTRY.read_text())["classes"].get(architecture)
    if found is None:
        return "not listed"
    return "listed: transformers' code" if found.startswith("Transformers") else "listed"


def page() -> str:
    """The whole page, measured now."""
    installed = transformers.__version__
    if installed != measured_version():
        raise SystemExit(f"transformers is {installed}: constraints.txt has {measured_version()}")
    rows = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(family, Path(folder)))
        print(rows[-1], file=sys.stderr, flush=True)
    return intro() + "\n".join(rows) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    PAGE.write_text(page())
