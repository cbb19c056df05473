"""What the code of a taskset raises at the start names the env, the function and the line."""

import re
import sys

import pytest
from verifiers.v1.utils import loaders

from prime_rl import ConfigError
from prime_rl.env.environment import Environment, ExampleFailed
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import check_taskset, env_hooks, import_tasksets
from prime_rl.errors import Terminated

MODULE = """\
import sys
import verifiers.v1 as vf

class Authored(vf.Task[vf.TaskData]):
    pass

class AuthoredTaskset(vf.Taskset[Authored, vf.TasksetConfig]):
    def __init__(self, config):
        super().__init__(config)

    def load(self):
        return [Authored(vf.TaskData(prompt="ab"), self.config.task)]

__all__ = ["AuthoredTaskset"]
"""
IMPORT, INIT, LOAD = 1, 9, 12
"""Lines of the module, which a test replaces."""

RAISES = {
    "sys.exit(0)": "SystemExit: 0",
    "raise ZeroDivisionError('no data')": "ZeroDivisionError: no data",
    "raise RuntimeError": "RuntimeError",
    "raise ValueError('two\\n  lines')": "ValueError: two lines",
    "raise type('Skipped', (BaseException,), {})('of a test')": "Skipped: of a test",
}


@pytest.fixture
def authored(tmp_path, monkeypatch):
    """Write the module with one line replaced. Gives its path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "authored_env", raising=False)
    path = tmp_path / "authored_env.py"

    def write(line, text):
        lines = MODULE.splitlines()
        indent = re.match(" *", lines[line - 1]).group()
        lines[line - 1] = f"{indent}{text}"
        path.write_text("\n".join(lines))
        return path

    yield write
    sys.modules.pop("authored_env", None)


def environment():
    return Environment(
        EnvSettings(id="authored-env", name="mine", default_harness={"id": "small-harness"})
    )


@pytest.mark.parametrize("statement", RAISES)
@pytest.mark.parametrize(
    ("line", "function"),
    [
        (IMPORT, "module authored_env"),
        (INIT, "AuthoredTaskset.__init__"),
        (LOAD, "AuthoredTaskset.load"),
    ],
)
def test_what_a_taskset_raises_names_function_and_line(authored, line, function, statement):
    path = authored(line, f"import sys; {statement}")
    with pytest.raises(ConfigError) as caught:
        environment()
    assert str(caught.value) == (
        f"env 'mine': {function} raised {RAISES[statement]} (line {line} of {path})"
    )


@pytest.mark.parametrize("statement", RAISES)
def test_the_orchestrators_import_names_the_line_too(authored, statement):
    path = authored(IMPORT, f"import sys; {statement}")
    with pytest.raises(ConfigError) as caught:
        import_tasksets([("mine", "authored-env")])
    assert str(caught.value) == (
        f"env 'mine': module authored_env raised {RAISES[statement]} (line 1 of {path})"
    )


def test_a_library_that_raises_is_reported_at_the_line_that_called_it(authored):
    path = authored(LOAD, "import json; json.loads('{')")
    with pytest.raises(ConfigError, match=rf"raised JSONDecodeError: .* \(line 12 of {path}"):
        environment()


def test_what_a_module_lacks_is_named_with_its_line(authored):
    path = authored(IMPORT, "import no_such_library")
    with pytest.raises(ConfigError, match=rf"'no_such_library'\) \(line 1 of {path}\)"):
        environment()


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ("return None", "did not return or yield tasks of verifiers (TypeError: 'NoneType' object"),
        ("yield {'prompt': 'x'}", "tasks of verifiers (AttributeError: 'dict' object has no"),
        ("return 3", "tasks of verifiers (TypeError: 'int' object is not iterable)"),
    ],
)
def test_a_load_that_gives_no_tasks_is_refused(authored, load, says):
    authored(LOAD, load)
    with pytest.raises(ConfigError) as caught:
        environment()
    assert str(caught.value).startswith("env 'mine': AuthoredTaskset.load did not return")
    assert says in str(caught.value)


@pytest.mark.parametrize("body", ["return []", "yield 1"])
def test_an_async_load_is_refused_before_it_is_called(authored, body):
    path = authored(LOAD, body)
    path.write_text(path.read_text().replace("def load", "async def load"))
    with pytest.raises(ConfigError, match=r"'mine': AuthoredTaskset\.load is an async def"):
        environment()


@pytest.mark.parametrize("load", ["return None", "import sys; sys.exit(0)", "yield {}"])
def test_an_endless_load_that_fails_at_once_is_a_failed_example(authored, load):
    path = authored(LOAD, load)
    path.write_text(path.read_text().replace("    def load", "    INFINITE = True\n    def load"))
    examples = environment().examples
    with pytest.raises(ExampleFailed, match="the environment cannot make example 0"):
        examples[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
def test_an_end_of_the_process_is_no_fault_of_the_env(authored, monkeypatch, error):
    authored(IMPORT, "import sys; raise sys.ends_now")
    monkeypatch.setattr(sys, "ends_now", error, raising=False)
    with pytest.raises(error):
        environment()


@pytest.mark.parametrize(
    ("module", "call", "where"),
    [
        ("check_args", lambda: check_taskset("packed-env", "e.0.id", {}), "e.0.args"),
        ("env_hooks", lambda: env_hooks("packed-env", {}), "env 'packed-env'"),
    ],
)
@pytest.mark.parametrize("statement", RAISES)
def test_a_check_or_hook_of_a_package_names_its_line(
    tmp_path, monkeypatch, module, call, where, statement
):
    package = tmp_path / "packed_env"
    package.mkdir()
    (package / "__init__.py").write_text("")
    path = package / f"{module}.py"
    path.write_text(f"def {module}(args):\n    import sys; {statement}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("packed_env", f"packed_env.{module}"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        with pytest.raises(ConfigError) as caught:
            call()
    finally:
        for name in ("packed_env", f"packed_env.{module}"):
            sys.modules.pop(name, None)
    assert str(caught.value) == (f"{where}: {module} raised {RAISES[statement]} (line 2 of {path})")


def test_a_frame_that_a_wrapper_hides_is_not_the_envs(authored, monkeypatch):
    path = authored(IMPORT, "1 / 0")
    find = loaders._import_plugin

    def wrapper(*plugin):
        __tracebackhide__ = True
        return find(*plugin)

    monkeypatch.setattr(loaders, "_import_plugin", wrapper)
    with pytest.raises(ConfigError, match=rf"module authored_env raised .* \(line 1 of {path}\)"):
        environment()
