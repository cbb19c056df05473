"""Reference pages written from the code itself: ``docs/hooks.md`` and ``docs/config.md``."""
