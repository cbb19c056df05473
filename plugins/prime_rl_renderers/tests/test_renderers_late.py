"""Late imports: what a name gives, and what a run's imports leave out."""

import json
import subprocess
import sys

import pytest

from prime_rl_renderers.late import NAMES, PACKAGES

LATE = "from prime_rl_renderers import late; late.install()\n"
PUBLIC = """
import importlib, json, sys
package, names = importlib.import_module(sys.argv[1]), json.loads(sys.argv[2])
if not names:
    names = [n for n in vars(package) if n[0] != "_" and n != "annotations"]
found = {name: getattr(package, name) for name in names}
say = lambda it: [getattr(it, key, "") for key in ("__doc__", "__qualname__", "__name__")]
print(json.dumps({name: [type(it).__name__, *map(str, say(it))] for name, it in found.items()}))
"""
USED = """
import json, sys
import renderers.configs
import verifiers.v1
import verifiers.v1.tasksets
loaded = {name.partition(".")[0] for name in sys.modules}
from verifiers.v1.utils.score import parse, verify
import anthropic, renderers
try:
    anthropic.no_such_name
except AttributeError as error:
    said = str(error)
answers = [verify(parse("1/2"), parse("0.5")), anthropic.Anthropic.__name__, said]
print(json.dumps([sorted(loaded & {"mcp", "sympy", "google"}), "sympy" in sys.modules, *answers]))
"""


def python(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("package", [*NAMES, *PACKAGES])
def test_a_late_package_gives_what_it_gives_at_once(package):
    at_once = python(PUBLIC, package, "[]")
    assert len(at_once) > 2
    assert python(LATE + PUBLIC, package, json.dumps([*at_once])) == at_once


def test_a_run_leaves_out_what_it_does_not_use():
    no_such = "module 'anthropic' has no attribute 'no_such_name'"
    assert python(LATE + USED) == [[], True, True, "Anthropic", no_such]
