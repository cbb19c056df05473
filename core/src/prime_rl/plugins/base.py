"""Base classes of what a plugin offers, and the settings each brings along.

Every class is selected by its ``name`` from a table of the TOML and built with its own validated
settings. Instances compare by identity, because two envs may run the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from prime_rl.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from prime_rl.config.models import FrozenModel
    from prime_rl.rollout import FloatColumn, Group, Rollout, Sample

LossComponent = Literal["rl", "ce", "ref_kl"]
"""The three components of the loss. What each computes is fixed, but for ``rl``, which a loss
plugin may replace."""


class PluginConfig(BaseModel):
    """Settings of one plugin class. Unknown keys are errors; the string under a field documents
    it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Offer:
    """Anything a plugin registers: a name to select it by, and the settings it takes."""

    name: ClassVar[str]
    """What a config selects it by: ``algo.type = "<name>"``."""

    config_class: ClassVar[type[PluginConfig]] = PluginConfig
    """The pydantic model that validates its table of the TOML."""

    def __init__(self, config: PluginConfig) -> None:
        self.config = config


# -- orchestrator side: entry-point group `prime_rl` -----------------------------------


class ReferenceModel(Protocol):
    """A model that scores tokens: the live policy, or a frozen one."""

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """The log-probability of each token given those before it: [T]; 0.0 for the first.

        Requests are bounded and retried. While the endpoint does not answer this waits, and the run
        says for whom. ``group_id`` keeps the requests of a group on one replica. Raises
        ``EngineError`` if the endpoint refuses the request.
        """
        ...


class Host(Protocol):
    """What core lends to the algorithm, or the source, of one env: it is given to ``setup``."""

    @property
    def env(self) -> str:
        """The env's label."""
        ...

    @property
    def policy(self) -> ReferenceModel:
        """The live policy, as it samples now."""
        ...

    def connect(self, model: FrozenModel) -> ReferenceModel:
        """A frozen model to score with. Closed by core at the end of the run."""
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
        """A conversation as a sample whose ``loss_mask`` is on the assistant's own tokens; its
        ``inference_logprobs`` are 0.0: nobody sampled it."""
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
        """The seats of the env, by name: what ``rollout.agent`` can be."""
        ...

    @property
    def envs(self) -> tuple[str, ...]:
        """The labels of every training env of the run."""
        ...


class Algorithm(Offer):
    """One env's training signal. Subclass, set ``name``, implement a scoring hook."""

    action_loss: ClassVar[LossComponent] = "rl"
    """The loss component that trains the tokens the model sampled."""

    group_relative: ClassVar[bool] = False
    """Credit is relative to siblings, so ``group_size = 1`` cannot learn and is refused at config
    time."""

    needs_frozen_source: ClassVar[bool] = False
    """It imitates whoever samples, so sampling from the policy itself is refused at config time."""

    needs_attribution: ClassVar[bool] = False
    """It reads ``sample.roles`` or ``sample.is_content``: a renderer that gives none is refused at
    config time."""

    needs_temperature: ClassVar[float | None] = None
    """The one sampling temperature it can learn at; another one is refused at config time. None:
    any."""

    order_dependent: ClassVar[bool] = False
    """Credit depends on the rollouts that came before: a running baseline."""

    def check_agents(self, env: str, agents: tuple[str, ...]) -> None:
        """Raise ``ConfigError`` if the settings do not fit the env's agents.

        Core calls it before any process is started, in a ``--dry-run`` too. For an algorithm that
        overrides it, core imports verifiers and the taskset to learn the agents, which takes
        seconds.
        """

    async def setup(self, host: Host) -> None:
        """Connect what the algorithm owns (a teacher, a judge) before the first rollout."""

    async def close(self) -> None:
        """Release what ``setup`` acquired."""

    def save(self, directory: Path) -> None:
        """Write what ``load`` needs to go on from here, if it remembers anything from group to
        group. The folder exists and is this env's own."""

    def load(self, directory: Path) -> None:
        """Go on from what ``save`` wrote. Raises ``ConfigError`` if it does not fit."""


class Filter(Offer):
    """One reason to drop rollouts. Subclass, set ``name``, implement ``filter_rollout``."""


