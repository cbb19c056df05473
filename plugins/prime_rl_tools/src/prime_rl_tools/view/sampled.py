"""One sampled rollout at a time, from the newest batch: prompt, reply, reward.

The page's modules are imported when a rollout is shown: listing the plugins imports this one.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from prime_rl.errors import PrimeRLError
from prime_rl.rollout import Rollout

SECONDS = 4.0
"""How long each is shown."""
NUM = 8
"""Rollouts of a batch that take turns, from the lowest reward to the highest."""
LINES = 3
"""Most lines of a reply."""


class SampledRollouts:
    """Rollouts of the newest batch in turn."""

    def __init__(self, run_dir: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._now = now
        self._tokenizer: Any = None
        self._seen: Path | None = None
        self._shown: list[Rollout] = []
        self._number = 0
        self._since = now()

    def render(self, width: int) -> RenderableType | None:
        """The rollout whose turn it is; None before the first batch, and where the run has no
        tokenizer file that can be read quickly."""
        if self._now() - self._since >= SECONDS or not self._shown:
            self._since = self._now()
            self._number = self._number + 1
            self._read()

        if not self._shown or self._tokenizer is None:
            return None

        from prime_rl_tools.report.tokens import prompt_ids, reply_ids

        rollout = self._shown[self._number % len(self._shown)]
        title = f"a rollout of version {rollout.policy_version}: example {rollout.example_id}, "
        inner = width - 8
        return Group(
            Text.assemble((title, "dim"), (f"reward {rollout.reward:.3g}", "bold")),
            Padding(Text(self._text(prompt_ids(rollout), inner), "dim"), (0, 2)),
            Padding(Text(self._text(reply_ids(rollout), LINES * inner)), (0, 2)),
        )

    def _read(self) -> None:
        from prime_rl_app.saved_rollouts import read_step, step_files
        from prime_rl_tools.report.source import tokenizer_folders

        try:
            files = list(step_files(self._run_dir).values())
            if not files or files[-1] == self._seen:
                return
            self._seen = files[-1]
            rollouts = sorted(
                (s.rollout for s in read_step(files[-1]).rollouts), key=lambda r: r.reward
            )
            places = dict.fromkeys(round(n * (len(rollouts) - 1) / (NUM - 1)) for n in range(NUM))
            self._shown = [rollouts[place] for place in places] if rollouts else []
            if self._tokenizer is None:
                paths = (each / "tokenizer.json" for each in tokenizer_folders(self._run_dir))
                path = next((each for each in paths if each.is_file()), None)
                if path is not None:  # transformers would take seconds to import
                    self._tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(
                        str(path)
                    )
        except (PrimeRLError, OSError):  # a picture less
            self._shown = []

    def _text(self, ids: list[int], most: int) -> str:
        from prime_rl_tools.report.tokens import one_line

        return one_line(self._tokenizer.decode(ids[:most]), most)
