"""Upstream's module of the base class of algorithms."""

from prime_rl.upstream import moved

__getattr__ = moved(__name__, {"Algorithm": "prime_rl.plugins.algorithm"})
