"""``python -m prime_rl``: the command ``prime-rl``."""

from prime_rl.cli import main

if __name__ == "__main__":
    main()
