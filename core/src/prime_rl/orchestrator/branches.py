"""``Host.rollout`` and ``Host.reward``: the env's own episode, from the middle of a rollout."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prime_rl.config.contract import SamplingConfig
from prime_rl.env.environment import Environment
from prime_rl.env.episode import ModelEndpoint, RolloutResult
from prime_rl.env.traces import build_rollout
from prime_rl.errors import BranchFailed
from prime_rl.inference.replay import Branch, RecordedPath, ReplayServer
from prime_rl.orchestrator.router import EngineRouter
from prime_rl.orchestrator.sources import train_sampling
from prime_rl.rollout import Prefix, Rollout, Sample


class Branches:
    """Plays episodes whose first replies are recorded, for every env of a run."""

    def __init__(
        self,
        router: EngineRouter,
        *,
        stop_token_ids: Callable[[], Sequence[int]],
        version: Callable[[], int],
        most_inflight: int,
    ) -> None:
        """``version``: the policy's version now. ``most_inflight``: episodes at once. Rollouts wait
        for their branches, so these have a limit of their own."""
        self._router = router
        self._stops = stop_token_ids
        self._version = version
        self._slots = asyncio.Semaphore(most_inflight)
        self._server: ReplayServer | None = None
        self._starting = asyncio.Lock()

    async def close(self) -> None:
        """Stop listening, if anything asked for a branch."""
        if self._server is not None:
            await self._server.close()

    async def rollout(
        self,
        prefix: Prefix,
        environment: Environment,
        *,
        sampling: SamplingConfig,
        seed: int,
        seq_len: int,
    ) -> Rollout:
        """The rollout that goes on from ``prefix``. Raises ``BranchFailed``."""
        parent = prefix.rollout
        paths = recorded_paths(prefix)
        first = paths[0]
        end = first.end

        # The token behind the prefix is sampled and begins no reply: the prefix cuts one in two.
        inside = 0 < end < len(first.token_ids)
        branch = Branch(
            paths=paths,
            may_go_on=True,
            cuts_reply=bool(inside and first.sampled[end] and not first.starts[end]),
            stop_token_ids=frozenset(self._stops()),
            cache_salt=str(self._version()),
        )

        version = self._version()
        temperature = parent.samples[prefix.sample].temperature
        plan = sampling.model_copy(update={"temperature": temperature})
        result = await self._play(branch, parent, environment=environment, sampling=plan, seed=seed)

        rollout = build_rollout(
            result,
            env=parent.env,
            example_id=parent.example_id,
            group_id=parent.group_id,
            policy_version=version,
            temperature=temperature,
        )

        rollout.episode_id = parent.episode_id
        rollout.task = dict(parent.task)
        rollout.settle()
        leave_out_replayed(rollout, branch)
        rollout.cut(seq_len)
        return rollout

    async def reward(
        self,
        sample: Sample,
        parent: Rollout,
        environment: Environment,
        *,
        sampling: SamplingConfig,
    ) -> float:
        """The env's reward of an episode with the replies of ``sample``. Raises
        ``BranchFailed``."""
        first = _path(sample, sample.loss_mask, logprobs=sample.inference_logprobs, end=len(sample))
        branch = Branch(
            paths=[first, *recorded_paths(Prefix(rollout=parent, sample=0, end=None))],
            may_go_on=False,
            cuts_reply=False,
            stop_token_ids=frozenset(self._stops()),
            cache_salt=str(self._version()),
        )

        # The replies are recorded, so the seed samples nothing.
        result = await self._play(
            branch, parent, environment=environment, sampling=sampling, seed=0
        )
        return result.reward

    async def _play(
        self,
        branch: Branch,
        parent: Rollout,
        environment: Environment,
        sampling: SamplingConfig,
        seed: int,
    ) -> RolloutResult:
        server = await self._listening()
        example = environment.examples[parent.example_id].with_prompt(parent.prompt)
        key = server.add(branch)

        async def episode(endpoint: ModelEndpoint) -> list[RolloutResult]:
            # The pool plays an episode again if its engine fails: the record begins anew.
            branch.restart(endpoint.base_url.removesuffix("/v1"))
            return await environment.run(
                example,
                model=replace(endpoint, base_url=server.url),
                sampling=train_sampling(sampling),
                group_id=parent.group_id,
                cache_salt=key,
                seed=seed,
            )

        try:
            async with self._slots:
                results = await self._router.run(parent.group_id, episode)
        finally:
            server.remove(key)

        failed = next((result for result in results if not result.ok), None)
        if branch.fault is not None or failed is not None:
            kind = "" if failed is None else f"{failed.error_type}: {failed.error}"
            raise BranchFailed(
                f"env {parent.env!r}, example {parent.example_id}: {branch.fault or kind}"
            )

        return next(result for result in results if result.trainable)

    async def _listening(self) -> ReplayServer:
        # Two rollouts may ask for the first branch at the same time.
        async with self._starting:
            if self._server is None:
                server = ReplayServer()
                await server.start()
                self._server = server
        return self._server


def recorded_paths(prefix: Prefix) -> list[RecordedPath]:
    """Those of a rollout up to the end of ``prefix``, its own sample first. Other samples count up
    to the same moment: nodes are numbered in the order of time."""
    rollout = prefix.rollout
    columns = rollout.sampled_paths
    base = rollout.samples[prefix.sample]
    end = len(base) if prefix.end is None else prefix.end

    sampled, logprobs = columns[prefix.sample]
    paths = [_path(base, sampled, logprobs=logprobs, end=end)]

    for number, sample in enumerate(rollout.samples):
        if number == prefix.sample or sample.node_ids is None or base.node_ids is None:
            continue

        length = len(sample)
        if end < len(base):
            length = int(np.searchsorted(sample.node_ids, base.node_ids[end]))

        sampled, logprobs = columns[number]
        paths.append(_path(sample, sampled, logprobs=logprobs, end=length))

    return paths


def _path(sample: Sample, sampled: Any, logprobs: Any, end: int) -> RecordedPath:
    nodes = sample.node_ids
    new = np.ones(len(sample), np.bool_)
    # A reply starts behind a token that was not sampled, and where the message changes.
    if len(sample) > 1:
        new[1:] = ~sampled[:-1]
        if nodes is not None:
            new[1:] |= nodes[1:] != nodes[:-1]

    return RecordedPath(
        token_ids=sample.token_ids,
        sampled=sampled,
        logprobs=logprobs,
        starts=sampled & new,
        policy_versions=sample.policy_versions,
        end=end,
    )


def leave_out_replayed(rollout: Rollout, branch: Branch) -> None:
    """What came from the record trains in the rollout that it was recorded of, and not here."""
    first = branch.paths[0]
    whole = first.token_ids[: first.end]

    for sample in rollout.samples:
        if len(sample) > first.end and np.array_equal(sample.token_ids[: first.end], whole):
            # The prefix trains in the parent.
            sample.is_repeat = np.arange(len(sample)) < first.end
        # Replies that were read from the record train in the parent too.
        for token_ids, begin in branch.replayed:
            end = len(token_ids)
            if len(sample) >= end and np.array_equal(sample.token_ids[:end], token_ids):
                sample.loss_mask[begin:end] = False
                sample.inference_logprobs[begin:end] = 0.0
                if sample.policy_versions is not None:
                    sample.policy_versions[begin:end] = -1

    rollout.samples = [sample for sample in rollout.samples if sample.loss_mask.any()]


def seed_of(run_seed: int, prefix: Prefix, number: int) -> int:
    """Distinct for each branch of a run, and the same in every run of one seed."""
    parent = prefix.rollout
    place = (
        run_seed,
        parent.env,
        parent.group_id,
        parent.episode_id,
        prefix.sample,
        prefix.end,
        number,
    )
    # The built-in `hash` of a text differs between processes.
    digest = hashlib.blake2b(repr(place).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 2**31
