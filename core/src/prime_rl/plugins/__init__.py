"""The contract between prime-rl's core and its plugins."""
