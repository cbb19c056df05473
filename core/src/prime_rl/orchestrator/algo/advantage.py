"""Upstream's helpers of algorithms. The import of this module says what to write instead."""

from prime_rl.upstream import missing

raise missing(
    __name__,
    "An algorithm assigns credit with rollout.assign_advantages: from prime_rl import Algorithm. "
    "docs/migrating.md shows how.",
)
