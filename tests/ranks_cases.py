"""What one rank and many train alike: batches of mixed samples, and jobs over them.

``python ranks_cases.py JOBS.json`` does them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from small_head import with_scores

from prime_rl import ConfigError, Loss, LossInputs, LossOutputs, PluginConfig, RunError, Sample
from prime_rl.config.run import CkptConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.packer import alone, batch_frames
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel, make_observers, make_optimizer, make_tuning
from prime_rl.rundir.checkpoints import Checkpoint, unfinished
from prime_rl.rundir.launch import STORE
from prime_rl.rundir.status import Status
from prime_rl.streams import ROUTES
from prime_rl.trainer.rank import Rank
from prime_rl.weights.versions import FILES_WANTED
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_broadcast.transport import BroadcastConfig, GlooTransport

VOCAB, CAPACITY, LAST = 61, 48, 5


class OldRatio(Loss):
    """-A * exp(t - old)"""

    name = "old_ratio"
    token_wise = True
    reads = ("advantages", "old_logprobs")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.old_logprobs is not None
        ratio = (inputs.trainer_logprobs - inputs.old_logprobs).exp()
        return LossOutputs((-inputs.advantages * ratio)[inputs.loss_mask].sum(), {})


class Anchored(Loss):
    """-A * t + k3 to the first weights and to the average, with r = log (reference / π)"""

    name = "anchored"
    token_wise = True
    reads = ("advantages", "initial_logprobs", "ema_logprobs")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        loss = -inputs.advantages * inputs.trainer_logprobs
        for reference in (inputs.initial_logprobs, inputs.ema_logprobs):
            assert reference is not None and not reference.requires_grad
            log_ratio = reference - inputs.trainer_logprobs
            loss = loss + 0.5 * (log_ratio.exp() - log_ratio - 1)
        return LossOutputs(loss[inputs.loss_mask].sum(), {})


class Ratio(Loss):
    """-A * exp(t - i)"""

    name = "ratio"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        return LossOutputs((-inputs.advantages * ratio)[inputs.loss_mask].sum(), {})


def sample(rng: np.random.Generator, prompt: list[int], length: int, **streams: Any) -> Sample:
    """A prompt and a random reply."""
    tokens = [*prompt, *rng.integers(1, VOCAB, length).tolist()]
    mask = np.arange(len(tokens)) >= len(prompt)
    return Sample(
        token_ids=tokens,
        loss_mask=mask,
        inference_logprobs=np.where(mask, rng.normal(-4, 0.3, len(tokens)), 0),
        temperature=0.8,
        **{name: np.where(mask, value, 0) for name, value in streams.items()},
    )


def mixed_batch(step: int) -> tuple[list[Sample], list[str]]:
    """Three envs, one component each; the rl ones share their prompts, two by two."""
    rng = np.random.default_rng(step)
    samples, envs = [], []
    for group in range(4):
        prompt = rng.integers(1, VOCAB, 3 + group).tolist()
        for _ in range(2):
            samples.append(sample(rng, prompt, int(rng.integers(4, 16)), advantages=rng.normal()))
            envs.append("rl")
    for length in (5, 20):
        samples.append(sample(rng, [1, 2], length, ce_weights=0.5, rl_weights=0.0))
        envs.append("ce")
    weights = {"ref_kl_weights": 1.0, "ref_logprobs": -3.0, "rl_weights": 0.0}
    for length in (9, 11, 13):
        samples.append(sample(rng, [3], length, **weights))
        envs.append("ref_kl")
    return samples, envs


def batch(step: int) -> tuple[list[Sample], list[str]]:
    """Of step 3 one sample only: all ranks but one have nothing. Step 4 trains nothing at all."""
    samples, envs = mixed_batch(step)
    if step == 3:
        return samples[:1], envs[:1]
    if step == 4:
        rng = np.random.default_rng(4)
        nothing = [sample(rng, [5], 4 + n, rl_weights=0.0) for n in range(3)]
        return nothing, ["rl"] * 3
    return samples, envs


def bad_batch(step: int) -> tuple[list[Sample], list[str]]:
    """One sample's ratio overflows: that of the only code rollout."""
    samples, envs = mixed_batch(step)
    rng = np.random.default_rng(0)
    bad = sample(rng, [7], 30, advantages=1.0)
    bad.inference_logprobs[:] = np.where(bad.loss_mask, -2000, 0)
    return [*samples[:2], bad], [*envs[:2], "code"]


