"""``python -m prime_rl`` is the installed command ``prime-rl``."""

from importlib.metadata import entry_points

for command in entry_points(group="console_scripts", name="prime-rl"):
    command.load()()
