"""Recording the choices of routers, for engines that compute a model by transformers' modules."""

from __future__ import annotations

from prime_rl.trainer.routes import Mixture, Recorder, choosing, observe_routers

__all__ = ["Mixture", "Recorder", "choosing", "observe_routers"]
