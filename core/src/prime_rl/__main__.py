"""``python -m prime_rl`` is the installed command ``prime-rl``."""

from prime_rl.entries import entries

for command in entries("console_scripts", "prime-rl"):
    command.load()()
