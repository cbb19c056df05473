"""Upstream's earlier module of advantage functions, which algorithms replace."""

from prime_rl.upstream import moved

__getattr__ = moved(
    __name__, {}, "An advantage function becomes an algorithm: docs/migrating.md shows how."
)
