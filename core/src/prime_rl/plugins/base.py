"""Base classes of what a plugin offers, and the settings each brings along.

Every class is selected by its ``name`` from a table of the TOML and built with its own validated
settings. Instances compare by identity, because two envs may run the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import torch

    from prime_rl.rollout import Group

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


class Algorithm(Offer):
    """One env's training signal. Subclass, set ``name``, implement a scoring hook."""

    action_loss: ClassVar[LossComponent] = "rl"
    """The loss component that trains the tokens the model sampled."""

    group_relative: ClassVar[bool] = False
    """Credit is relative to siblings, so ``group_size = 1`` cannot learn and is refused at config
    time."""

    async def setup(self) -> None:
        """Connect what the algorithm owns (a teacher, a judge) before the first rollout."""

    async def close(self) -> None:
        """Release what ``setup`` acquired."""


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

    def metrics(self) -> Mapping[str, float]:
        """Numbers to log once a step, by name."""
        return {}


@dataclass(frozen=True)
class SampledEnv:
    """What a sampler may know of one training env."""

    name: str
    num_examples: int | None
    """None: the env generates examples without end."""
    ratio: float | None
    """The env's share of groups as configured; None: not configured."""


class Monitor(Offer):
    """Receives metrics. A failing monitor is reported and does not stop the run."""

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config)
        self.run_dir = run_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step, from one process, by ``group/name``."""
        raise NotImplementedError

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
    """Where the server reports what it is doing (``prime_rl.run.status.Status``)."""
    policy_version: int = 0
    wait_for_model: bool = False
    """The folder is still being made: wait for the file ``.ready`` in it."""


@dataclass(frozen=True)
class EngineCommand:
    """How to start one server process."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


class Engine(Offer):
    """An inference server behind the HTTP contract of ``docs/engines.md``."""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """The process that serves ``launch.model_path`` on ``launch.port``; it must stay in the
        foreground."""
        raise NotImplementedError


class RendererOffer(Offer):
    """Turns the table ``[orchestrator.renderer]`` into a config of the ``renderers`` package."""

    def check(self, model: str) -> None:
        """Refuse a model before any process is started, if that can be known without importing
        much.
        ``model`` is ``model.name``: a folder, a hub id, or the name of a model made here. Raises
        ``ConfigError``."""

    def build(self, model: str, fields: Mapping[str, Any]) -> Any:
        """The ``renderers`` config object for a tokenizer folder. Raises ``ConfigError`` if nothing
        fits."""
        raise NotImplementedError


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
    """0-dim tensors (one sequence's figure) or ``TokenMetric``."""


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
