"""``prime-rl race``: the same seeds and budget for several configs, and which one is better."""
