"""``[orchestrator]``: sampling, credit, filters and batches."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
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

from prime_rl.config.base import PluginTable, Settings, VariableName
from prime_rl.config.contract import FrozenModel, SamplingConfig


class SourceTable(PluginTable):
    """A source of rollouts that no model samples, by the ``type`` an installed plugin offers."""

    type: str
    """Name of an installed source."""


def _kind_of_source(value: Any) -> str:
    """The tag of the form of ``source`` that a value has."""
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
    """``[orchestrator.algo.sampling]``: where the rollouts come from."""

    source: SourceReference = "policy"
    """``"policy"``, a frozen model (``name`` and ``base_url``), or a table whose ``type`` names an
    installed source (``dataset``, ``replay``)."""
    client: Literal["tokens", "chat"] = "tokens"
    """Requests to a frozen model: ``tokens`` exchanges token ids and needs the policy's tokenizer;
    ``chat`` sends messages to any OpenAI-compatible endpoint and tokenizes the replies with the
    policy's renderer."""


class AlgoConfig(PluginTable):
    """``[orchestrator.algo]`` or one env's ``algo``: the per-token training signal."""

    type: str = ""
    """Name of an installed algorithm. Required, also in an env's own ``algo``."""
    sampling: AlgoSamplingConfig = AlgoSamplingConfig()


class SamplerConfig(PluginTable):
    """``[orchestrator.sampler]``: which example is sampled next."""

    type: str = ""
    """Name of an installed sampler. Required."""


class FilterConfig(PluginTable):
    """One entry of a filter slot."""

    type: str
    """Name of an installed filter."""
    enforce: bool = True
    """False: only count what it would drop."""


