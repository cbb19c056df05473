"""What no source file that ships may do: run code from data, or trust any certificate."""

from __future__ import annotations

import ast

import pytest
from source_imports import APPLICATION, CORE, PLUGINS, ROOT, imports

RUN_CODE = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
"""Modules whose readers run code that a file or a frame holds."""
TRAVEL = "plugins/prime_rl_environments/src/function/travel.py"
"""The one exception: functions of a script, sealed with a key that the run's processes share."""
FOLDERS = (CORE, APPLICATION, *(plugin / "src" for plugin in PLUGINS))
FILES = sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))


def test_nothing_is_pickled():
    found = [each for file in FILES for each in imports(file) if each.inside(*RUN_CODE)]
    others = [each for each in found if each.file != ROOT / TRAVEL]
    assert not [each for each in others if not each.typing_only], list(map(str, others))


def test_the_one_exception_unseals_before_it_unpickles():
    source = (ROOT / TRAVEL).read_text()
    assert source.count(".loads(") == 1
    reading = next(n for n in ast.walk(ast.parse(source)) if getattr(n, "name", "") == "unpacked")
    text = ast.unparse(reading)
    assert text.index("unseal(") < text.index("cloudpickle.loads(data)")


def faults(source: str) -> list[str]:
    """Calls that run code from data or accept any certificate, by line."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {each.arg: ast.unparse(each.value) for each in call.keywords}
        if name in ("eval", "exec") or name.endswith(("yaml.load", "FileSystemReader")):
            found.append(f"line {call.lineno}: {name}")
        if name.endswith("torch.load") and given.get("weights_only") != "True":
            found.append(f"line {call.lineno}: {name} without weights_only=True")
        if given.get("verify") == "False" or given.get("allow_pickle") == "True":
            found.append(f"line {call.lineno}: {name}: {given}")
    return found


@pytest.mark.parametrize(
    "source",
    [
        *("torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)"),
        *("httpx.Client(verify=False)", "eval(text)", "filesystem.FileSystemReader(folder)"),
    ],
)
def test_the_check_finds_each_fault(source):
    assert faults(source)


def test_no_file_runs_code_from_data_or_accepts_any_certificate():
    found = {str(file.relative_to(ROOT)): faults(file.read_text()) for file in FILES}
    assert not {name: lines for name, lines in found.items() if lines}
