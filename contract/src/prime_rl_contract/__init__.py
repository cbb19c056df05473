"""The version of the plugin contract. What it contains is in ``prime_rl``: hooks, base classes,
streams."""

VERSION = 2
"""What ``prime_rl.CONTRACT_VERSION`` is in a prime-rl-core that this distribution fits."""
