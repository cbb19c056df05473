"""Loops: a long run of tokens that the policy was certain of (arXiv:2506.13585, section 3.2), or
repeated n-grams.

    run:     ``window`` sampled tokens in a row, each with  log μ > log(prob_threshold)
    n-gram:  share of sampled n-grams that occurred before  > ngram_threshold    (off by default)

Both check a sample's whole path: tokens that it repeats from an earlier sample count as sampled.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveInt

from prime_rl import Filter, PluginConfig, Rollout, hookimpl


class RepetitionConfig(PluginConfig):
    """Settings of ``repetition``."""

    window: PositiveInt = 3000
    """Consecutive sampled tokens of one sample, including those that it repeats from an earlier
    one. Env-provided tokens between them do not end the run."""
    prob_threshold: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """Probability above which a token counts as certain."""
    ngram_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of repeated n-grams above which a rollout is dropped. None: not checked."""
    ngram_size: PositiveInt = 4
    """Tokens per n-gram."""


class Repetition(Filter):
    """Drops a rollout with a long run of certain tokens, or too many repeated n-grams."""

    name = "repetition"
    config_class = RepetitionConfig
    config: RepetitionConfig

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None:
        pairs = zip(rollout.samples, rollout.sampled_paths, strict=True)
        for sample, (sampled, logprobs) in pairs:
            run = self._certain_run(logprobs[sampled]) if rollout.has_logprobs else None
            reason = run or self._repeated_ngrams(sample.token_ids[sampled])
            if reason:
                return reason
        return None

    def _certain_run(self, logprobs: npt.NDArray[np.float32]) -> str | None:
        certain = logprobs > math.log(self.config.prob_threshold)
        if len(certain) < self.config.window:
            return None
        breaks = np.flatnonzero(np.concatenate(([True], ~certain, [True])))
        longest = int(np.diff(breaks).max()) - 1
        if longest < self.config.window:
            return None
        return f"{longest} sampled tokens in a row with p > {self.config.prob_threshold}"

    def _repeated_ngrams(self, tokens: npt.NDArray[np.int32]) -> str | None:
        limit = self.config.ngram_threshold
        size = self.config.ngram_size
        if limit is None or len(tokens) < size:
            return None
        ngrams = np.lib.stride_tricks.sliding_window_view(tokens, size)
        share = 1.0 - len(np.unique(ngrams, axis=0)) / len(ngrams)
        if share <= limit:
            return None
        return f"{share:.2f} of its {size}-grams are repeated, more than {limit}"
