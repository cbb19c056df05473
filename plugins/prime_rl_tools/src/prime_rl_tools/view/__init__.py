"""What a user sees of a run: the live view, the summary at its end, and the learning curve."""
