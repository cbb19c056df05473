"""A package of upstream prime-rl, for the import of its losses."""
