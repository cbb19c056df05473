"""A loss that compares with the first weights, and trainings of a few steps with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainer_fixtures import kernel_of, maker_of
from transformers import AutoModelForCausalLM, PreTrainedModel

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric, Tuning
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.wire import MicroBatch


def k3(log_ratio: Tensor) -> Tensor:
    """Of log (reference / π), per token (Schulman 2020, "Approximating KL Divergence")."""
    return log_ratio.exp() - log_ratio - 1


class Anchored(Loss):
    """-A * t + k3 to the first weights"""

    name = "anchored"
    token_wise = True
    reads: Any = ("advantages", "initial_logprobs")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        terms, metrics = -inputs.advantages * inputs.trainer_logprobs, {}
        for name in self.reads[1:]:
            kl = k3(getattr(inputs, name) - inputs.trainer_logprobs)
            terms, metrics[name] = terms + kl, TokenMetric(kl.detach(), inputs.loss_mask)
        return LossOutputs(terms[inputs.loss_mask].sum(), metrics)


def make_trainer(
    folder: Path,
    loss: type[Loss],
    initial: Path | None = None,
    tuning: Tuning | None = None,
    dtype: torch.dtype = torch.float64,
    **table: Any,
) -> Trainer:
    """``initial``: the folder of the first weights."""
    optim = {"type": "sgd", "lr": 0.05, "weight_decay": 0.0, "max_norm": None}
    config = TrainerConfig.model_validate({"device": "cpu", "optim": optim} | table)
    model = load_model(folder, config, tuning).to(dtype)
    losses = installed_losses().with_rl(loss(PluginConfig()))
    made: dict[str, Any] = {"kernel": kernel_of(config), "maker": maker_of(config)}
    return Trainer(model, losses, config, 20, initial=initial or folder, **made)


def hugging_face(folder: Path) -> PreTrainedModel:
    """With the attention that core computes documents with."""
    kind = {"dtype": torch.float64, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **kind)


def logprobs(model: PreTrainedModel, row: MicroBatch) -> Tensor:
    """[T] of each document alone; 0 for its first token."""
    found = []
    for ids in torch.tensor(row.token_ids, dtype=torch.int64).split(row.sequence_lengths.tolist()):
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        found += [ids.new_zeros(1), logits.gather(1, ids[1:, None])[:, 0]]
    return torch.cat(found)


def train(trainer: Trainer, batches: Sequence[list[MicroBatch]], first: int = 1) -> Any:
    """Metrics of the last."""
    return [trainer.train_step(step, batch) for step, batch in enumerate(batches, first)][-1]
