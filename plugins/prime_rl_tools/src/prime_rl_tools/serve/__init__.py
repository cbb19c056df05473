"""``prime-rl serve``: one engine alone, in the foreground."""
