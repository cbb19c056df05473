"""Imports the plugin, as a run does: it makes the taskset known as ``reasoning-gym``."""

import prime_rl_reasoning_gym as prime_rl_reasoning_gym
