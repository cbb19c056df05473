"""The names a plugin author imports, and ``train`` and ``Run``, the Python API of an installed
package. Each is imported at its first use: all take half a CPU second. None needs torch."""

import typing as _typing
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec

if _typing.TYPE_CHECKING:
    from prime_rl.config.base import Removed
    from prime_rl.config.contract import FrozenModel
    from prime_rl.errors import (
        BranchFailed,
        ConfigError,
        ConfigWarning,
        EngineError,
        EngineGone,
        OverlongError,
        PluginError,
        PrimeRLError,
        RunError,
        StreamError,
        VersionGone,
        WeightsError,
        WireError,
    )
    from prime_rl.plugins.algorithm import (
        Algorithm,
        Completion,
        Filter,
        Host,
        LiveSampling,
        ReferenceModel,
    )
    from prime_rl.plugins.base import PluginConfig
    from prime_rl.plugins.hookspecs import hookimpl
    from prime_rl.plugins.launchers import (
        Engine,
        EngineCommand,
        EngineLaunch,
        Launcher,
        Part,
        Place,
        Process,
        ProcessCommand,
        Task,
    )
    from prime_rl.plugins.loss import (
        Head,
        HeadInputs,
        Loss,
        LossInputs,
        LossOutputs,
        Stateful,
        TokenMetric,
    )
    from prime_rl.plugins.model import ChatTemplate, ModelMaker, RendererOffer
    from prime_rl.plugins.observer import Monitor, Observer, ObserverHost, RunObserver
    from prime_rl.plugins.sampler import (
        GroupProgress,
        RolloutPlan,
        SampledEnv,
        Sampler,
        Source,
        SourceRequest,
    )
    from prime_rl.plugins.trainer import (
        AdamWConfig,
        Kernel,
        LossCall,
        OptimizerMaker,
        RowView,
        TrainerObserver,
        TrainerView,
        Tuning,
    )
    from prime_rl.plugins.view import RunView
    from prime_rl.plugins.weight_transports import (
        Header,
        ReceivingEngine,
        TensorInfo,
        WeightDelivery,
        Weights,
        WeightSender,
        WeightTransport,
    )
    from prime_rl.registry.calls import log_metric
    from prime_rl.registry.checks import CONTRACT_VERSION
    from prime_rl.registry.import_path import import_function
    from prime_rl.rewards import at_least, is_negligible, settled
    from prime_rl.rollout import ROLES, Group, Prefix, Rollout, Sample, Turn
    from prime_rl.rundir.rows import unique_keys
    from prime_rl.streams import LossComponent

    train: _typing.Callable[..., _typing.Any]
    Run: type[_typing.Any]

