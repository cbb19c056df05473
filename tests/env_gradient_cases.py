"""Train a tiny policy on rows of two envs as one of several ranks, and save its weights and
metrics."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from prime_rl import Loss, LossInputs, LossOutputs, OptimizerMaker, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.packer import alone, batch_frames
from prime_rl.registry.components import installed_losses
from prime_rl.rollout import Sample
from prime_rl.trainer import parallel
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.trainer.rank import Rank
from prime_rl.wire.micro_batch import decode_batch
from prime_rl_optimizers.pcgrad import weights_of

CAPACITY = 24
LR = 0.05
ENVS = ("a", "b", "c")


class Plain(Loss):
    """-A * t"""

    name = "plain"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        loss = -inputs.advantages * inputs.trainer_logprobs
        return LossOutputs(loss[inputs.loss_mask].sum(), {})


class Sgd(OptimizerMaker):
    """Plain steps along the sum of the weighted gradients."""

    name = "weighed_sgd"
    weighs_envs = True

    def make(self, model: Any, lr: float, weight_decay: float) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

    def env_weights(self, step: int, envs: Any, products: np.ndarray) -> list[float]:
        return weights_of(products, step)


def samples() -> tuple[list[Sample], list[str]]:
    """Envs a and b have opposite credit on the same tokens: their gradients conflict."""
    rng = np.random.default_rng(3)
    shared = rng.integers(1, 32, 6)
    made = []
    for env in ENVS:
        for number in range(3):
            ids = np.concatenate([[1, 2], shared, rng.integers(1, 32, 1 + number)])
            mask = np.arange(len(ids)) >= 2
            credit = {"a": 1.0, "b": -0.7, "c": 0.3}[env] + 0.1 * number
            made.append(
                Sample(
                    token_ids=ids,
                    loss_mask=mask,
                    inference_logprobs=np.where(mask, -3.0, 0.0),
                    advantages=np.where(mask, credit, 0.0).astype(np.float32),
                )
            )
    return made, [env for env in ENVS for _ in range(3)]


def train(folder: Path, rank: Rank, **table: Any) -> tuple[Trainer, dict[str, float]]:
    """One step."""
    optim = {"type": "adamw", "lr": LR, "weight_decay": 0.0, "max_norm": 0.5}
    config = TrainerConfig.model_validate({"device": "cpu", "optim": optim} | table)
    trainer = Trainer(
        load_model(folder, config),
        installed_losses().with_rl(Plain(PluginConfig())),
        config,
        4,
        maker=Sgd(PluginConfig()),
    )
    packing = replace(alone(*samples()), step=1)
    frames = batch_frames(packing, CAPACITY, rank.size, one_env_per_row=True)
    _, rows = decode_batch(frames[rank.number])
    return trainer, trainer.train_step(1, rows)


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    rank = Rank.of_process()
    with parallel.joined(rank, torch.device("cpu")):
        trainer, metrics = train(Path(job["model"]), rank, **job["trainer"])
        whole = {
            name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().contiguous()
            for name, p in trainer.model.named_parameters()
        }
        if rank.number == 0:
            save_file(whole, Path(job["out"]) / "weights.safetensors")
            (Path(job["out"]) / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(sys.argv[1])
