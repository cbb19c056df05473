"""Reference pages generated from the code: ``docs/hooks.md`` and ``docs/config.md``."""
