"""The verifiers harness ``in-process``: a chat loop that calls the model client directly.

verifiers' own harnesses start a program per rollout, which calls the model over loopback HTTP. This
harness runs the loop in the environment's process and calls verifiers' turn handler (``turns``):
limits, ``@stop``, hooks, recording and errors are those of verifiers, unchanged. Engine requests
use a fast HTTP client (``engine``), which also records the policy version of every sampled token in
``trace.info["weight_versions"]``.

It works with any chat taskset without MCP tool servers, including multi-turn ones. Tools can be
Python functions: ``harness = {id = "in-process", tools = ["my_module:add"]}``.
"""

from in_process.harness import InProcessConfig, InProcessHarness

__all__ = ["InProcessConfig", "InProcessHarness"]
