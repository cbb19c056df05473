"""Speed, as medians and ratios from one run. ``make bench``, or ``python -m bench NAME...``."""
