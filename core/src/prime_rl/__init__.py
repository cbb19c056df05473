# ruff: noqa: I001, RUF022 - several names on a line
# fmt: off
"""The names a plugin author imports, and ``train`` and ``Run``, the Python API of an installed
package. Each is imported at its first use: all take half a CPU second. None needs torch."""

import typing as _typing

__all__ = [
    "AdamWConfig", "Algorithm", "CONTRACT_VERSION", "ChatTemplate", "Completion", "ConfigError",
    "Engine", "EngineCommand", "EngineError", "EngineGone", "EngineLaunch", "Filter", "FrozenModel",
    "Group", "Head", "HeadInputs", "Header", "Host", "Kernel", "Launcher", "Loss", "LossComponent",
    "LossInputs", "LossOutputs", "ModelMaker", "Monitor", "Observer", "ObserverHost",
    "OptimizerMaker", "OverlongError", "Part", "Place", "PluginConfig", "PluginError",
    "PrimeRLError", "Process", "ProcessCommand", "ROLES", "ReceivingEngine", "ReferenceModel",
    "RendererOffer", "Rollout", "RolloutPlan", "RunError", "RunView", "Sample", "SampledEnv",
    "Sampler", "Source", "SourceRequest", "StreamError", "Task", "TensorInfo", "TokenMetric",
    "TrainerObserver", "Tuning", "Turn", "WeightDelivery", "WeightSender", "WeightTransport",
    "Weights", "WeightsError", "WireError", "hookimpl", "import_function", "log_metric",
]

if _typing.TYPE_CHECKING:
    from prime_rl.config.inference import FrozenModel
    from prime_rl.errors import ConfigError, EngineError, EngineGone, OverlongError, PluginError
    from prime_rl.errors import PrimeRLError, RunError, StreamError, WeightsError, WireError
    from prime_rl.plugins.algorithm import Algorithm, Completion, Filter, Host, ReferenceModel
    from prime_rl.plugins.base import PluginConfig
    from prime_rl.plugins.calls import log_metric
    from prime_rl.plugins.checks import CONTRACT_VERSION
    from prime_rl.plugins.hookspecs import hookimpl
    from prime_rl.plugins.import_path import import_function
    from prime_rl.plugins.launchers import Engine, EngineCommand, EngineLaunch, Launcher, Part
    from prime_rl.plugins.launchers import Place, Process, ProcessCommand, Task
    from prime_rl.plugins.loss import Head, HeadInputs, Loss, LossInputs, LossOutputs, TokenMetric
    from prime_rl.plugins.model import ModelMaker, RendererOffer
    from prime_rl.plugins.observer import Monitor, Observer, ObserverHost
    from prime_rl.plugins.sampler import RolloutPlan, SampledEnv, Sampler, Source, SourceRequest
    from prime_rl.plugins.trainer import AdamWConfig, Kernel, OptimizerMaker, TrainerObserver
    from prime_rl.plugins.trainer import Tuning
    from prime_rl.plugins.view import RunView
    from prime_rl.plugins.weight_transports import Header, ReceivingEngine, TensorInfo
    from prime_rl.plugins.weight_transports import WeightDelivery, Weights, WeightSender
    from prime_rl.plugins.weight_transports import WeightTransport
    from prime_rl.rollout import ROLES, Group, Rollout, Sample, Turn
    from prime_rl.rundir.chat_template import ChatTemplate
    from prime_rl.streams import LossComponent

    train: _typing.Callable[..., _typing.Any]
    Run: type[_typing.Any]
else:
    import re as _re
    from importlib import import_module as _import

    _source = __loader__.get_data(__file__).decode()  # the imports above say where each name is
    _MODULES = {
        name: module
        for module, names in _re.findall(r"^    from (prime_rl\S+) import (.+)$", _source, _re.M)
        for name in names.split(", ")
    }

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            globals()[name] = found = getattr(_import(_MODULES[name]), name)
            return found
        from importlib.util import find_spec

        from prime_rl.entries import entries

        if find_spec(f"prime_rl.{name}"):
            return _import(f"prime_rl.{name}")
        for entry in entries("prime_rl.api", name):
            return entry.load()
        raise AttributeError(f"module 'prime_rl' has no attribute {name!r}")
