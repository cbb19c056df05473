"""Upstream's module of losses."""

from prime_rl.upstream import moved

_MODULE = "prime_rl.plugins.loss"
__getattr__ = moved(__name__, {"LossInputs": _MODULE, "LossOutputs": _MODULE})
