"""Copies of host arrays to a device, for engines: as the trainer makes them, without a wait."""

from __future__ import annotations

from prime_rl.trainer.device import to_device

__all__ = ["to_device"]
