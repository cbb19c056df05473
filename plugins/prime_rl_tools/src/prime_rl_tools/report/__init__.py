"""``prime-rl report``: one self-contained HTML file that shows a run down to its tokens' credit."""

from prime_rl_tools.report.page import write_report as write_report
