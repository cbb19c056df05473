"""What is said where engines do not serve: which, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl.errors import EngineError
from prime_rl.inference.replica import Replica


def outage(replicas: Sequence[Replica]) -> str:
    """Whom requests wait for, and why."""
    away = ", ".join(f"{r.url} ({r.reason or 'starting'})" for r in replicas)
    return f"inference: {away}"


def nobody_serves(replicas: Sequence[Replica], seconds: float, own: bool) -> EngineError:
    """After ``seconds``; ``own``: we have started them."""
    whose = "Its log is" if len(replicas) == 1 else "Their logs are"
    hint = (
        f"{whose} logs/latest/inference*.log of the run directory."
        if own
        else "Start them, or mend inference.base_url."
    )
    away = "; ".join(f"engine {r.url}: {r.reason or 'no answer'}" for r in replicas)
    return EngineError(
        f"no engine serves after {seconds:.0f} s (inference.ready_timeout): {away}. {hint}"
    )


def check_start(replicas: Sequence[Replica], own: bool) -> None:
    """Raises ``EngineError`` for what waiting will not mend."""
    if all(replica.locked for replica in replicas):
        raise EngineError(
            f"{'; '.join(replica.reason for replica in replicas)}. New weights need the key that "
            "the engines were started with: export it under the name that inference.admin_key_var "
            "gives."
        )
    mistaken = next((replica for replica in replicas if replica.mistaken), None)
    if mistaken is not None and not own:
        raise EngineError(
            f"engine {mistaken.url}: {mistaken.reason} (model.name). Name the model that it "
            "serves, start it with that name (prime-rl serve --served-model-name), or mend "
            "inference.base_url."
        )
