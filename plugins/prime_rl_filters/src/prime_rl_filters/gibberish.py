"""Rare tokens sampled with a very low probability: a sign of degenerate output (arXiv:2510.02387,
section 5.2).

    drop if any sampled token has  token_id > token_id_threshold
                              and  log μ < -log(V) - logprob_offset
"""

from __future__ import annotations

import math

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from prime_rl import Filter, PluginConfig, Rollout, hookimpl


class GibberishConfig(PluginConfig):
    """Settings of ``gibberish``."""

    token_id_threshold: NonNegativeInt = 100_000
    """Token ids above this are rare: byte-pair merges are sorted by frequency."""
    logprob_offset: NonNegativeFloat = 2.0
    """Nats below the logprob of the uniform distribution."""
    vocab_size: PositiveInt = 151_936
    """The model's vocabulary size V."""


class Gibberish(Filter):
    """Drops a rollout with a sampled token that is both rare and improbable."""

    name = "gibberish"
    config_class = GibberishConfig
    config: GibberishConfig

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None:
        if not rollout.has_logprobs:  # not sampled, so there is no probability to judge
            return None
        threshold = -math.log(self.config.vocab_size) - self.config.logprob_offset
        for sample in rollout.samples:
            odd = (
                sample.loss_mask
                & (sample.token_ids > self.config.token_id_threshold)
                & (sample.inference_logprobs < threshold)
            )
            if odd.any():
                position = int(odd.argmax())
                return (
                    f"token {int(sample.token_ids[position])} at position {position} "
                    f"has logprob {float(sample.inference_logprobs[position]):.2f} < "
                    f"{threshold:.2f}"
                )

        return None
