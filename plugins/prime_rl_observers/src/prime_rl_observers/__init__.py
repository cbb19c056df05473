"""Observers of the trainer: token export, MFU, disk space, losses, bad and slow steps, the size of
its file.

``orchestrator.py`` has those of the orchestrator.
"""

from __future__ import annotations

from prime_rl import TrainerObserver, hookimpl
from prime_rl_observers.bad_steps import BadSteps
from prime_rl_observers.console import StepConsole
from prime_rl_observers.device_usage import DeviceUsage
from prime_rl_observers.disk import Disk
from prime_rl_observers.loss_checks import LossChecks
from prime_rl_observers.slow_steps import SlowSteps
from prime_rl_observers.step_file import StepFile
from prime_rl_observers.token_export import TokenExport


@hookimpl
def register_observers() -> list[type[TrainerObserver]]:
    """Offer the observers."""
    return [BadSteps, StepConsole, DeviceUsage, Disk, LossChecks, SlowSteps, StepFile, TokenExport]
