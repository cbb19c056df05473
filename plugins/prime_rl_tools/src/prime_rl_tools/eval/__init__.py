"""``prime-rl eval``: environments against any OpenAI-compatible endpoint."""
