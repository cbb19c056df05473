"""What surrounds a run: its directory, its processes, what a user sees of them."""
