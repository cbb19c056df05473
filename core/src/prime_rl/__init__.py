"""The names a plugin author imports, and ``train`` and ``Run``, the Python API, which an installed
package offers. Each is imported when it is first used: together they take half a CPU second. None
brings in torch or verifiers."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from prime_rl.config.inference import FrozenModel as FrozenModel
    from prime_rl.errors import ConfigError as ConfigError
    from prime_rl.errors import EngineError as EngineError
    from prime_rl.errors import EngineGone as EngineGone
    from prime_rl.errors import OverlongError as OverlongError
    from prime_rl.errors import PluginError as PluginError
    from prime_rl.errors import PrimeRLError as PrimeRLError
    from prime_rl.errors import RunError as RunError
    from prime_rl.errors import StreamError as StreamError
    from prime_rl.errors import WeightsError as WeightsError
    from prime_rl.errors import WireError as WireError
    from prime_rl.plugins.algorithm import Algorithm as Algorithm
    from prime_rl.plugins.algorithm import Completion as Completion
    from prime_rl.plugins.algorithm import Filter as Filter
    from prime_rl.plugins.algorithm import Host as Host
    from prime_rl.plugins.algorithm import ReferenceModel as ReferenceModel
    from prime_rl.plugins.base import PluginConfig as PluginConfig
    from prime_rl.plugins.calls import log_metric as log_metric
    from prime_rl.plugins.checks import CONTRACT_VERSION as CONTRACT_VERSION
    from prime_rl.plugins.hookspecs import hookimpl as hookimpl
    from prime_rl.plugins.import_path import import_function as import_function
    from prime_rl.plugins.launchers import Engine as Engine
    from prime_rl.plugins.launchers import EngineCommand as EngineCommand
    from prime_rl.plugins.launchers import EngineLaunch as EngineLaunch
    from prime_rl.plugins.launchers import Launcher as Launcher
    from prime_rl.plugins.launchers import Part as Part
    from prime_rl.plugins.launchers import Place as Place
    from prime_rl.plugins.launchers import Process as Process
    from prime_rl.plugins.launchers import ProcessCommand as ProcessCommand
    from prime_rl.plugins.launchers import Task as Task
    from prime_rl.plugins.loss import Head as Head
    from prime_rl.plugins.loss import HeadInputs as HeadInputs
    from prime_rl.plugins.loss import Loss as Loss
    from prime_rl.plugins.loss import LossInputs as LossInputs
    from prime_rl.plugins.loss import LossOutputs as LossOutputs
    from prime_rl.plugins.loss import TokenMetric as TokenMetric
    from prime_rl.plugins.model import ModelMaker as ModelMaker
    from prime_rl.plugins.model import RendererOffer as RendererOffer
    from prime_rl.plugins.observer import Monitor as Monitor
    from prime_rl.plugins.observer import Observer as Observer
    from prime_rl.plugins.observer import ObserverHost as ObserverHost
    from prime_rl.plugins.sampler import RolloutPlan as RolloutPlan
    from prime_rl.plugins.sampler import SampledEnv as SampledEnv
    from prime_rl.plugins.sampler import Sampler as Sampler
    from prime_rl.plugins.sampler import Source as Source
    from prime_rl.plugins.sampler import SourceRequest as SourceRequest
    from prime_rl.plugins.trainer import AdamWConfig as AdamWConfig
    from prime_rl.plugins.trainer import Kernel as Kernel
    from prime_rl.plugins.trainer import OptimizerMaker as OptimizerMaker
    from prime_rl.plugins.trainer import TrainerObserver as TrainerObserver
    from prime_rl.plugins.trainer import Tuning as Tuning
    from prime_rl.plugins.view import RunView as RunView
    from prime_rl.plugins.weight_transports import Header as Header
    from prime_rl.plugins.weight_transports import ReceivingEngine as ReceivingEngine
    from prime_rl.plugins.weight_transports import TensorInfo as TensorInfo
    from prime_rl.plugins.weight_transports import WeightDelivery as WeightDelivery
    from prime_rl.plugins.weight_transports import Weights as Weights
    from prime_rl.plugins.weight_transports import WeightSender as WeightSender
    from prime_rl.plugins.weight_transports import WeightTransport as WeightTransport
    from prime_rl.rollout import ROLES as ROLES
    from prime_rl.rollout import Group as Group
    from prime_rl.rollout import Rollout as Rollout
    from prime_rl.rollout import Sample as Sample
    from prime_rl.rollout import Turn as Turn
    from prime_rl.rundir.chat_template import ChatTemplate as ChatTemplate
    from prime_rl.streams import LossComponent as LossComponent

    train: _typing.Callable[..., _typing.Any]
    Run: type[_typing.Any]
else:
    import re as _re
    from importlib import import_module as _import_module

    _PLACES = _re.findall(
        r"^    from (\S+) import (\w+) as", __loader__.get_data(__file__).decode(), 8
    )
    _MODULES = {name: module for module, name in _PLACES}

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            return _further(name)
        globals()[name] = found = getattr(_import_module(_MODULES[name]), name)
        return found

    def _further(name: str) -> object:
        """A submodule, or what a package offers."""
        from importlib.metadata import entry_points
        from importlib.util import find_spec

        if not name.startswith("_") and find_spec(f"prime_rl.{name}"):
            return _import_module(f"prime_rl.{name}")
        for entry in entry_points(group="prime_rl.api", name=name):
            return entry.load()
        raise AttributeError(f"module 'prime_rl' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
