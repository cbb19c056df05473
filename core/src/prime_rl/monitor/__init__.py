"""Metric names and reductions, and the monitors that record them."""
