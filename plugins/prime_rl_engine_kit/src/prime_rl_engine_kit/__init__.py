"""Code for servers of the engine contract (``docs/engines.md``) in Python: command line, clean end,
keys, requests and errors; model folders and adapters. It does not depend on an inference library.
The observer ``engine_metrics`` reads what the engines of a run measure; ``scorer`` asks engines for
logprobs and completions, for the algorithms of a run."""

from prime_rl import Observer, hookimpl


@hookimpl
def register_observers() -> list[type[Observer]]:
    """Offer ``engine_metrics``."""
    from prime_rl_engine_kit.metrics import EngineMetrics

    return [EngineMetrics]
