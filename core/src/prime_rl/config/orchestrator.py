"""``[orchestrator]``: sampling, credit, filters and batches."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from prime_rl.config.base import PluginTable, Settings, VariableName, Variables
from prime_rl.config.contract import FrozenModel, SamplingConfig
from prime_rl.config.curriculum import (
    GateConfig,
    Weight,
    check_evaluated,
    check_gates,
    interpolate,
)


class SourceTable(PluginTable):
    """A source of rollouts that no model samples, by the ``type`` an installed plugin offers."""

    type: str
    """Name of an installed source."""


def _kind_of_source(value: Any) -> str:
    """The tag for the form of a value of ``source``."""
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
"""The address of an environment's server."""
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
    """Seconds until a rollout counts as failed; those in which colocated engines sleep do not
    count. None: no limit."""
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


GroupSize = Annotated[int, Field(ge=1, le=4096)]
"""Each member has a seed of its own among 4096."""


class AgentConfig(Settings):
    """``[orchestrator.train.env.agents.NAME]``: one agent of an env that the policy plays."""

    algo: AlgoConfig | Literal["none"] | None = None
    """Its own algorithm. Its groups hold the rollouts of this agent alone.
    ``"none"``: the policy plays the agent, and nothing of it trains. None: the env's, which credits
    all agents without an algorithm of their own together."""

    model: Literal["policy", "past"] = "policy"
    """``"past"``: an earlier version of the policy plays the agent, of those that
    ``[orchestrator.past]`` keeps, and nothing of it trains. A model of another origin goes into
    ``args.NAME``."""

    @model_validator(mode="after")
    def _past_does_not_train(self) -> Self:
        if self.model == "past" and self.algo not in (None, "none"):
            raise ValueError(
                'model = "past" has an earlier version play this agent, which does not train, and '
                "algo says how it trains. Leave one of them out."
            )
        return self

    @field_validator("algo")
    @classmethod
    def _has_no_source(cls, algo: AlgoConfig | str | None) -> AlgoConfig | str | None:
        if isinstance(algo, AlgoConfig) and algo.sampling != AlgoSamplingConfig():
            raise ValueError(
                "sampling says where the episodes of the whole env come from. Set it in the env's "
                "own algo"
            )
        return algo


class EnvConfig(SourceConfig):
    """``[[orchestrator.train.env]]``: an environment to train on."""

    algo: AlgoConfig | None = None
    """This env's algorithm. None: ``[orchestrator.algo]``."""
    agents: dict[str, AgentConfig] = {}
    """What differs for one of several agents, by its name in the env."""
    ratio: PositiveFloat | None = None
    """Its share of the batch (rollouts), relative to the other envs. None: 1."""
    weight: Weight | None = None
    """In place of ``ratio`` and on its scale: a number, or points ``[step, weight]``, linear
    between them, constant before the first and after the last. None: ``ratio``."""
    opens: GateConfig | None = None
    """When the env begins to be sampled. None: from the start."""
    group_size: PositiveInt | None = None
    """None: ``orchestrator.group_size``."""
    tasks_per_minute: PositiveInt | None = None
    """Groups of this env that may begin in any 60 seconds, for a judge or a service with a limit of
    its own; a group is ``group_size`` rollouts. None: no limit."""
    max_group_size: GroupSize | None = None
    """None: ``orchestrator.max_group_size``."""
    sampling: SamplingConfig | None = None
    """Overrides ``[orchestrator.train.sampling]``, key by key."""
    measure_every: PositiveInt | None = None
    """It trains nothing: the loss of all its examples is measured after every so many steps and
    after step ``max_steps`` (``validation/loss``). For a source of demonstrations. None: it
    trains."""

    @model_validator(mode="after")
    def _has_one_share(self) -> Self:
        if self.weight is not None and self.ratio is not None:
            raise ValueError(
                f"env {self.label!r}: ratio = {self.ratio} and weight both set its share. Leave "
                "one of them out."
            )

        if self.measure_every is not None and (self.weight is not None or self.opens is not None):
            key = "opens" if self.weight is None else "weight"
            raise ValueError(
                f"env {self.label!r}: measure_every says that it trains nothing, and {key} is for "
                "envs that are sampled. Leave one of them out."
            )
        return self

    @property
    def untrained(self) -> frozenset[str]:
        """The agents of which nothing trains, though no model in ``args`` plays them."""
        return self.past_agents | {n for n, agent in self.agents.items() if agent.algo == "none"}

    @property
    def past_agents(self) -> frozenset[str]:
        """The agents that an earlier version of the policy plays."""
        return frozenset(name for name, agent in self.agents.items() if agent.model == "past")

    def weight_at(self, step: int) -> float:
        """Its share of the batch of ``step``, relative to the other envs."""
        if self.weight is None:
            return 1.0 if self.ratio is None else self.ratio
        if isinstance(self.weight, float):
            return self.weight
        return interpolate(self.weight, step)

    @property
    def first_ratio(self) -> float | None:
        """Its share of the first batch, as configured. None: neither ``ratio`` nor ``weight``."""
        return self.ratio if self.weight is None else self.weight_at(1)


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