class Sampler(Offer):
    """Chooses which example of which env is sampled next; learns from finished groups."""

    def __init__(self, config: PluginConfig, envs: Sequence[SampledEnv], seed: int) -> None:
        super().__init__(config)
        self.envs = envs
        self.seed = seed

    def next_example(self) -> tuple[int, int]:
        """The next group's ``(env index, example index)``. Raises ``RunError`` when none is
        left."""
        raise NotImplementedError

    def observe(self, group: Group) -> None:
        """A group that came back scored: feedback for curricula."""

    def reject(self, group: Group) -> str | None:
        """Why no member of a scored group may train, or None. Asked after ``observe``, before any
        filter; the dispatcher makes up for what is rejected."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the time since the last call, by name; called once a step."""
        return {}

    def save(self, directory: Path) -> None:
        """Write what ``load`` needs to go on from here. The folder exists and is empty of files of
        this sampler."""

    def load(self, directory: Path) -> None:
        """Go on from what ``save`` wrote. Raises ``ConfigError`` if it does not fit."""


@dataclass(frozen=True)
class SampledEnv:
    """What a sampler may know of one training env."""

    name: str
    num_examples: int | None
    """None: the env generates examples without end."""
    ratio: float | None
    """The env's share of groups as configured; None: not configured."""
    is_ready: Callable[[], bool] = lambda: True
    """False while its source has nothing to give (an empty replay buffer): choose another env."""
    task: Callable[[int], Mapping[str, Any]] = lambda index: {}
    """The fields of one of its examples, ``prompt`` among them."""


@dataclass(frozen=True)
class SourceRequest:
    """One group that a source is asked for."""

    group_id: int
    example_id: int
    policy_version: int
    """The policy's version now."""


class Source(Offer):
    """Gives one env rollouts that nobody has to sample: demonstrations, past experience.

    Selected by ``algo.sampling.source.type``. Its rollouts never go stale: what it hands out is its
    own promise.
    """

    from_policy: ClassVar[bool] = False
    """The policy wrote what it gives: nothing for an algorithm that imitates its source."""

    feeds: ClassVar[frozenset[LossComponent]] = frozenset({"ce"})
    """Loss components its rollouts may train. ``rl`` and ``ref_kl`` need sampling logprobs of the
    policy."""

    async def setup(self, host: Host) -> None:
        """Load what it needs. Raises ``ConfigError``."""

    @property
    def num_examples(self) -> int | None:
        """How many examples a sampler can choose from; None: it does not matter which."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether it has something to give now."""
        return True

    def task(self, example_id: int) -> Mapping[str, Any] | None:
        """The fields of one of its own examples, ``prompt`` among them; None: the env's own example
        of that index."""
        return None

    async def group(self, request: SourceRequest) -> Sequence[Rollout]:
        """Fresh ``Rollout`` objects of one group, without credit; the env's algorithm scores them.
        Empty if there is nothing left to give."""
        raise NotImplementedError

    def observe(self, group: Group) -> None:
        """A group of any env that was scored and not rejected by the sampler: copy what is kept."""

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the time since the last call, by name; called once a step."""
        return {}

    def save(self, directory: Path) -> None:
        """Write what ``load`` needs to go on from here."""

    def load(self, directory: Path) -> None:
        """Go on from what ``save`` wrote."""


class Monitor(Offer):
    """Receives metrics. A failing monitor is reported and does not stop the run."""

    in_background: ClassVar[bool] = True
    """Its methods are called from one thread of its own, behind a bounded queue: however slow it
    is, nobody waits for it. False: from the loop, which waits."""

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        """Keep this quick: connect at the first ``log``."""
        super().__init__(config)
        self.run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step, from one process, by ``group/name``. Steps may come out of order:
        batch n + 1 leaves before step n is trained."""
        raise NotImplementedError

    def wants_rollouts(self, step: int) -> bool:
        """Whether ``log_rollouts`` is to be called for batch ``step``. Asked from the loop."""
        return False

    def log_rollouts(
        self, step: int, rollouts: Sequence[Rollout], dropped: Sequence[str | None]
    ) -> None:
        """Every rollout that was decided on for batch ``step``, with its credit; ``dropped`` says
        why each does not train (None: it trains). Read only."""

    def close(self) -> None:
        """Flush what is still held."""


