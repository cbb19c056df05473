"""``prime-rl plugins new``: a package with one plugin that works."""

from prime_rl.scaffold.names import KINDS as KINDS
from prime_rl.scaffold.write import Package as Package
from prime_rl.scaffold.write import write_package as write_package
