"""The page of a run, down to its tokens' credit: one HTML file (``prime-rl report``),
or served while the run is going on (``prime-rl watch``)."""

from prime_rl_tools.report.write import write_report as write_report
