"""What is wrong with a run, read from its files: ``diagnose(run)`` gives verdicts with evidence.

``history`` reads a run, ``checks`` holds the checks and their thresholds. A verdict compares the
last window of steps with the first one, so an early warning is an indication: it names what to look
at, and proves nothing.
"""

from prime_rl_tools.doctor.checks import Verdict, diagnose
from prime_rl_tools.doctor.history import MIN_STEPS, History

__all__ = ["MIN_STEPS", "History", "Verdict", "diagnose"]