class PastConfig(Settings):
    """``[orchestrator.past]``: the earlier versions of the policy that agents and algorithms may
    meet: version 0 and the newest ones of these. One more engine serves them, one at a time."""

    every: PositiveInt = 10
    """Steps between two versions that are kept, and between two draws of the version that agents
    with ``model = "past"`` meet."""
    keep: PositiveInt = 4
    """How many are kept, beside version 0. Each takes the disk of a model, until it is removed."""
    base_url: Annotated[tuple[str, ...], Field(max_length=1)] = ()
    """An engine that runs already, for a run with ``inference.base_url``: ``prime-rl serve`` with
    the same model and admin key. Empty: the run starts one."""


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
            of_env = {key: getattr(env.sampling, key) for key in env.sampling.model_fields_set}
            return env.model_copy(update={"sampling": group.model_copy(update=of_env)})

        return tuple(map(completed, envs))


class TrainConfig(EnvGroup):
    """``[orchestrator.train]``"""

    sampling: SamplingConfig = SamplingConfig()
    env: tuple[EnvConfig, ...] = ()

    @model_validator(mode="after")
    def _gates_can_open(self) -> Self:
        check_gates(self.env)
        return self


class EvalConfig(EnvGroup):
    """``[orchestrator.eval]``"""

    sampling: EvalSamplingConfig = EvalSamplingConfig()
    skip_first_step: bool = False
    """True: do not evaluate the model that training starts from."""
    max_hold_seconds: NonNegativeFloat = 300.0
    """Seconds an evaluation between steps may delay new weights, since it measures one version.
    Rollouts unfinished by then are left out and counted. 0: it delays none and is never cut short;
    new weights are loaded while it runs, so what it measures is a mixture of versions
    (``eval/ENV/num_policy_versions``), reported at the version of its start."""
    retrigger_on_resume: bool = False
    """True: a run that continues from a checkpoint evaluates these weights again first, whatever
    the interval. Training goes on meanwhile."""
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
    """Largest memory of a worker in GiB. None: half of the machine's, over the env's workers."""
    pass_env: tuple[VariableName, ...] = ()
    """More environment variables that the workers get, such as a judge's key."""


class PartialGroupsConfig(Settings):
    """``[orchestrator.partial_groups]``: hand a group on before its slowest members are back. It
    selects replies by the time that they take, so the estimate is biased: see docs/estimators.md.
    Envs in which nothing compares siblings need none: their rollouts are handed on alone. It is
    refused if that is so in every env."""

    at_least: Annotated[int, Field(ge=2)]
    """Members that have to finish: they are a group then."""
    rest: Literal["group", "cancel"] = "group"
    """The other members: a group of their own when they are back, or cancelled. Cancelled, the
    slowest replies of every group are never trained."""


BATCH_SIZE = 128
"""Rollouts per step, by default."""

GUESSED_TOKENS = 256
"""Assumed tokens of a rollout, until one has been measured."""


