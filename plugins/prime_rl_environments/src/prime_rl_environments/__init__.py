"""Environments that run anywhere: tiny policies created locally, and tasks without downloads.

* ``[model] name = "tiny-reverse"`` or ``"tiny-chat"``: the policies (``tiny``).
* ``[[orchestrator.train.env]] id = "text-reversal"`` (one turn), ``"reverse-retry"`` (user
  feedback), ``"word-lookup"`` (a tool), ``"reverse-relay"`` (a sub-agent), ``"propose-solve"`` (two
  agents): the tasks, each a top-level module.
* ``id = "function"``: prompts from a list or a file, and reward functions (``function``).
* ``harness = {id = "in-process"}``: runs any chat taskset without a process or port per rollout
  (top-level module ``in_process``).

verifiers imports a taskset or a harness as a top-level module named after its id.
"""

from collections.abc import Iterable

from prime_rl import ModelMaker, hookimpl
from prime_rl_environments.tiny import TinyChat, TinyReverse


@hookimpl
def register_models() -> Iterable[type[ModelMaker]]:
    return [TinyReverse, TinyChat]