def head_batch(step: int) -> tuple[list[Sample], list[str]]:
    """The rl samples train a head, which gives their advantages."""
    samples, envs = batch(step)
    for number, (each, env) in enumerate(zip(samples, envs, strict=True)):
        if env == "rl" and each.advantages is not None:
            each.advantages = None
            rewards = np.where(each.loss_mask, 0.1 * (number % 3), 0)
            each.set_stream("rewards", rewards.astype(np.float32))
            each.set_stream("fit_weights", each.loss_mask.astype(np.float32))
    return samples, envs


def add_routes(samples: list[Sample], step: int) -> None:
    """Two of eight experts, at random, in both layers of every token."""
    rng = np.random.default_rng(step)
    for each in samples:
        experts = np.tile(np.arange(8, dtype=np.uint8), (len(each), 2, 1))
        each.routed_experts = rng.permuted(experts, axis=-1)[..., :2]


class Frames:
    """A receiver that packs one rank's frame of each step; two samples are a group, and a rollout
    if a head is ``scored``."""

    def __init__(
        self,
        first: int,
        rank: Rank,
        make: Any,
        minibatches: int,
        ranks_of_a_row: int = 1,
        routed: bool = False,
    ) -> None:
        """``routed``: every other sample has random routes."""
        self.routed = routed
        self.step, self.rank, self.make, self.minibatches = first, rank, make, minibatches
        self.ranks_of_a_row = ranks_of_a_row
        self.scored = make is head_batch

    def receive(self, timeout: float) -> memoryview:
        packing = alone(*self.make(self.step))
        pieces = [replace(p, group=i // 2, rollout=i // 2) for i, p in enumerate(packing.pieces)]
        packing = replace(packing, pieces=pieces, step=self.step)
        if self.routed:
            add_routes([piece.sample for piece in pieces[::2]], self.step)
            packing = replace(packing, needs=frozenset({ROUTES}))
        if self.scored:
            numbers = [*range(len(pieces))]
            pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
            packing = replace(packing, bundles=pairs, needs=frozenset({"rollout_ids"}))
        num_rows = self.rank.size // self.ranks_of_a_row
        frames = batch_frames(packing, CAPACITY, num_rows, 1e-2, self.minibatches)
        self.step += 1
        return memoryview(frames[self.rank.number // self.ranks_of_a_row])

    def announce(self, version: int) -> None: ...

    def close(self) -> None: ...


def do(job: dict[str, Any]) -> None:
    """Train, publish, measure and checkpoint as the process does it; perhaps from a checkpoint."""
    import torch

    from prime_rl.trainer import parallel
    from prime_rl.trainer.checkpoint import Checkpointer, restore
    from prime_rl.trainer.loop import Trainer, finish, train
    from prime_rl.trainer.model import load_model

    run_dir, rank = Path(job["run_dir"]), Rank(parallel.rank(), parallel.num_ranks())
    config = TrainerConfig.model_validate(
        {"device": "cpu", "keep_broadcasts": 9, "optim": {"lr": 1e-3, "max_norm": 0.5}}
        | job.get("trainer", {})
    )
    parallel.on_main(lambda: _lay_out(run_dir))
    resume = Checkpoint(Path(job["resume"])) if "resume" in job else None
    model_dir = resume.weights if resume else Path(job["model"])
    torch.manual_seed(0)  # an adapter begins with random numbers: else other ones in every process
    hooks = load_plugins(TRAINER_GROUP)
    tuning = make_tuning(config.settings, hooks)
    adapter = resume.weights if resume and tuning else None
    if adapter is not None:  # a checkpoint has the adapter alone
        model_dir = Path(job["model"])
    model = load_model(model_dir, config, tuning, adapter)
    observers = make_observers(config.settings, hooks)
    loss = {"old_ratio": OldRatio, "anchored": Anchored}.get(job.get("loss", ""), Ratio)
    losses = installed_losses().with_rl(loss(PluginConfig()))
    if config.heads:
        losses = with_scores(Ratio(PluginConfig()))

    def make_trainer() -> Trainer:
        return Trainer(
            *(model, losses, config, LAST, observers),
            initial=Path(job["model"]),
            kernel=make_kernel(config, hooks),
            maker=make_optimizer(config.optim, hooks),
        )

    try:
        trainer = make_trainer()
    except ConfigError as error:
        (run_dir / f"error_{rank.number}").write_text(str(error))
        return
    if resume:
        restore(trainer, resume)
    first = resume.step + 1 if resume else 1
    interval = 2 if job.get("checkpoints", True) else None
    checkpointer = Checkpointer(run_dir, CkptConfig(interval=interval), model_dir, None)
    make = head_batch if config.heads else bad_batch if job.get("bad") else batch
    frames = Frames(
        *(first, rank, make, config.minibatches, config.context_parallel),
        routed=config.router_replay,
    )
    status = Status(None)
    transport = GlooTransport(BroadcastConfig()) if "broadcast" in job else None
    if transport and rank.number == 0:
        threading.Thread(target=take_from_memory, args=(run_dir,), daemon=True).start()
    try:
        train(trainer, frames, run_dir, first, status, checkpointer, transport)
        finish(trainer, model_dir, run_dir, status)
    except RunError as error:
        (run_dir / f"error_{rank.number}").write_text(str(error))


def do_oracle(job: dict[str, Any]) -> None:
    """Loss and gradient of cases of ``oracle_cases``, in double precision."""
    import oracle_cases
    import torch

    from prime_rl.trainer import parallel
    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.model import load_model

    run_dir = Path(job["run_dir"])
    config = TrainerConfig(device="cpu", context_parallel=job.get("ranks_of_a_row", 1))
    hooks = load_plugins(TRAINER_GROUP)
    for case in job["oracle"]:
        losses = oracle_cases.losses_of(case)
        model = oracle_cases.in_double(load_model(Path(job["model"]), config))
        found = oracle_cases.trained(
            Trainer(model, losses, config, LAST, kernel=make_kernel(config, hooks)),
            oracle_cases.rollouts_of(losses),
            parallel.rank() // config.context_parallel,
            parallel.num_ranks() // config.context_parallel,
        )
        if parallel.rank() == 0:
            run_dir.mkdir(exist_ok=True)
            torch.save(found, run_dir / case)


def take_from_memory(run_dir: Path) -> None:
    """The engines: they receive version 1, and want the files of version 3. Checkpoints have
    those of 2 and 4."""
    import torch
    from safetensors.torch import save_file

    from prime_rl_broadcast.connection import Member

    broadcasts = run_dir / "broadcasts"
    one, three = broadcasts / "step_1", broadcasts / "step_3"
    meeting = BroadcastGroup(
        directory=str(run_dir / "meeting"),
        group=str(run_dir / "meeting"),
        backend="gloo",
        rank=0,
        world_size=2,
        timeout=600.0,
        loopback=True,
    )
    Path(meeting.directory).mkdir()
    _until((one / "STABLE").exists)
    meeting.open(one)
    received: dict[str, torch.Tensor] = {}
    with Member().join(meeting.for_worker(1), torch.device("cpu")) as group:
        group.receive(lambda header: None, received.update)
    save_file(received, run_dir / "received.safetensors")
    _until((three / "STABLE").exists)
    (broadcasts / FILES_WANTED).touch()


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def _lay_out(run_dir: Path) -> None:
    """The orchestrator's part of every checkpoint is there."""
    for step in range(1, LAST + 1):
        part = unfinished(run_dir, step)
        part.orchestrator.mkdir(parents=True)
        part.progress.write_text("{}")


def main(path: Path) -> int:
    """Sets of jobs, each on as many ranks as it says. Ranks are forks: one import for all."""
    import_all()
    for number, (num_ranks, jobs) in enumerate(json.loads(path.read_text())):
        store = str(path.with_name(f"store_{number}"))
        pids = [start_rank(rank, num_ranks, store, jobs) for rank in range(num_ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            print(f"ranks of set {number} exited with {codes}", file=sys.stderr)
            return 1
    return 0


def import_all() -> None:
    """What the jobs need, and no thread is started by."""
    import_module("transformers.models.qwen3.modeling_qwen3")
    import_module("prime_rl.trainer.loop")


def start_rank(rank: int, num_ranks: int, store: str, jobs: list[dict[str, Any]]) -> int:
    """The process id of a rank that does all jobs."""
    if (pid := os.fork()) > 0:
        return pid
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, STORE: store}
    os.environ |= {name: str(value) for name, value in names.items()}
    code = 1
    try:
        import torch

        from prime_rl.trainer import parallel

        with parallel.joined(Rank.of_process(), torch.device("cpu")):
            for job in jobs:
                (do_oracle if "oracle" in job else do)(job)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
