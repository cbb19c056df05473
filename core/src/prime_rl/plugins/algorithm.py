"""Algorithms and filters, and what core lends to an algorithm: a ``Host`` with models that score.

Orchestrator side: entry-point group ``prime_rl``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np

from prime_rl.errors import StreamError
from prime_rl.plugins.base import Offer
from prime_rl.rollout import Prefix, Rollout, Sample
from prime_rl.streams import FloatColumn, IntColumn, LossComponent

if TYPE_CHECKING:
    import logging

    from prime_rl.config.contract import FrozenModel

GREEDY = 1e-5
"""Temperatures below are greedy to an engine."""

Tokens: TypeAlias = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class Completion:
    """What a model sampled after a prompt."""

    prompt_ids: IntColumn
    token_ids: IntColumn
    """Its C tokens, a stop token included: [C]."""
    logprobs: FloatColumn
    """log μ of each token at ``temperature``: [C]."""
    finish_reason: str
    """``stop``: it ends with a stop token. ``length``: it is cut."""
    temperature: float = 1.0
    policy_versions: IntColumn | None = None
    """The policy version that sampled each token: [C]. None: a frozen model."""

    def sample(self) -> Sample:
        """Prompt and completion as a sample in which the completion trains. Append it to
        ``rollout.samples`` and assign credit to it as to the others.

        Raises ``StreamError`` at temperature 0, where nothing is sampled.
        """
        if self.temperature < GREEDY:
            raise StreamError(
                "a completion at temperature 0 is not sampled, so its logprobs cannot train. "
                "Generate it at the temperature of the rollouts."
            )

        # The C sampled tokens come behind P of the prompt, which have no logprob and no version.
        before = len(self.prompt_ids)
        versions = self.policy_versions
        return Sample(
            token_ids=np.concatenate([self.prompt_ids, self.token_ids]),
            loss_mask=np.arange(before + len(self.token_ids)) >= before,
            inference_logprobs=np.concatenate([np.zeros(before), self.logprobs]),
            temperature=self.temperature,
            policy_versions=None
            if versions is None
            else np.concatenate([np.full(before, -1), versions]),
        )


class ReferenceModel(Protocol):
    """A model that scores and samples tokens: the live policy, or a frozen one.

    Requests are bounded and retried; while the endpoint does not answer, they wait and the run
    reports it. Requests with one ``group_id`` go to one replica. They raise ``EngineError`` if the
    endpoint refuses them, ``OverlongError`` if the tokens do not fit its context.
    """

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """The log-probability of each token given those before it: [T]; 0.0 for the first. At
        temperature 1: to compare with the policy's, declare ``needs_temperature = 1.0``."""
        ...

    async def top_logprobs(
        self, token_ids: Tokens, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """The ``k`` most likely tokens in the place of each token, given those before it: ids and
        log-probabilities, [T, k] each, likeliest first. The first row is 0. With the size of the
        vocabulary as ``k`` it is the whole distribution. Raises ``EngineError`` if the endpoint
        offers fewer alternatives."""
        ...

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
        """Sample ``n`` completions (at most 128) of a prompt, from the whole distribution.

        ``max_tokens``: the most of each; fewer where the context ends. ``stop_token_ids``: besides
        the model's own end; None: those of the run's renderer.

        ``seed`` tells requests of one group and prompt apart; env, group, prompt and the run's seed
        salt it. None: the number of such requests before this one. Where siblings send the same
        prompt, that number depends on timing: pass ``rollout.episode_id`` to make it repeatable.
        """
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class LiveSampling:
    """What a source needs that talks to the live policy itself, such as one that serves agents.
    ``Host.live`` gives it."""

    policy: ReferenceModel
    """The live policy, with a limit of requests in flight of its own."""
    renderer: Any
    """A new object of the ``renderers`` package for the policy's tokenizer, which nothing else
    uses. Tokenizers are not thread-safe: call it from one thread at a time."""
    temperature: float
    """Temperature of the env; the trainer reproduces it."""
    group_size: int
    """The env's."""
    max_off_policy_steps: int
    """Setting of the run: the most versions between a rollout's first token and its batch."""
    rollout: Callable[..., Rollout]
    """``rollout(trace, example_id=..., group_id=..., policy_version=...)``: the rollout of a
    complete verifiers trace. Its samples have the tokens that were sampled, and ``policy_versions``
    where the ``info`` of the trace has ``weight_versions``. Raises ``StreamError`` for one that
    cannot train."""


class Host(Protocol):
    """What core lends to the algorithm, or the source, of one env; passed to ``setup``."""

    @property
    def env(self) -> str:
        """The env's label."""
        ...

    @property
    def seq_len(self) -> int:
        """Longest sample that trains, in tokens."""
        ...

    @property
    def max_completion_tokens(self) -> int | None:
        """Most tokens of a turn; None: up to the end of the context."""
        ...

    @property
    def seed(self) -> int:
        """The run's. Derive yours from it, so that a run can be repeated."""
        ...

    @property
    def step(self) -> int:
        """The last step that the policy, as it samples now, has trained."""
        ...

    @property
    def folder(self) -> Path:
        """A folder of the run for this env's own files, which nothing reads or deletes. State that
        a resumed run needs belongs into ``save``."""
        ...

    @property
    def logger(self) -> logging.Logger:
        """Its lines are in the orchestrator's log, with the env's label."""
        ...

    @property
    def policy(self) -> ReferenceModel:
        """The live policy, as it samples now."""
        ...

    @property
    def initial(self) -> ReferenceModel:
        """The policy's first weights: an engine that the run starts, or ``orchestrator.initial``.
        For an algorithm that declares ``needs_initial``; read it in ``setup``."""
        ...

    @property
    def ema(self) -> ReferenceModel:
        """The moving average of the policy's weights. As ``initial``, with ``needs_ema``."""
        ...

    def past(self, version: int) -> ReferenceModel:
        """The policy at an earlier version, for an algorithm that declares ``needs_past`` and in an
        env with an agent whose ``model`` is ``past``. One engine serves one version at a time:
        requests for another one wait until those in flight, and the episodes against it, have
        ended. A request raises ``VersionGone`` for a version that is not kept."""
        ...

    @property
    def past_versions(self) -> tuple[int, ...]:
        """The versions that ``past`` has now, in order: 0 and those that ``[orchestrator.past]``
        keeps."""
        ...

    def connect(self, model: FrozenModel) -> ReferenceModel:
        """A frozen model to score with. Core closes it at the end of the run."""
        ...

    @property
    def generate(self) -> Callable[..., Awaitable[list[Completion]]]:
        """``policy.generate``: sample from the live policy."""
        ...

    async def rollout(self, prefix: Prefix, *, number: int = 0) -> Rollout:
        """Go on from the middle of a rollout of this env: with its tools, its other messages and
        its reward. ``number`` tells branches of one prefix apart; a run of the same seed repeats
        them.

        The episode is played again from its start, with the replies that are recorded up to the
        prefix, so its environment has to answer alike. What is recorded has no ``loss_mask`` in the
        result, which may therefore have no sample: append the others by ``Rollout.adopt`` to train
        them. Raises ``BranchFailed`` if the episode fails, ``ConfigError`` for an env of several
        agents and one whose workers are elsewhere.
        """
        ...

    async def reward(self, sample: Sample, rollout: Rollout) -> float:
        """The env's reward of an episode in which the policy replies as in ``sample``; replies that
        the sample does not have as sampled are those of ``rollout``. Raises as ``rollout``, and
        ``BranchFailed`` if the episode does not end with the sample."""
        ...

    def live(self, *, max_concurrency: int) -> LiveSampling:
        """The live policy for a source that talks to it itself. ``max_concurrency``: limit of its
        requests in flight, which do not count in the limit of ``policy``. Loads a tokenizer: call
        it in a thread."""
        ...

    def decode(self, token_ids: Tokens) -> str:
        """The text of tokens of the policy's tokenizer, without special tokens."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        renderer: str | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Tokens of a conversation in the policy's tokenizer. ``renderer`` names another family
        than the run's."""
        ...

    def supervised_sample(self, messages: Sequence[Mapping[str, Any]]) -> Sample:
        """A conversation as a sample. ``loss_mask`` selects the assistant's own tokens;
        ``inference_logprobs`` are 0.0, since no model sampled them. Raises ``ConfigError`` if it
        is several samples."""
        ...

    def supervised_samples(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Sample]:
        """The same for any conversation: a reply whose prompt does not extend the turn before, as
        where earlier thoughts are stripped, is a sample of its own. ``tools``: those that the
        prompt tells of, in OpenAI's form."""
        ...

    def task(self, example_id: int) -> Mapping[str, Any]:
        """The fields of one example of the env, ``prompt`` among them. Raises ``IndexError`` beyond
        its end."""
        ...

    @property
    def num_examples(self) -> int | None:
        """None: the env generates examples without end."""
        ...

    @property
    def agents(self) -> tuple[str, ...]:
        """The seats of the env, by name: the possible values of ``rollout.agent``."""
        ...

    @property
    def envs(self) -> tuple[str, ...]:
        """The labels of every training env of the run."""
        ...

    @property
    def has_checkpoints(self) -> bool:
        """Whether the run writes checkpoints (``ckpt.enabled``). False: ``save`` is never called,
        and a run that fails begins again."""
        ...


class Algorithm(Offer):
    """One env's training signal. Subclass, set ``name``, implement a scoring hook."""

    action_loss: LossComponent = "rl"
    """The loss component that trains the tokens the model sampled. Set it in ``__init__`` where a
    setting chooses it."""

    losses: Collection[str] = ()
    """Losses that it was written for. Without ``rl`` and its ``action_loss`` among them, the run's
    ``[trainer.loss]`` must be one of them. Declare what ``assign_weights`` names too, with ``rl``
    for any loss of ``[trainer.loss]``: a table ``[trainer.losses.<name>]`` that no algorithm
    declares is a config error."""

    objective: str | Callable[[Any], Any] = "expected_reward"
    """Whose gradient its expected update claims to be; ``none``: no claim. Another one is a method
    of a question's ``Outcomes`` (``prime-rl plugins prove``)."""

    needs_heads: Collection[str] = ()
    """Heads whose outputs its losses read. A run without one of them is a config error. Set it in
    ``__init__`` where a setting chooses it."""

    group_relative: ClassVar[bool] = False
    """Credit is relative to siblings: ``group_size = 1`` cannot learn and is a config error."""

    needs_siblings: bool | None = None
    """Its ``score_group`` compares the rollouts of a group, which therefore wait for each other.
    False: it looks at each alone, so that a rollout trains as soon as it ends. None: it does if it
    is ``group_relative`` or has a ``score_group``."""

    grows_groups: ClassVar[bool] = False
    """It asks for more members than ``group_size`` (``wanted_members``): an env whose
    ``max_group_size`` is not larger is a config error."""

    trains_at_most: int | None = None
    """Most members of a group that it trains: it assigns the weight 0 to the others. A group that
    may grow (``wanted_members``) keeps so many places in the batch. None: all members train."""

    needs_frozen_source: ClassVar[bool] = False
    """It imitates its source: sampling from the policy itself is a config error."""

    needs_attribution: ClassVar[bool] = False
    """It reads ``sample.roles`` or ``sample.is_content``: a renderer without them is a config
    error."""

    needs_temperature: ClassVar[float | None] = None
    """The only sampling temperature it can learn at; another one is a config error. None: any."""

    needs_initial: bool = False
    """It reads ``host.initial``: an engine that the run starts, or ``orchestrator.initial``."""

    needs_ema: bool = False
    """It reads ``host.ema``: an engine that the run starts, with ``trainer.ema_decay``."""

    needs_past: bool = False
    """It reads ``host.past``: the run keeps earlier versions of the policy and starts an engine for
    them (``[orchestrator.past]``)."""

    order_dependent: ClassVar[bool] = False
    """Credit depends on earlier rollouts, as with a running baseline."""

    @property
    def compares_siblings(self) -> bool:
        """``needs_siblings``, or else the value that follows from the class."""
        if self.group_relative or self.needs_siblings is not None:
            return self.group_relative or bool(self.needs_siblings)
        return hasattr(type(self), "score_group")

    def check_agents(self, env: str, agents: tuple[str, ...]) -> None:
        """Raise ``ConfigError`` if the settings do not fit the env's agents.

        Called before any process starts, also with ``--dry-run``. For an algorithm that overrides
        it, core imports verifiers and the taskset to find the agents, which takes seconds.
        """

    async def setup(self, host: Host) -> None:
        """Connect what the algorithm owns (a teacher, a judge) before the first rollout."""

    async def close(self) -> None:
        """Release what ``setup`` acquired."""

    def save(self, directory: Path) -> None:
        """Write the state that ``load`` needs, if any. The folder exists and belongs to this env
        alone."""

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote. Raises ``ConfigError`` if it does not fit."""


class Filter(Offer):
    """One reason to drop rollouts. Subclass, set ``name``, implement ``filter_rollout``."""
