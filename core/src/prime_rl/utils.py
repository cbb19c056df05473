"""Upstream's package of helpers. It has no counterpart, and its import says what to write."""

from prime_rl.upstream import missing

raise missing(
    __name__,
    "A logger is logging.getLogger(__name__). docs/api.md has what a plugin may import.",
)
