"""The verifiers harness ``program``: an agent program plays the rollout, and its model trains.

    task -> JSON on stdin -> the program -> OpenAI or Anthropic API -> verifiers' interception
                                                                       -> the policy's tokens

verifiers starts the program (its runtimes), serves its model calls (its interception server) and
records each as a message of the trace (its graph). This package adds the hand-over of the task,
Responses and Messages of a policy that is trained (``dialects``), further models by name
(``models``), and a reward that the program gives (``reward``).

The taskset ``program`` has the rows of a file, for programs that score themselves.
"""

from program.harness import ProgramConfig, ProgramHarness
from program.taskset import ProgramTaskset, ProgramTasksetConfig

__all__ = ["ProgramConfig", "ProgramHarness", "ProgramTaskset", "ProgramTasksetConfig"]
