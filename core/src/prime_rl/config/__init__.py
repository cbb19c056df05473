"""The TOML schema. Imports no run-time module."""

from prime_rl.config.run import RunConfig as RunConfig
