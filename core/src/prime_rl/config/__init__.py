"""The TOML schema. Imports no run-time module."""
