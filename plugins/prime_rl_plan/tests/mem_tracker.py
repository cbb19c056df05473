"""``python mem_tracker.py FOLDER``: the peak of a step that torch's ``MemTracker`` sees on CUDA
tensors without values (``tests/fake_cuda.py``), in bytes. Request on stdin, as for
``prime_rl_plan.measure``, with all layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from fake_cuda import fake_cuda, fake_ranks, pretend  # noqa: E402  # of another package's tests
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from prime_rl.config.trainer import TrainerConfig  # noqa: E402
from prime_rl.plugins.hookspecs import TRAINER_GROUP  # noqa: E402
from prime_rl.registry.components import Components  # noqa: E402
from prime_rl.registry.manager import load_plugins  # noqa: E402
from prime_rl.registry.offers import make_kernel  # noqa: E402
from prime_rl.trainer.loop import Trainer  # noqa: E402
from prime_rl_plan.measure import SHORT, lengths_of, make_row, with_layers  # noqa: E402


def main(folder: Path) -> None:
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    pretend(folder)
    hooks, table = load_plugins(TRAINER_GROUP), request["model"]
    config = TrainerConfig(**request["trainer"] | {"compile": False})  # as plan runs it
    losses, kernel = Components.load(config, hooks), make_kernel(config, hooks)
    full = lengths_of(request["row_tokens"], request["seq_len"])
    rows = [make_row(each, table["vocab_size"], "rl", ()) for each in (SHORT, full)]
    no_gap = mock.patch("prime_rl.trainer.self_check._gap", lambda *_: 0.0)
    with fake_cuda(), fake_ranks(1), no_gap:
        with torch.device("cuda"):
            architecture = with_layers(table, table["num_hidden_layers"])
            model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
        trainer = Trainer(model.eval(), losses, config, 10, kernel=kernel)
        trainer.train_step(1, rows[:1])  # makes the optimizer's state
        tracker = MemTracker()
        tracker.track_external(model, trainer.optimizer)
        with tracker:
            trainer.train_step(2, rows[1:])
            peak = tracker.get_tracker_snapshot("peak")
    device = next(each for each in peak if each.type == "cuda")
    print(json.dumps({str(getattr(k, "name", k)): v for k, v in peak[device].items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
