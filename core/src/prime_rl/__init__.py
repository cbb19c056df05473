"""The names a plugin author imports. Importing this brings in neither torch nor verifiers."""

from prime_rl.plugins.base import Algorithm as Algorithm
from prime_rl.plugins.base import Engine as Engine
from prime_rl.plugins.base import EngineCommand as EngineCommand
from prime_rl.plugins.base import EngineLaunch as EngineLaunch
from prime_rl.plugins.base import Filter as Filter
from prime_rl.plugins.base import Loss as Loss
from prime_rl.plugins.base import LossComponent as LossComponent
from prime_rl.plugins.base import LossInputs as LossInputs
from prime_rl.plugins.base import LossOutputs as LossOutputs
from prime_rl.plugins.base import ModelMaker as ModelMaker
from prime_rl.plugins.base import Monitor as Monitor
from prime_rl.plugins.base import PluginConfig as PluginConfig
from prime_rl.plugins.base import RendererOffer as RendererOffer
from prime_rl.plugins.base import SampledEnv as SampledEnv
from prime_rl.plugins.base import Sampler as Sampler
from prime_rl.plugins.base import TokenMetric as TokenMetric
from prime_rl.plugins.checks import CONTRACT_VERSION as CONTRACT_VERSION
from prime_rl.plugins.errors import ConfigError as ConfigError
from prime_rl.plugins.errors import EngineError as EngineError
from prime_rl.plugins.errors import PluginError as PluginError
from prime_rl.plugins.errors import PrimeRLError as PrimeRLError
from prime_rl.plugins.errors import RunError as RunError
from prime_rl.plugins.errors import StreamError as StreamError
from prime_rl.plugins.errors import WeightsError as WeightsError
from prime_rl.plugins.errors import WireError as WireError
from prime_rl.plugins.hookspecs import hookimpl as hookimpl
from prime_rl.rollout import Group as Group
from prime_rl.rollout import Rollout as Rollout
from prime_rl.rollout import Sample as Sample

