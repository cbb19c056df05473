"""Real child processes for the tests of run."""

import sys

import pytest

from prime_rl_app.children import end, start


@pytest.fixture
def spawn(tmp_path):
    children = []

    def python(code, name="child", **env):
        argv = [sys.executable, "-c", code]
        children.append(start(name, argv, env, tmp_path / f"{name}.log"))
        return children[-1]

    yield python
    end(children, grace=0)
