"""Where the processes of a run find modules."""

import importlib.util
import sys
from pathlib import Path

from prime_rl.registry.import_path import import_function


def test_a_file_in_the_working_directory_replaces_no_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("colorsys.py").write_text("def rgb_to_hls(inputs): ...")  # of the standard library too
    Path("my_credit.py").write_text("import colorsys\ndef take(inputs): return colorsys.__file__")
    before = [*sys.path]
    try:
        found = import_function("my_credit.take", {}, "inputs")(None)
        assert found == importlib.util.find_spec("colorsys").origin
        assert not found.startswith(str(tmp_path))
    finally:
        sys.modules.pop("my_credit", None)
    assert sys.path == before
