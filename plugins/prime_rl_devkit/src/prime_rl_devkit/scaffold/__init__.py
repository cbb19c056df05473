"""``prime-rl plugins new``: a package with one working plugin."""

from prime_rl_devkit.scaffold.names import KINDS as KINDS
from prime_rl_devkit.scaffold.write import Package as Package
from prime_rl_devkit.scaffold.write import write_package as write_package
