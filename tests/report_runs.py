"""Run directories for the tests of replay and of the page: real assembler, packer and store, no
engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl import Algorithm, Filter, PluginConfig, Rollout, Sample, hookimpl
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.orchestrator.packer import Packer
from prime_rl.orchestrator.scoring import score_batch, score_group, score_rollout, stamp
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import Hooks, scope
from prime_rl_app.config import build_config
from prime_rl_app.saved_rollouts import RolloutStore

GROUP = 4


class Centred(Algorithm):
    """The reward above the group's mean."""

    name = "centred"
    group_relative = True

    @hookimpl
    def score_group(self, group):
        mean = sum(rollout.reward for rollout in group) / len(group)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean)


class Counted(Algorithm):
    """The number of rollouts seen before: order is everything."""

    name = "counted"
    seen = 0

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(float(self.seen))
            self.seen += 1


class Taught(Algorithm):
    """Scores by a model, after a prefix; what it finds drawn out is left out of ref_kl."""

    name = "taught"
    action_loss = "ref_kl"
    prefix = (7, 7)

    async def setup(self, host):
        self.model = host.policy

    @hookimpl
    async def score_rollout(self, rollout):
        columns = [
            await self.model.logprobs([*self.prefix, *sample.token_ids])
            for sample in rollout.samples
        ]
        rollout.assign_ref_logprobs(np.concatenate([c[len(self.prefix) :] for c in columns]))


class Hinted(Taught):
    """Asks a model about tokens that are nowhere in the rollout, and decides by the answer."""

    name = "hinted"

    @hookimpl
    async def score_rollout(self, rollout):
        gain = float((await self.model.logprobs([7, 8, 9]))[-1])
        rollout.assign_ref_logprobs(np.full(rollout.num_tokens, gain))
        rollout.assign_weights("ref_kl", np.full(rollout.num_trainable_tokens, rollout.reward))


class Observing(Centred):
    """Centred on what was sampled, ce on what was given."""

    name = "observing"

    @hookimpl
    def observation_weights(self, rollout):
        return [np.where(sample.loss_mask, 0.0, 0.1) for sample in rollout.samples]


class Whitened(Counted):
    """Counts, then subtracts the batch's mean; the count goes on from the batch's size."""

    name = "whitened"

    @hookimpl
    def score_batch(self, groups):
        rollouts = [rollout for group in groups for rollout in group]
        mean = np.mean([rollout.advantages[0] for rollout in rollouts])
        for rollout in rollouts:
            rollout.assign_advantages(rollout.advantages - mean)
        self.seen += len(rollouts)


class Asking(Whitened):
    """Asks a model about the batch."""

    name = "asking"

    async def setup(self, host):
        self.model = host.policy

    @hookimpl
    async def score_batch(self, groups):
        gain = float((await self.model.logprobs([7, 8, 9]))[-1])
        for rollout in (rollout for group in groups for rollout in group):
            rollout.assign_advantages(rollout.advantages * gain)


class Named(Centred):
    """Names a loss that needs settings."""

    name = "named"
    action_loss = "custom"


def own_loss(inputs):
    """What ``[trainer.losses.custom]`` may name."""


class NoLow(Filter):
    """Drops rewards below 0.2."""

    name = "no_low"

    @hookimpl
    def filter_rollout(self, rollout):
        return "low" if rollout.reward < 0.2 else None


class Offering:
    """The plugin that offers them."""

    @hookimpl
    def register_algorithms(self):
        return [Centred, Counted, Taught, Hinted, Observing, Whitened, Asking, Named]


def offering() -> Hooks:
    """Hooks as ``load_plugins`` would find them."""
    hooks = Hooks()
    hooks.register(Offering(), "offering")
    return hooks


class LiveModel:
    """What a model answered while the run went on."""

    async def logprobs(self, token_ids, *, group_id=0):
        ids = np.asarray(token_ids, np.float32)
        return (-ids / 8).astype(np.float32)


class LiveHost:
    """Lends the live model; all else is not asked for."""

    policy = LiveModel()
    envs = agents = ("agent",)


def config_of(algo: str, **orchestrator: object) -> RunConfig:
    """A run of one env, ``words``, by ``algo``."""
    table = {
        "batch_size": 6,
        "group_size": GROUP,
        "algo": {"type": algo},
        "train": {"env": [{"id": "some-words", "name": "words"}]},
        **orchestrator,
    }
    return build_config(
        {"model": {"name": "tiny"}, "max_steps": 3, "seq_len": 12, "orchestrator": table}
    )


def rollout_of(rng: np.random.Generator, group_id: int) -> Rollout:
    """Given, then sampled tokens; some are longer than ``seq_len``."""
    size = int(rng.integers(5, 15))
    mask = np.arange(size) >= 3
    return Rollout(
        env="words", example_id=group_id, group_id=group_id,
        reward=round(float(rng.random()), 2), rewards={"right": 0.5}, task={"prompt": "say it"},
        samples=[
            Sample(
                token_ids=rng.integers(0, 30, size), loss_mask=mask,
                inference_logprobs=np.where(mask, -rng.random(size), 0),
                roles=np.where(mask, 2, 1), is_content=np.arange(size) > 0,
                policy_versions=np.where(mask, 0, -1),
            )
        ],
    )  # fmt: skip


def make_run(
    run_dir: Path,
    algo: str = "centred",
    steps: int = 3,
    seed: int = 0,
    shared: Hooks | None = None,
    **trainer: Any,
) -> RunConfig:
    """A run directory as the loop leaves it: groups straddle batches, a filter drops some, groups
    come back out of order."""
    config = config_of(algo)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)})
    (run_dir / "configs").mkdir(parents=True)
    (run_dir / "configs" / "run.json").write_text(config.model_dump_json())
    hooks = offering() if shared is None else shared
    asyncio.run(_run(run_dir, config, steps, np.random.default_rng(seed), hooks))
    return config


async def _run(
    run_dir: Path, config: RunConfig, steps: int, rng: np.random.Generator, shared: Hooks
) -> None:
    names = {cls.name: cls for cls in Offering().register_algorithms()}
    algorithm = names[config.orchestrator.algo.type](PluginConfig())
    await algorithm.setup(LiveHost())
    hooks, store = scope("words", shared, [algorithm]), RolloutStore(run_dir)
    assembler = Buffer(
        batch_size=config.orchestrator.batch_size, max_off_policy_steps=8, max_empty_batches=50,
        pre=FilterSlot("pre_batch_filters", Hooks(), [(NoLow(PluginConfig()), True)]),
        post=FilterSlot("post_batch_filters", Hooks(), []),
    )  # fmt: skip
    order = iter([1, 0, 3, 2, *range(4, 99)])
    while assembler.batch.step <= steps:
        while not assembler.is_full:
            group_id = next(order)
            group = [rollout_of(rng, group_id) for _ in range(GROUP)]
            for rollout in group:
                rollout.cut(config.seq_len)
                await score_rollout(hooks, rollout)
            await score_group(hooks, group)
            store.group_scored(group)
            for rollout in () if hooks.scores_batches else group:
                stamp(rollout, algorithm.action_loss)
            assembler.add(group)
        for rollout in await score_batch(hooks, assembler.batch.kept):
            stamp(rollout, algorithm.action_loss)
        batch = assembler.take()
        frames = Packer(config, 1, Hooks(), installed_losses()).pack(batch)
        store.write(
            batch.step, batch.seen, batch.dropped, frames=frames, objections=batch.objections
        )
