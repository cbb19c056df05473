"""Speed and memory, as medians and ratios. ``make bench``, or ``python -m bench NAME...``."""