class OrchestratorConfig(Settings):
    """``[orchestrator]``"""

    batch_size: PositiveInt | None = None
    """Rollouts per step. Must be a multiple of every env's group size. None: 128, unless
    ``token_batch_size`` is set."""
    token_batch_size: PositiveInt | None = None
    """Tokens per step, in place of ``batch_size``: a batch takes rollouts until their samples have
    so many tokens, prompts included; the last one may exceed it. Needs ``max_off_policy_steps`` of
    1 or more. None: ``batch_size`` counts."""
    group_size: PositiveInt = 8
    """Rollouts per example."""
    max_group_size: GroupSize | None = None
    """Most rollouts per example, where the algorithm asks for more than ``group_size`` once it has
    seen the first ones. None: ``group_size``."""
    max_off_policy_steps: NonNegativeInt = 8
    """Versions a rollout may be behind the weights it trains, counted from its start."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups in flight, as a multiple of what the batch still needs: makes up for filtered ones."""
    max_inflight_rollouts: PositiveInt | None = None
    """Maximum of rollouts sampled at once. None: what the engines say that they can run, and a
    quarter more. If an engine does not say it: two batches, or what Little's law gives if that is
    more, which is a batch, plus for each env the rollouts that the trainer takes per second times
    the seconds of a group. With ``max_off_policy_steps = 0``: ``batch_size *
    oversampling_factor``."""
    partial_groups: PartialGroupsConfig | None = None
    """None: a group waits for all its members."""
    algo: AlgoConfig = AlgoConfig()
    sampler: SamplerConfig = SamplerConfig()
    env_workers: EnvWorkers = 0
    """Processes that run an env's episodes. 0: none, in the orchestrator. ``"auto"``: none where
    taskset and harnesses declare ``RUNS_IN_PROCESS``, else half of the machine's cores."""
    workers: WorkersConfig = WorkersConfig()
    past: PastConfig = PastConfig()
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
    env_vars: Variables = {}
    """Environment variables of the orchestrator and of environment workers, beside those of the
    top-level ``env_vars``."""

    @model_validator(mode="before")
    @classmethod
    def _has_one_size(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table

        sizes = [table.get("batch_size"), table.get("token_batch_size")]
        if sizes == [None, None]:
            return {**table, "batch_size": BATCH_SIZE}

        if None not in sizes:
            raise ValueError(
                f"batch_size = {sizes[0]!r} counts rollouts and token_batch_size = {sizes[1]!r} "
                "counts tokens: a batch has one size. Leave one of them out."
            )
        return table

    @model_validator(mode="after")
    def _tokens_need_a_lead(self) -> OrchestratorConfig:
        if self.token_batch_size is not None and self.max_off_policy_steps == 0:
            raise ValueError(
                "token_batch_size needs max_off_policy_steps >= 1. A synchronous run requests "
                "exactly one batch, and how many tokens its rollouts will have is not known. Set "
                "batch_size instead."
            )
        return self

    @model_validator(mode="after")
    def _gates_read_evaluations_that_are(self) -> OrchestratorConfig:
        check_evaluated(self.train.env, self.eval.env)
        return self

    @model_validator(mode="after")
    def _measured_are_shown(self) -> OrchestratorConfig:
        measured = [env for env in self.train.env if env.measure_every is not None]
        for env in measured:
            if not isinstance((env.algo or self.algo).sampling.source, SourceTable):
                raise ValueError(
                    f"env {env.label!r}: measure_every measures the loss of demonstrations, and "
                    "the env's rollouts are sampled. Set algo.sampling.source to a source of them "
                    '({ type = "dataset", ... }), or use [[orchestrator.eval.env]].'
                )

        if measured and len(measured) == len(self.train.env):
            raise ValueError("every env has measure_every, so none trains. Leave it out of one.")
        return self

    @model_validator(mode="after")
    def _partial_groups_fit(self) -> OrchestratorConfig:
        partial = self.partial_groups
        if partial is None:
            return self

        at_least = partial.at_least
        where = f"partial_groups.at_least = {at_least}"

        if self.max_off_policy_steps == 0:
            raise ValueError(
                f"{where} needs max_off_policy_steps >= 1. A synchronous run does not depend on "
                "timing, and which members of a group are first does. Remove the table."
            )

        # A group of one member waits for nothing.
        sizes = {env.group_size or self.group_size for env in self.train.env}
        for size in sizes - {1} or sizes:
            # Two members make a group. Cancelled members need not be one.
            fewest_left = 2 if partial.rest == "group" else 1
            if size - at_least < fewest_left:
                raise ValueError(
                    f"{where} leaves {max(size - at_least, 0)} of a group of {size}, expected at "
                    f"least {fewest_left} with rest = {partial.rest!r}. Lower it, or raise "
                    "group_size."
                )

        return self

    @property
    def max_inflight(self) -> int:
        """Before the engines have said what they can run."""
        batches = self.oversampling_factor
        if self.max_off_policy_steps > 0:
            batches = max(2.0, batches)
        return self.max_inflight_rollouts or int(self.expected_rollouts * batches)

    @property
    def most_inflight(self) -> int:
        """However the run adapts: everything that may train within ``max_off_policy_steps``."""
        batches = self.max_off_policy_steps + 1
        return self.max_inflight_rollouts or max(
            self.max_inflight, self.expected_rollouts * batches
        )

    @property
    def expected_rollouts(self) -> int:
        """Rollouts of a batch; a guess with ``token_batch_size``, before any is known."""
        if self.batch_size is not None:
            return self.batch_size
        return max(1, (self.token_batch_size or 0) // GUESSED_TOKENS)