def _top_k(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("expected 1 or more, or -1 for all tokens")
    return value


class EvalSamplingConfig(Settings):
    """How held-out rollouts are sampled. None: the engine's default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens with this total probability."""
    top_k: Annotated[int, AfterValidator(_top_k)] | None = None
    """Sample from this many likeliest tokens. -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens below this fraction of the likeliest token's probability."""
    max_completion_tokens: PositiveInt | None = None
    """Per turn. None: up to the end of the context."""
    extra_body: dict[str, Any] = {}
    """More sampling parameters of the engine."""


NAME = r"\w[\w.+=@: -]*"
"""Names that can be a folder's: they have no separator, and do not start with a dot."""


ADDRESS = re.compile(r"tcp://([\w.-]+|\[[0-9a-fA-F:.%]+\]):(?P<port>[0-9]{1,5})")
"""Of a server of an environment."""
EnvWorkers = NonNegativeInt | Literal["auto"]


class SourceConfig(Settings):
    """One verifiers environment, to train on or to evaluate with."""

    id: Annotated[str, Field(pattern=rf"^{NAME}(/{NAME})*$", max_length=200)]
    """The taskset's id, as verifiers resolves it."""
    name: Annotated[str, Field(pattern=rf"^{NAME}$", max_length=100)] | None = None
    """Label in metrics and files. None: the id."""
    args: dict[str, Any] = {}
    """The taskset's own settings."""
    harness: dict[str, Any] | None = None
    """The verifiers harness (``id`` and its settings). None: the one the taskset brings, else
    the ``harness`` of ``[orchestrator.train]`` or ``[orchestrator.eval]``."""
    timeout: PositiveFloat | None = 600.0
    """Seconds until a rollout counts as failed. None: no limit."""
    max_turns: PositiveInt | None = None
    """Turns after which a rollout is stopped. None: the taskset's limit."""
    on_overlong: Literal["truncate", "fail"] = "truncate"
    """A conversation that outgrows the model's context after its first reply: ``truncate`` ends the
    rollout there, to be scored and trained as truncated; ``fail`` drops it."""
    env_workers: EnvWorkers | None = None
    """None: ``orchestrator.env_workers``."""
    address: tuple[str, ...] = ()
    """Running env servers (``tcp://HOST:PORT``), in place of workers of the run."""

    @field_validator("address")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            match = ADDRESS.fullmatch(address)
            if match is None or not 1 <= int(match["port"]) <= 65535:
                raise ValueError(f"expected tcp://HOST:PORT of serve-env, got {address!r}")
        if len({*addresses}) < len(addresses):
            raise ValueError("names a server twice")
        return addresses

    @model_validator(mode="after")
    def _workers_are_of_the_run(self) -> Self:
        if self.address and self.env_workers is not None:
            raise ValueError(
                f"address names servers that run already, and env_workers = {self.env_workers!r} "
                "asks for workers of the run. Leave one of them out."
            )
        return self

    @property
    def label(self) -> str:
        """Its name in metrics and files."""
        return self.name or self.id


class EnvConfig(SourceConfig):
    """``[[orchestrator.train.env]]``: an environment to train on."""

    algo: AlgoConfig | None = None
    """This env's algorithm. None: ``[orchestrator.algo]``."""
    ratio: PositiveFloat | None = None
    """Its share of groups, relative to the other envs. None: 1."""
    group_size: PositiveInt | None = None
    """None: ``orchestrator.group_size``."""
    sampling: SamplingConfig | None = None
    """Overrides ``[orchestrator.train.sampling]``, key by key."""


class EvalEnvConfig(SourceConfig):
    """``[[orchestrator.eval.env]]``: held-out examples, evaluated before the first step, after the
    last, and in between."""

    interval: PositiveInt | None = None
    """Steps between evaluations. None: only before and after training."""
    num_examples: PositiveInt = 64
    """Number of examples, from the first."""
    group_size: PositiveInt = 1
    """Rollouts per example. Reported are the mean reward and, if every reward is 0 or 1, pass@k and
    pass^k for k = 1, 2, 4 ... up to this. A failed rollout counts as 0."""
    sampling: EvalSamplingConfig | None = None
    """Overrides ``[orchestrator.eval.sampling]``, key by key."""


AnyEnv = TypeVar("AnyEnv", EnvConfig, EvalEnvConfig)


class EnvGroup(Settings):
    """Envs that share a harness and sampling parameters."""

    harness: dict[str, Any] | None = None
    """The verifiers harness where neither the env nor its taskset has one."""

    @field_validator("env", check_fields=False)
    @classmethod
    def _complete(cls, envs: tuple[AnyEnv, ...], info: ValidationInfo) -> tuple[AnyEnv, ...]:
        """Complete each env's ``sampling`` table by the group's, unless that is invalid.

        Not later: ``run.json`` writes every key and hides which ones an env set.
        """
        group = info.data.get("sampling")

        def completed(env: AnyEnv) -> AnyEnv:
            if group is None or env.sampling is None:
                return env
            own = {key: getattr(env.sampling, key) for key in env.sampling.model_fields_set}
            return env.model_copy(update={"sampling": group.model_copy(update=own)})

        return tuple(map(completed, envs))


class TrainConfig(EnvGroup):
    """``[orchestrator.train]``"""

    sampling: SamplingConfig = SamplingConfig()
    env: tuple[EnvConfig, ...] = ()


class EvalConfig(EnvGroup):
    """``[orchestrator.eval]``"""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    skip_first_step: bool = False
    """True: do not evaluate the model that training starts from."""
    max_hold_seconds: PositiveFloat = 300.0
    """Seconds an evaluation between steps may delay new weights, since it measures one version.
    Rollouts unfinished by then are left out and counted."""
    env: tuple[EvalEnvConfig, ...] = ()


class RendererConfig(PluginTable):
    """``[orchestrator.renderer]``: messages to tokens. Other keys belong to the renderer."""

    name: str = ""
    """Name of an installed renderer. Required."""


class WorkersConfig(Settings):
    """``[orchestrator.workers]``: limits of environment workers."""

    hang_timeout: PositiveFloat = 300.0
    """Seconds for which a worker's event loop may not answer, before the worker is replaced: longer
    than a call that blocks it, such as a score that does not await."""
    start_timeout: PositiveFloat = 1800.0
    """Seconds for which a worker may load its environment. One that ends is replaced at once."""
    max_memory: PositiveFloat | None = None
    """GiB that a worker may have. None: half of the machine's, over the env's workers."""
    pass_env: tuple[VariableName, ...] = ()
    """More environment variables that the workers get, such as a judge's key."""


class OrchestratorConfig(Settings):
    """``[orchestrator]``"""

    batch_size: PositiveInt = 128
    """Rollouts per step. Must be a multiple of every env's group size."""
    group_size: PositiveInt = 8
    """Rollouts per example."""
    max_off_policy_steps: NonNegativeInt = 8
    """Versions a rollout may be behind the weights it trains, counted from its start."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups in flight, as a multiple of what the batch still needs: makes up for filtered ones."""
    max_inflight_rollouts: PositiveInt | None = None
    """Maximum of rollouts sampled at once. None: what the engines say that they can run, and a
    quarter more; if one does not say, two batches, or more if groups take longer than a step. With
    ``max_off_policy_steps = 0``, ``batch_size * oversampling_factor``."""
    algo: AlgoConfig = AlgoConfig()
    sampler: SamplerConfig = SamplerConfig()
    buffer: dict[str, Any] | None = None
    """Shorthand for ``[orchestrator.sampler]`` with type ``buffer_sampler`` and these settings."""
    buffer_sampler: str = ""
    """Name of the installed sampler that ``buffer`` selects."""
    env_workers: EnvWorkers = 0
    """Processes that run an env's episodes. 0: none, in the orchestrator. ``"auto"``: none where
    taskset and harnesses declare ``RUNS_IN_PROCESS``, else half of the machine's cores."""
    workers: WorkersConfig = WorkersConfig()
    initial: FrozenModel | None = None
    """The weights that the run began with, for algorithms that read them: ``prime-rl serve MODEL``.
    None: the run starts an engine for them, like those of the policy."""
    renderer: RendererConfig = RendererConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    pre_batch_filters: tuple[FilterConfig, ...] = ()
    """Filters of a scored group; rollouts they drop take no place in the batch. Replaces the
    default list."""
    post_batch_filters: tuple[FilterConfig, ...] = ()
    """Filters of the batch; dropped rollouts are replaced by others. Replaces the default list."""
    max_empty_batches: PositiveInt = 10
    """Stop the run after this many batches of rollouts in a row without any to train on."""
    save_rollouts: bool = True
    """Write every step's rollouts to the run directory."""
    weights_timeout: PositiveFloat = 1200.0
    """Seconds to wait for new weights before the run fails. They count while nothing is sampled,
    scored, evaluated or loaded into an engine, and the trainer only waits for a batch."""

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
        """Before the engines have said what they can run."""
        batches = self.oversampling_factor
        if self.max_off_policy_steps > 0:
            batches = max(2.0, batches)
        return self.max_inflight_rollouts or int(self.batch_size * batches)

    @property
    def most_inflight(self) -> int:
        """However the run adapts: everything that may train within ``max_off_policy_steps``."""
        batches = self.max_off_policy_steps + 1
        return self.max_inflight_rollouts or max(self.max_inflight, self.batch_size * batches)

    @property
    def sampler_table(self) -> SamplerConfig:
        """The sampler, whichever way it was written."""
        if self.buffer is None:
            return self.sampler
        return SamplerConfig(type=self.buffer_sampler, **self.buffer)
