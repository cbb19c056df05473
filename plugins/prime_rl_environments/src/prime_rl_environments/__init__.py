"""Environments that run anywhere: a tiny policy made on this machine, and tasksets without
downloads.

* ``[model] name = "tiny-reverse"``: the policy (``tiny``).
* ``[[orchestrator.train.env]] id = "reverse-text"``: the taskset (top-level module
  ``reverse_text``).
* ``harness = {id = "in-process"}``: runs any chat taskset without a process or a port a rollout
  (top-level module ``in_process``).

verifiers finds a taskset or a harness by importing a module of its id, hence the two top-level
names.
"""

from collections.abc import Iterable

from prime_rl import ModelMaker, hookimpl
from prime_rl_environments.tiny import TinyReverse


@hookimpl
def register_models() -> Iterable[type[ModelMaker]]:
    return [TinyReverse]
