"""Agent programs: the harness and the taskset ``program``, which verifiers finds by that name."""