class ModelMaker(Offer):
    """Makes a small model on this machine, for ``[model] name = "<maker>"`` where no checkpoint is
    at hand."""

    def make(self, directory: Path, seed: int, progress: Callable[[str, float], None]) -> None:
        """Write a Hugging Face folder (config, safetensors, tokenizer) into the empty
        ``directory``.

        The same settings and seed must give the same model. ``progress(state, share)`` is shown to
        the user. Runs in a process of its own: import what is heavy in here.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class EngineLaunch:
    """What core tells an engine plugin about the server to start."""

    model_path: Path
    """A Hugging Face folder or id."""
    served_model_name: str
    host: str
    port: int
    max_model_len: int
    """Prompt and completion together, in tokens."""
    seed: int
    admin_key: str
    """Bearer key of the admin routes. Pass it by the environment: argument lists are public."""
    status_path: Path | None = None
    """Where the server reports what it is doing (``prime_rl.rundir.status.Status``)."""
    policy_version: int = 0
    wait_for_model: bool = False
    """The folder is still being made: wait for the file ``.ready`` in it."""
    python: Path | None = None
    """Interpreter to run the server under, if ``Engine.check`` has taken one. None: ours."""
    can_sleep: bool = False
    """Engine and trainer share GPUs: ``/sleep`` has to give the memory away."""


@dataclass(frozen=True)
class EngineCommand:
    """How to start one server process."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Engine(Offer):
    """An inference server behind the HTTP contract of ``docs/engines.md``."""

    lacks: ClassVar[Mapping[str, str]] = {}
    """What it does not do of that contract's optional parts, and why: ``{"sleep": "no GPU"}``. The
    suite ``prime_rl_devkit.engines`` then skips the checks of it, with the reason."""

    def check(self, python: Path | None) -> None:
        """Refuse what the server would fail on, before any process is started. ``python`` is
        ``inference.python``: an engine that cannot run under it says so, as this one does. Raises
        ``ConfigError``."""
        if python is not None:
            raise ConfigError(
                f"inference.python: the engine {self.name!r} runs under the run's own interpreter; "
                "leave it out"
            )

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """The process that serves ``launch.model_path`` on ``launch.port``; it must stay in the
        foreground."""
        raise NotImplementedError

    @property
    def num_gpus(self) -> int:
        """GPUs that one server uses where there are any: the size of its tensor parallelism."""
        return 1

    @property
    def dtype(self) -> str | None:
        """Precision it holds weights in, as torch spells it (``bfloat16``); None: its settings do
        not say. Rounded weights (``trainer.publish_dtype``) are refused for another one."""
        return None


class RendererOffer(Offer):
    """Turns the table ``[orchestrator.renderer]`` into a config of the ``renderers`` package."""

    gives_attribution: ClassVar[bool] = True
    """It tells a message's body from the template around it (``sample.is_content``)."""

    def check(self, model: str) -> None:
        """Refuse a model before any process is started, if that can be known without importing
        much.
        ``model`` is ``model.name``: a folder, a hub id, or the name of a model made here. Raises
        ``ConfigError``."""

    def build(self, model: str, fields: Mapping[str, Any]) -> Any:
        """The ``renderers`` config object for a tokenizer folder. Raises ``ConfigError`` if nothing
        fits."""
        raise NotImplementedError

    def chat_templates(self, own: str | None, renderer: Any) -> Sequence[str]:
        """Jinja chat templates that may render what ``renderer`` (which ``build`` returned)
        renders, the best first. A run writes the first that does into the model folders that it
        leaves. ``own`` is the template of the run's model."""
        return [] if own is None else [own]


# -- trainer side: entry-point group `prime_rl.trainer` --------------------------------
# Shapes: T = tokens of one sequence, or of all sequences of a micro batch end to end.


@dataclass(frozen=True)
class LossInputs:
    """What the rl loss sees of one sequence (or of many, if the loss is ``token_wise``). All
    tensors: [T]."""

    trainer_logprobs: torch.Tensor
    """log π of each token under the weights being trained; carries the gradient."""
    inference_logprobs: torch.Tensor
    """log μ under the policy that sampled it."""
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    """bool: this component's member tokens."""
    loss_weights: torch.Tensor | None
    """The component's weight stream; None means 1.0 everywhere."""


@dataclass(frozen=True)
class TokenMetric:
    """A metric that is a mean over some tokens of each sequence (0 where none), then over
    sequences."""

    values: torch.Tensor
    """[T] float."""
    mask: torch.Tensor
    """[T] bool."""


@dataclass(frozen=True)
class LossOutputs:
    """A loss summed over member tokens, not normalised, and what to log beside it."""

    loss: torch.Tensor
    """0-dim."""
    metrics: Mapping[str, torch.Tensor | TokenMetric]
    """0-dim tensors (one sequence's figure), 1-D ones (each entry counts) or ``TokenMetric``. One
    called ``is_masked``, ``is_masked_high`` or ``is_masked_low`` reaches the token export."""


class Loss(Offer):
    """The loss of the ``rl`` component. Keep ``import torch`` inside ``__call__``: listing plugins
    must stay fast."""

    token_wise: ClassVar[bool] = False
    """The loss is a sum of terms that each depend on their own token alone, and its metrics are
    ``TokenMetric``s: the trainer then calls it once a micro batch, all sequences end to end,
    instead of once a sequence."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Sum the loss over ``inputs.loss_mask``. The trainer divides by the global count of member
        tokens."""
        raise NotImplementedError
