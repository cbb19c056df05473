"""The verifiers harness ``in-process``: a chat loop that drives the model client by function call.

verifiers' own harnesses start a program a rollout, which calls the model over loopback HTTP. This
one runs the loop in the environment's process and hands each request straight to verifiers' turn
handling (``turns``): limits, ``@stop``, hooks, recording and errors are verifiers' own, unchanged.
Engine requests go through a lean HTTP client (``engine``), which also keeps the policy version of
every sampled token, in ``trace.info["weight_versions"]``.

Works with any chat taskset without MCP tool servers, multi-turn included. Python functions can
serve as tools: ``harness = {id = "in-process", tools = ["my_module:add"]}``.
"""

from in_process.harness import InProcessConfig, InProcessHarness

__all__ = ["InProcessConfig", "InProcessHarness"]
