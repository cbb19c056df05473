"""The supervisor's side of a run: config checks, processes, restarts, resuming."""
