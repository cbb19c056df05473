"""What our plugin uses of vLLM, looked up in the wheels of every supported version
(``tools/vllm_names.py``)."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tools import vllm_names, wheel_sources
from tools.vllm_names import (
    DECLARED,
    RANGE,
    ROOT,
    Wheel,
    declared_range,
    minor,
    newest_of_minors,
    problems,
    requirement,
)
from tools.wheel_sources import NoRanges, NoRegistry, Remote, sources

from prime_rl_vllm.front import OPEN, SALTED


def supported() -> dict[str, Wheel]:
    """The newest release of each supported minor version."""
    oldest, newest = declared_range()
    try:
        chosen = [each for each in newest_of_minors() if oldest <= minor(each) <= newest]
        return {version: Wheel(sources("vllm", version)) for version in chosen}
    except NoRegistry as error:
        pytest.skip(f"no registry with vLLM answers: {error}")


@pytest.mark.slow
def test_every_supported_version_has_what_the_plugin_uses() -> None:
    wheels = supported()
    oldest, newest = declared_range()
    assert {minor(each) for each in wheels} == {
        (oldest[0], number) for number in range(oldest[1], newest[1] + 1)
    }
    assert {version: problems(wheel) for version, wheel in wheels.items()} == {
        version: [] for version in wheels
    }


@pytest.mark.slow
def test_every_route_of_the_front_is_one_of_some_supported_version() -> None:
    routes = set().union(*(wheel.routes for wheel in supported().values()))
    assert routes >= SALTED | OPEN - {"/metrics"}  # mounted by prometheus_client


def test_the_range_is_the_same_in_every_file() -> None:
    expected = requirement(*declared_range())
    for name in DECLARED:
        written = [match.group() for match in RANGE.finditer((ROOT / name).read_text())]
        assert written and set(written) == {expected}, name


def test_the_range_that_passes_is_written_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*DECLARED, vllm_names.INTERPRETER):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(vllm_names, "ROOT", tmp_path)
    vllm_names.write_range((0, 41), (0, 44))
    assert declared_range() == ((0, 41), (0, 44))
    for name in DECLARED:
        assert "vllm>=0.41,<0.45" in (tmp_path / name).read_text()


def wheel_of(folder: Path, **modules: str) -> Wheel:
    """``a__b = text``: a wheel with a module ``vllm.a.b``."""
    for name, text in modules.items():
        path = folder / "vllm" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Wheel(folder)


@pytest.mark.parametrize(
    ("text", "lack"),
    [
        ("from vllm.old import parse", "cannot import parse from vllm.old"),
        ("from vllm.new import render", "cannot import render from vllm.new"),
        ("import vllm.old", "no module vllm.old"),
        ("from vllm.new import parse", None),
        ("import json", None),
        (
            "try:\n from vllm.new import parse\nexcept ImportError:\n from vllm.old import parse",
            None,
        ),
        (
            "try:\n from vllm.old import parse\nexcept ImportError:\n from vllm.older import parse",
            "cannot import parse from vllm.old and cannot import parse from vllm.older",
        ),
    ],
)
def test_an_import_that_a_version_lacks_is_named(
    tmp_path: Path, text: str, lack: str | None
) -> None:
    wheel = wheel_of(tmp_path, new="def parse(): ...")
    found = list(vllm_names.failing_imports(wheel, ast.parse(text)))
    assert found == ([] if lack is None else [lack])


ENGINE = """
class Client:
    async def pause(self, mode): ...
class AsyncLLM(Client):
    def __init__(self): self.model_config = 1
    async def sleep(self, level=1): ...
"""
CONFIG = "class ModelConfig:\n    sleeps: bool = False"


@pytest.mark.parametrize(
    ("line", "lack"),
    [
        ("await state.engine.sleep(level=1)", None),
        ("await state.engine.pause(mode='keep')", None),
        ("await state.engine.sleep(depth=1)", "AsyncLLM.sleep has no argument depth"),
        ("await self._state.engine.doze()", "AsyncLLM has no doze"),
        ("return state.engine.model_config.sleeps", None),
        ("return state.engine.model_config.dozes", "ModelConfig has no dozes"),
        ("config = state.engine.model_config\n    return config.dozes", "has no dozes"),
    ],
)
def test_a_member_or_an_argument_that_a_version_lacks_is_named(
    tmp_path: Path, line: str, lack: str | None
) -> None:
    wheel = wheel_of(tmp_path, v1__engine__async_llm=ENGINE, config__model=CONFIG)
    tree = ast.parse(f"async def call(self, state):\n    {line}")
    found = list(vllm_names._members(wheel, tree, "admin"))
    assert len(found) == (lack is not None)
    assert lack is None or lack in found[0]


def test_a_route_with_a_salt_that_the_front_does_not_set_is_found(tmp_path: Path) -> None:
    wheel = wheel_of(
        tmp_path,
        entrypoints__judge__protocol="class Base:\n cache_salt: str\nclass Ask(Base):\n x: int",
        entrypoints__judge__api_router="@router.post('/judge')\nasync def f(body: Ask): ...\n"
        "@router.post('/other')\nasync def g(body: int): ...",
    )
    assert wheel.salted_routes == {"/judge"}
    assert wheel.routes == {"/judge", "/other"}


MODULES = 40
"""So many that the wheel's directory is longer than a block."""


class Files(BaseHTTPRequestHandler):
    """Answers one file, with or without ranges."""

    def __init__(self, data: bytes, ranges: bool, asked: list[str], *given: Any) -> None:
        self.data = data
        self.ranges = ranges
        self.asked = asked
        super().__init__(*given)

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.asked.append(wanted)
        first, last = (int(each) for each in wanted.removeprefix("bytes=").split("-"))
        part = self.data[first : last + 1] if self.ranges else self.data
        self.send_response(206 if self.ranges else 200)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("ranges", [True, False])
def test_a_wheel_is_read_by_ranges_where_the_server_has_them(
    tmp_path: Path, ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipfile

    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("big.so", bytes(5000))
        for number in range(MODULES):
            wheel.writestr(f"vllm/m{number}.py", "A = 1")
        wheel.writestr("vllm-1.dist-info/METADATA", "Name: vllm")
    asked: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), partial(Files, path.read_bytes(), ranges, asked))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(wheel_sources, "BLOCK", 1000)
    try:
        url = f"http://127.0.0.1:{server.server_port}/a.whl"
        if ranges:
            wheel_sources._unpack(Remote(url), tmp_path / "files")
        else:
            with pytest.raises(NoRanges):
                Remote(url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    if ranges:
        names = sorted(each.name for each in (tmp_path / "files").rglob("*") if each.is_file())
        assert names == sorted(["METADATA", *(f"m{number}.py" for number in range(MODULES))])
        assert not any(each.startswith("bytes=1000-") for each in asked)  # inside big.so


def test_without_a_registry_the_reason_is_pips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(NoRegistry, match="pip index"):
        wheel_sources.versions("vllm")


def test_the_command_prints_its_options() -> None:
    command = [sys.executable, "-m", "tools.vllm_names", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "--write" in done.stdout
