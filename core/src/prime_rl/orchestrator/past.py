"""Earlier versions of the policy: which are kept, and the engine that serves one of them.

    version n is published -> kept as past/step_n, by links    every so many steps
    an episode, a request  -> ``at(version)``                  the engine loads it, if need be

An engine has one version at a time. Episodes and requests for this version run side by side. The
engine loads another version when they have ended, so that none of them is answered by two versions.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prime_rl.config.orchestrator import PastConfig
from prime_rl.errors import EngineGone, VersionGone
from prime_rl.inference.fleet import Fleet
from prime_rl.plugins.algorithm import Completion, ReferenceModel, Tokens
from prime_rl.plugins.observer import Observer
from prime_rl.rundir.checkpoints import link_or_copy
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.status import names_in
from prime_rl.streams import FloatColumn, IntColumn

log = logging.getLogger(__name__)

KEPT = "past"
"""Folder of the run directory."""
RETRY_SECONDS = 0.5
"""Between two attempts to load a version while the engine does not answer."""


class PastPolicies(Observer):
    """The pool of earlier versions, and who uses the engine now."""

    def __init__(
        self, run_dir: Path, config: PastConfig, fleet: Fleet, first: Path, step: int, seed: int
    ) -> None:
        """``first``: the folder of version 0, which the engine has. ``step``: the version that the
        run starts from; later ones of an earlier attempt are removed."""
        self.fleet = fleet
        self._folder = run_dir / KEPT
        self._broadcasts = run_dir / "broadcasts"
        self._config = config
        self._first = first
        self._seed = seed
        self._loaded: int | None = 0
        self._num_users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._turn = asyncio.Lock()
        self._num_loads = 0
        self._claims = Counter[int]()
        """Who uses a version or waits for it: it is not removed."""
        self._seen: tuple[int, ...] = (0,)
        """``versions`` when they could last be read."""

        # A resumed run makes the versions after its checkpoint again.
        for version in self.versions:
            if version > step:
                shutil.rmtree(self._folder / f"step_{version}", ignore_errors=True)

    # -- the pool -----------------------------------------------------------------------------

    @property
    def versions(self) -> tuple[int, ...]:
        """Version 0, and those that are kept, in order."""
        try:
            names = [name for name in names_in(self._folder) if name.startswith("step_")]
        except OSError as error:
            poll_failed(self._folder, error)
            return self._seen
        poll_succeeded(self._folder)

        numbers = [name.removeprefix("step_") for name in names]
        kept = sorted(int(number) for number in numbers if number.isdigit())
        self._seen = (0, *kept)
        return self._seen

    def draw(self, version: int) -> int:
        """The version that a group meets which starts at ``version`` of the policy: each of the
        pool is as likely. It changes with the pool, every ``every`` steps."""
        period = version // self._config.every
        earlier = [each for each in self.versions if each <= version]

        def drawn(candidate: int) -> float:
            return random.Random(f"{self._seed} past {period} {candidate}").random()

        # Not ``choice``: when a version is removed, groups that met another one still do.
        return max(earlier, key=drawn)

    async def version_pending(self, version: int) -> None:
        """Keep the version if it is the first of its period, and no more than ``keep``."""
        kept = self.versions
        every = self._config.every
        if version // every > kept[-1] // every:
            try:
                await asyncio.to_thread(self._keep, version)
            except OSError as error:
                log.error(
                    "version %d of the policy is not kept for orchestrator.past, the run goes on: "
                    "%s. Free some space, or lower orchestrator.past.keep.",
                    version,
                    error,
                )
                return

            # Version 0 always stays: the model that the run starts from.
            for old in self.versions[1 : -self._config.keep]:
                if old != self._loaded and not self._claims[old]:
                    gone = self._folder / f".step_{old}"
                    (self._folder / f"step_{old}").rename(gone)  # at once: none draws half of it
                    await asyncio.to_thread(shutil.rmtree, gone, True)

    def _keep(self, version: int) -> None:
        """Raises ``OSError``."""
        # `versions` may be read at any time, so the folder gets its name when it is complete.
        published = self._broadcasts / f"step_{version}"
        incomplete = self._folder / f".step_{version}"
        shutil.rmtree(incomplete, ignore_errors=True)
        shutil.copytree(published, incomplete, copy_function=link_or_copy)
        incomplete.rename(self._folder / f"step_{version}")

    # -- the engine ---------------------------------------------------------------------------

    @asynccontextmanager
    async def at(self, version: int) -> AsyncIterator[None]:
        """While the code inside runs, the engine serves ``version``. Waits for the users of
        another version; the lock is fair, so that they wait for this one in turn. Raises
        ``VersionGone``."""
        self._claims[version] += 1
        try:
            async with self._turn:
                if version != self._loaded:
                    # Later requests wait for `_turn`, so the users of the other one run out.
                    await self._unused.wait()
                    await self._load(version)
                self._num_users += 1
                self._unused.clear()

            try:
                yield
            finally:
                self._num_users -= 1
                if not self._num_users:
                    self._unused.set()
        finally:
            self._claims[version] -= 1

    async def _load(self, version: int) -> None:
        folder = self._first if version == 0 else self._folder / f"step_{version}"
        if version not in self.versions:
            raise VersionGone(
                f"version {version} of the policy is not there: orchestrator.past keeps "
                f"{', '.join(map(str, self.versions))}. Ask for one of host.past_versions, or "
                "raise orchestrator.past.keep."
            )

        self._loaded = None  # until it is done: a cancelled load may leave either
        while True:
            try:
                await self.fleet.update_weights(folder, version)
                break
            except EngineGone:  # ``Fleet.run`` has the limit
                await asyncio.sleep(RETRY_SECONDS)

        self._loaded = version
        self._num_loads += 1
        log.info("the past policy is version %d now", version)

    def take_metrics(self) -> dict[str, float]:
        """The version of the engine, and how often it has changed."""
        loaded = -1 if self._loaded is None else self._loaded
        return {"past/version": float(loaded), "past/loads": float(self._num_loads)}


class PastModel:
    """A ``ReferenceModel``: the policy at an earlier version."""

    def __init__(self, past: PastPolicies, version: int, model: ReferenceModel) -> None:
        self._past = past
        self._version = version
        self._model = model

    async def logprobs(self, token_ids: Tokens, *, group_id: int = 0) -> FloatColumn:
        """As ``ReferenceModel.logprobs``. Raises ``VersionGone``."""
        async with self._past.at(self._version):
            return await self._model.logprobs(token_ids, group_id=group_id)

    async def top_logprobs(
        self, token_ids: Tokens, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """As ``ReferenceModel.top_logprobs``. Raises ``VersionGone``."""
        async with self._past.at(self._version):
            return await self._model.top_logprobs(token_ids, k, group_id=group_id)

    async def generate(
        self,
        token_ids: Tokens,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] | None = None,
        n: int = 1,
        seed: int | None = None,
        group_id: int = 0,
    ) -> list[Completion]:
        """As ``ReferenceModel.generate``. Raises ``VersionGone``."""
        settings: dict[str, Any] = {"stop_token_ids": stop_token_ids, "n": n, "seed": seed}
        async with self._past.at(self._version):
            return await self._model.generate(
                token_ids,
                max_tokens=max_tokens,
                temperature=temperature,
                group_id=group_id,
                **settings,
            )
