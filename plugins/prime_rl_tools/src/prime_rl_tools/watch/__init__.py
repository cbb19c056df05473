"""The page of one or two runs, served on loopback while they go on: ``prime-rl watch``."""
