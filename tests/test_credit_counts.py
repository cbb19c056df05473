"""What the loss divides by: a group that teaches rl nothing must not dilute one that does."""

from __future__ import annotations

import pytest

from prime_rl import Algorithm, PluginConfig, Rollout
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.orchestrator.scoring import stamp
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import Hooks
from prime_rl.testing import make_group, score
from prime_rl.trainer.loss import Counts, count_members
from prime_rl.wire import decode_batch
from prime_rl_echo import Echo, EchoConfig
from prime_rl_filters import ZeroAdvantage
from prime_rl_grpo import GRPO, GRPOConfig

# Groups of 2 rollouts of 4 sampled tokens and 3 tool tokens each: one informative group of four.
REWARDS = ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.5, 0.5])


def counts_of(algorithm: Algorithm, tool: int = 3) -> Counts:
    """Through scoring, the default filter, packing and the wire: what the trainer counts."""
    post = FilterSlot("post", Hooks(), [(ZeroAdvantage(PluginConfig()), True)])
    assembler = Buffer(
        batch_size=8, max_off_policy_steps=0, pre=FilterSlot("pre", Hooks(), []), post=post,
        max_empty_batches=10,
    )  # fmt: skip
    for rewards in REWARDS:
        group: list[Rollout] = make_group(rewards, completion=4, tool=tool)
        score(algorithm, group)
        for rollout in group:
            stamp(rollout, algorithm.action_loss)
        assembler.add(group)
    (frame,) = batch_frames(batch_to_pack(1, assembler.batch.kept, installed_losses(), 64), 64)
    _, micro_batches = decode_batch(frame)
    return count_members(micro_batches, installed_losses())


def test_tied_groups_do_not_count_in_the_rl_denominator_of_echo() -> None:
    # Informative: 2 rollouts x 4 tokens = 8; all sampled tokens are 8 x 4 = 32.
    echo, grpo = counts_of(Echo(EchoConfig())), counts_of(GRPO(GRPOConfig()))
    assert echo.totals["rl"] == grpo.totals["rl"] == 8
    # The observations of all 8 rollouts train: 8 x 3.
    assert (echo.totals["ce"], grpo.totals.get("ce", 0)) == (24, 0)


@pytest.mark.parametrize("algorithm", [Echo(EchoConfig()), GRPO(GRPOConfig())])
def test_without_observations_echo_is_grpo(algorithm: Algorithm) -> None:
    counts = counts_of(algorithm, tool=0)
    assert (counts.totals, counts.num_tokens) == ({"rl": 8}, 12)
