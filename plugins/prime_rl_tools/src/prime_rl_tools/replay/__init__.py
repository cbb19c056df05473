"""Saved rollouts scored again, without engine and without GPU: ``prime-rl replay``."""
