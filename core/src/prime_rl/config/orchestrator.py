"""``[orchestrator]``: what is sampled, how it is credited, filtered and batched."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    Discriminator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from prime_rl.config.base import Settings
from prime_rl.config.models import FrozenModel


class PluginTable(Settings):
    """A table whose ``type`` names an installed plugin class; its other keys belong to that
    class."""

    model_config = Settings.model_config | {"extra": "allow"}

    type: str
    """Name of an installed class of the table's kind."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the plugin validates."""
        return dict(self.model_extra or {})


class SourceTable(PluginTable):
    """A source of rollouts that nobody samples, by the ``type`` an installed plugin offers."""


def _kind_of_source(value: Any) -> str:
    """Which of the three forms of ``source`` a value is meant to be."""
    if isinstance(value, str):
        return "policy"
    plugin = isinstance(value, SourceTable) or (isinstance(value, dict) and "type" in value)
    return "plugin" if plugin else "frozen"


SourceReference = Annotated[
    Annotated[Literal["policy"], Tag("policy")]
    | Annotated[FrozenModel, Tag("frozen")]
    | Annotated[SourceTable, Tag("plugin")],
    Discriminator(_kind_of_source),
]


class AlgoSamplingConfig(Settings):
    """``[orchestrator.algo.sampling]``: who produces the rollouts."""

    source: SourceReference = "policy"
    """``"policy"``, a frozen model (``name`` and ``base_url``), or a table whose ``type`` names an
    installed source (``dataset``, ``replay``)."""
    client: Literal["tokens", "chat"] = "tokens"
    """How a frozen model is asked: ``tokens`` sends and receives token ids, for one that shares the
    policy's tokenizer; ``chat`` sends messages to any OpenAI-compatible endpoint and tokenizes its
    replies with the policy's renderer."""


class AlgoConfig(PluginTable):
    """``[orchestrator.algo]`` or one env's ``algo``: the per-token training signal."""

    type: str = ""
    """Name of an installed algorithm. Needed, in an env's own ``algo`` too."""
    sampling: AlgoSamplingConfig = AlgoSamplingConfig()


class SamplerConfig(PluginTable):
    """``[orchestrator.sampler]``: which example is sampled next."""

    type: str = "standard"
    """Name of an installed sampler."""


class FilterConfig(PluginTable):
    """One entry of a filter slot."""

    enforce: bool = True
    """False: count what it would drop, and drop nothing."""


SHAPING_KEYS = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("n", "best_of", "min_tokens", "bad_words", "allowed_token_ids", "typical_p"),
    *("stop", "stop_token_ids", "logits_processors", "structured_outputs", "guided_json"),
    *("guided_regex", "guided_choice", "guided_grammar", "use_beam_search", "logprobs"),
}
"""Sampling parameters that training sets itself, or cannot allow."""


class SamplingConfig(Settings):
    """How rollouts are sampled. Training needs the distribution whole: no top_p, top_k or min_p
    here."""

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides the logits; the trainer applies the same to its own."""
    max_completion_tokens: PositiveInt | None = None
    """None: up to the context's end."""
    extra_body: dict[str, Any] = {}
    """Further keys of the engine's sampling parameters; none that shapes the distribution."""

    @field_validator("extra_body")
    @classmethod
    def _leaves_the_distribution_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        shaping = sorted(set(value) & SHAPING_KEYS)
        if shaping:
            raise ValueError(
                f"{', '.join(shaping)} would shape or replace the distribution that the trainer "
                "has to reproduce; set temperature and max_completion_tokens by their own keys"
            )
        return value


class EvalSamplingConfig(Settings):
    """How held-out rollouts are sampled. None: the engine's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample among the likeliest tokens that hold this much probability."""
    top_k: int | None = None
    """Sample among so many likeliest tokens. -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens below this share of the likeliest one's probability."""
    max_completion_tokens: PositiveInt | None = None
    """Per turn. None: up to the context's end."""
    extra_body: dict[str, Any] = {}
    """Further keys of the engine's sampling parameters."""


class SourceConfig(Settings):
    """One verifiers environment, to train on or to evaluate with."""

    id: str
    """The taskset's id, as verifiers resolves it."""
    name: str | None = None
    """Label in metrics and files. None: the id."""
    args: dict[str, Any] = {}
    """The taskset's own settings."""
    harness: dict[str, Any] | None = None
    """The verifiers harness (``id`` and its settings). None: the one the taskset brings, else
    the ``harness`` of ``[orchestrator.train]`` or ``[orchestrator.eval]``."""
    timeout: PositiveFloat | None = 600.0
    """Seconds one rollout may take before it counts as failed. None: no bound."""
    max_turns: PositiveInt | None = None
    """Turns after which a rollout is stopped. None: as the taskset has it."""

    @property
    def label(self) -> str:
        """The name metrics and files carry."""
        return self.name or self.id


class EnvConfig(SourceConfig):
    """``[[orchestrator.train.env]]``: an environment to train on."""

    algo: AlgoConfig | None = None
    """This env's algorithm. None: ``[orchestrator.algo]``."""
    ratio: PositiveFloat | None = None
    """Share of groups, relative to the other envs' ratios. None: 1."""
    group_size: PositiveInt | None = None
    """None: ``orchestrator.group_size``."""
    sampling: SamplingConfig | None = None
    """Laid over ``[orchestrator.train.sampling]``, key by key."""