_MODULES = {
    "FrozenModel": "prime_rl.config.contract",
    "BranchFailed": "prime_rl.errors",
    "VersionGone": "prime_rl.errors",
    "ConfigError": "prime_rl.errors",
    "ConfigWarning": "prime_rl.errors",
    "EngineError": "prime_rl.errors",
    "EngineGone": "prime_rl.errors",
    "OverlongError": "prime_rl.errors",
    "PluginError": "prime_rl.errors",
    "PrimeRLError": "prime_rl.errors",
    "RunError": "prime_rl.errors",
    "StreamError": "prime_rl.errors",
    "WeightsError": "prime_rl.errors",
    "WireError": "prime_rl.errors",
    "Algorithm": "prime_rl.plugins.algorithm",
    "Completion": "prime_rl.plugins.algorithm",
    "Filter": "prime_rl.plugins.algorithm",
    "Host": "prime_rl.plugins.algorithm",
    "LiveSampling": "prime_rl.plugins.algorithm",
    "ReferenceModel": "prime_rl.plugins.algorithm",
    "PluginConfig": "prime_rl.plugins.base",
    "hookimpl": "prime_rl.plugins.hookspecs",
    "Engine": "prime_rl.plugins.launchers",
    "EngineCommand": "prime_rl.plugins.launchers",
    "EngineLaunch": "prime_rl.plugins.launchers",
    "Launcher": "prime_rl.plugins.launchers",
    "Part": "prime_rl.plugins.launchers",
    "Place": "prime_rl.plugins.launchers",
    "Process": "prime_rl.plugins.launchers",
    "ProcessCommand": "prime_rl.plugins.launchers",
    "Task": "prime_rl.plugins.launchers",
    "Head": "prime_rl.plugins.loss",
    "HeadInputs": "prime_rl.plugins.loss",
    "Loss": "prime_rl.plugins.loss",
    "LossInputs": "prime_rl.plugins.loss",
    "LossOutputs": "prime_rl.plugins.loss",
    "Stateful": "prime_rl.plugins.loss",
    "TokenMetric": "prime_rl.plugins.loss",
    "ChatTemplate": "prime_rl.plugins.model",
    "ModelMaker": "prime_rl.plugins.model",
    "Removed": "prime_rl.config.base",
    "RendererOffer": "prime_rl.plugins.model",
    "Monitor": "prime_rl.plugins.observer",
    "Observer": "prime_rl.plugins.observer",
    "RunObserver": "prime_rl.plugins.observer",
    "ObserverHost": "prime_rl.plugins.observer",
    "GroupProgress": "prime_rl.plugins.sampler",
    "RolloutPlan": "prime_rl.plugins.sampler",
    "SampledEnv": "prime_rl.plugins.sampler",
    "Sampler": "prime_rl.plugins.sampler",
    "Source": "prime_rl.plugins.sampler",
    "SourceRequest": "prime_rl.plugins.sampler",
    "AdamWConfig": "prime_rl.plugins.trainer",
    "Kernel": "prime_rl.plugins.trainer",
    "LossCall": "prime_rl.plugins.trainer",
    "OptimizerMaker": "prime_rl.plugins.trainer",
    "RowView": "prime_rl.plugins.trainer",
    "TrainerObserver": "prime_rl.plugins.trainer",
    "TrainerView": "prime_rl.plugins.trainer",
    "Tuning": "prime_rl.plugins.trainer",
    "RunView": "prime_rl.plugins.view",
    "Header": "prime_rl.plugins.weight_transports",
    "ReceivingEngine": "prime_rl.plugins.weight_transports",
    "TensorInfo": "prime_rl.plugins.weight_transports",
    "WeightDelivery": "prime_rl.plugins.weight_transports",
    "WeightSender": "prime_rl.plugins.weight_transports",
    "WeightTransport": "prime_rl.plugins.weight_transports",
    "Weights": "prime_rl.plugins.weight_transports",
    "log_metric": "prime_rl.registry.calls",
    "at_least": "prime_rl.rewards",
    "is_negligible": "prime_rl.rewards",
    "settled": "prime_rl.rewards",
    "CONTRACT_VERSION": "prime_rl.registry.checks",
    "import_function": "prime_rl.registry.import_path",
    "unique_keys": "prime_rl.rundir.rows",
    "Group": "prime_rl.rollout",
    "ROLES": "prime_rl.rollout",
    "Prefix": "prime_rl.rollout",
    "Rollout": "prime_rl.rollout",
    "Sample": "prime_rl.rollout",
    "Turn": "prime_rl.rollout",
    "LossComponent": "prime_rl.streams",
}
"""The module of each public name. A type checker reads the imports above; a test compares both."""

__all__ = [
    "CONTRACT_VERSION",
    "ROLES",
    "AdamWConfig",
    "Algorithm",
    "BranchFailed",
    "ChatTemplate",
    "Completion",
    "ConfigError",
    "ConfigWarning",
    "Engine",
    "EngineCommand",
    "EngineError",
    "EngineGone",
    "EngineLaunch",
    "Filter",
    "FrozenModel",
    "Group",
    "GroupProgress",
    "Head",
    "HeadInputs",
    "Header",
    "Host",
    "Kernel",
    "Launcher",
    "LiveSampling",
    "Loss",
    "LossCall",
    "LossComponent",
    "LossInputs",
    "LossOutputs",
    "ModelMaker",
    "Monitor",
    "Observer",
    "ObserverHost",
    "OptimizerMaker",
    "OverlongError",
    "Part",
    "Place",
    "PluginConfig",
    "PluginError",
    "Prefix",
    "PrimeRLError",
    "Process",
    "ProcessCommand",
    "ReceivingEngine",
    "ReferenceModel",
    "Removed",
    "RendererOffer",
    "Rollout",
    "RolloutPlan",
    "RowView",
    "RunError",
    "RunObserver",
    "RunView",
    "Sample",
    "SampledEnv",
    "Sampler",
    "Source",
    "SourceRequest",
    "Stateful",
    "StreamError",
    "Task",
    "TensorInfo",
    "TokenMetric",
    "TrainerObserver",
    "TrainerView",
    "Tuning",
    "Turn",
    "VersionGone",
    "WeightDelivery",
    "WeightSender",
    "WeightTransport",
    "Weights",
    "WeightsError",
    "WireError",
    "at_least",
    "hookimpl",
    "import_function",
    "is_negligible",
    "log_metric",
    "settled",
    "unique_keys",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def __getattr__(name: str) -> object:
    if name in _MODULES:
        value = getattr(_import_module(_MODULES[name]), name)
        globals()[name] = value  # the next access finds it without this function
        return value

    # `prime_rl.testing` works without an import statement of its own.
    if _find_spec(f"prime_rl.{name}"):
        return _import_module(f"prime_rl.{name}")

    # The application adds ``train`` and ``Run``.
    installed = _import_module("prime_rl.entries")
    for entry in installed.entries("prime_rl.api", name):
        return installed.load_entry(entry)

    raise AttributeError(f"module 'prime_rl' has no attribute {name!r}")
