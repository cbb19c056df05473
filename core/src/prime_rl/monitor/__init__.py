"""What a run reports: metric names and reductions, and the monitors that keep them."""