class EvalEnvConfig(SourceConfig):
    """``[[orchestrator.eval.env]]``: held-out examples, before the first step, after the last, and
    in between."""

    interval: PositiveInt | None = None
    """Steps between two evaluations while training goes on. None: before and after only."""
    num_examples: PositiveInt = 64
    """How many examples are evaluated, from the first."""
    group_size: PositiveInt = 1
    """Rollouts an example: the reward reported is their mean; where every reward is 0 or 1, pass@k
    and pass^k are reported for k = 1, 2, 4 ... up to this. A failed rollout counts as 0."""
    sampling: EvalSamplingConfig | None = None
    """Laid over ``[orchestrator.eval.sampling]``, key by key."""


AnyEnv = TypeVar("AnyEnv", EnvConfig, EvalEnvConfig)


def with_sampling_of(group: Settings | None, envs: tuple[AnyEnv, ...]) -> tuple[AnyEnv, ...]:
    """The envs, each own ``sampling`` table completed by the group's; None: the group's is invalid.

    Done at validation: ``run.json`` writes every key of a table, so a later reader cannot know
    which keys the env set itself.
    """
    return tuple(
        env.model_copy(update={"sampling": group.model_copy(update=own)})
        if group is not None and (own := _set_keys(env.sampling)) is not None
        else env
        for env in envs
    )


def _set_keys(table: Settings | None) -> dict[str, Any] | None:
    return None if table is None else {key: getattr(table, key) for key in table.model_fields_set}


class TrainConfig(Settings):
    """``[orchestrator.train]``"""

    sampling: SamplingConfig = SamplingConfig()
    harness: dict[str, Any] | None = None
    """The verifiers harness of tasksets that bring none, where the env names none either."""
    env: tuple[EnvConfig, ...] = ()

    @field_validator("env")
    @classmethod
    def _complete(cls, envs: tuple[EnvConfig, ...], info: ValidationInfo) -> tuple[EnvConfig, ...]:
        return with_sampling_of(info.data.get("sampling"), envs)


class EvalConfig(Settings):
    """``[orchestrator.eval]``"""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    harness: dict[str, Any] | None = None
    """The verifiers harness of tasksets that bring none, where the env names none either."""
    skip_first_step: bool = False
    """True: do not evaluate the model that training starts from."""
    max_hold_seconds: PositiveFloat = 300.0
    """Seconds an evaluation between two steps may keep new weights waiting: it measures one
    version, so the engines get the next when it is done. What is unfinished then is left out, and
    counted."""
    env: tuple[EvalEnvConfig, ...] = ()

    @field_validator("env")
    @classmethod
    def _complete(
        cls, envs: tuple[EvalEnvConfig, ...], info: ValidationInfo
    ) -> tuple[EvalEnvConfig, ...]:
        return with_sampling_of(info.data.get("sampling"), envs)


class RendererConfig(Settings):
    """``[orchestrator.renderer]``: messages to tokens. Other keys belong to the renderer."""

    model_config = Settings.model_config | {"extra": "allow"}

    name: str = ""
    """Name of an installed renderer. Needed."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the renderer validates."""
        return dict(self.model_extra or {})


class OrchestratorConfig(Settings):
    """``[orchestrator]``"""

    batch_size: PositiveInt = 128
    """Rollouts a step. Must be a multiple of every env's group size."""
    group_size: PositiveInt = 8
    """Rollouts sampled for one example."""
    max_off_policy_steps: NonNegativeInt = 8
    """How many versions behind the weights it trains a rollout may be, counted from its start."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups in flight, as a multiple of what the batch still needs, so that filters do not starve
    it."""
    max_inflight_rollouts: PositiveInt | None = None
    """Bound on rollouts being sampled at once. None: ``batch_size * oversampling_factor``."""
    algo: AlgoConfig = AlgoConfig()
    sampler: SamplerConfig = SamplerConfig()
    buffer: dict[str, Any] | None = None
    """Short for ``[orchestrator.sampler]`` with these settings and the type ``buffer_sampler``."""
    buffer_sampler: str = ""
    """Name of the installed sampler that ``buffer`` selects."""
    renderer: RendererConfig = RendererConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    pre_batch_filters: tuple[FilterConfig, ...] = ()
    """Asked when a group is scored; what they enforce takes no place in the batch. Setting it
    replaces it."""
    post_batch_filters: tuple[FilterConfig, ...] = ()
    """Asked of the batch; what they drop is back-filled. Setting it replaces it."""
    max_empty_batches: PositiveInt = 10
    """Stop the run after so many batches' worth of rollouts in a row left nothing to train."""
    save_rollouts: bool = True
    """Write every step's rollouts to the run directory."""
    weights_timeout: PositiveFloat = 1200.0
    """Seconds to wait for new weights before the run is declared stuck."""

    @model_validator(mode="after")
    def _one_sampler(self) -> OrchestratorConfig:
        if self.buffer is not None and self.sampler != SamplerConfig():
            raise ValueError(
                "[orchestrator.buffer] is short for a sampler with these settings, and "
                "[orchestrator.sampler] is set too. Keep one of them."
            )
        return self

    @property
    def max_inflight(self) -> int:
        """Bound on rollouts being sampled at once."""
        return self.max_inflight_rollouts or int(self.batch_size * self.oversampling_factor)

    @property
    def sampler_table(self) -> SamplerConfig:
        """The sampler, whichever way it was written."""
        if self.buffer is None:
            return self.sampler
        return SamplerConfig(type=self.buffer_sampler, **self.buffer)
