"""``python -m tools.vllm_names [--write]``: which versions of vLLM have what our plugin uses.

The plugin is read by ``ast``: its imports of vLLM, what it calls of the engine's client and of the
worker, with the names of arguments. Command-line arguments, routes, fields and environment
variables come from the plugin's own tables. Each is looked up, by ``ast`` too, in the Python files
of a CUDA wheel (``wheel_sources.py``): nothing is imported and no GPU is needed.

``--write`` writes the range of neighboring minor versions that pass, the newest included, where the
repository declares it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from tools.wheel_sources import sources, versions

from prime_rl_vllm.arguments import DEFAULTS, NOTED, OWNED
from prime_rl_vllm.cpu_start import ENVIRONMENT, SETTINGS
from prime_rl_vllm.front import SALTED
from prime_rl_vllm.schema import _PASSED

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugins" / "prime_rl_vllm" / "src" / "prime_rl_vllm"
RANGE = re.compile(r"vllm>=(\d+\.\d+),<(\d+\.\d+)")
DECLARED = (
    "plugins/prime_rl_vllm/pyproject.toml",
    "plugins/prime_rl_vllm/setup_environment.sh",
    "docs/examples/cluster/Dockerfile",
)
"""Files with a requirement like ``vllm>=0.32,<0.34``."""
INTERPRETER = "plugins/prime_rl_vllm/src/prime_rl_vllm/interpreter.py"
BOUNDS = re.compile(r"OLDEST = \((\d+), (\d+)\)\nNEWEST = \((\d+), (\d+)\)")

ENGINE = ("vllm.v1.engine.async_llm.AsyncLLM",)
FILES = ("admin", "front", "generate", "prefill", "state")
"""The modules of the plugin that call the engine's client."""
WORKER = ("vllm.v1.worker.gpu_worker.Worker",)
RUNNERS = (
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
)
"""vLLM has two; a variable of its own chooses."""
FIELDS = {
    "vllm.sampling_params.SamplingParams": (
        *_PASSED,
        *("max_tokens", "stop_token_ids", "logprobs", "prompt_logprobs"),
        *("detokenize", "output_kind", "extra_args"),
    ),
    "vllm.sampling_params.RequestOutputKind": ("FINAL_ONLY",),
    "vllm.outputs.RequestOutput": (
        *("outputs", "num_cached_tokens", "prompt_logprobs", "kv_transfer_params"),
    ),
    "vllm.outputs.CompletionOutput": (
        *("index", "token_ids", "logprobs", "finish_reason", "stop_reason", "weight_versions"),
    ),
    "vllm.logprobs.Logprob": ("logprob", "rank"),
    "vllm.lora.request.LoRARequest": ("lora_name", "lora_int_id", "lora_path", "load_inplace"),
    "vllm.config.kv_transfer.KVTransferConfig": (
        *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"),
        "kv_connector_extra_config",
    ),
    "vllm.model_executor.layers.fused_moe.config.FusedMoEConfig": (
        *("hidden_dim_unpadded", "intermediate_size_per_partition_unpadded"),
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler.NixlBaseConnectorScheduler": (
        *("_kv_lease_duration", "side_channel_host", "side_channel_port"),
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector.NixlBaseConnector": (
        *("connector_scheduler", "set_xfer_handshake_metadata_pp_aware"),
    ),
}
"""What ``schema.py``, ``reply.py``, ``generate.py``, ``admin.py``, ``prefill.py`` and ``worker.py``
use."""
OWN_ROUTES = {"/inference/v1/generate"}
"""That the plugin answers itself, with a salt."""
ARGUMENTS = (
    *("enable_sleep_mode", "enable_lora", "max_lora_rank", "enforce_eager", "dtype"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("load_format", "watermark_config", "kv_transfer_config", "kv_offloading_size"),
    *("device_ids", "disable_log_stats", "enable_return_routed_experts"),
    "distributed_executor_backend",
)
"""Arguments that the plugin reads or sets outside its tables."""
COMMAND_LINE = ("vllm/engine/arg_utils.py", "vllm/entrypoints/*/cli_args.py")
VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")
NOT_READ = {"VLLM_SERVER_DEV_MODE"}
"""Named in texts only."""


class Wheel:
    """The Python files of one version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[Path, ast.Module] = {}

    def module(self, name: str) -> ast.Module | None:
        """The module of this dotted name, or None."""
        place = self._folder / name.replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.exists():
                return self.tree(path)
        return None

    def tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(path.read_text("utf-8"))
        return self._trees[path]

    def files(self, pattern: str) -> list[Path]:
        return sorted(self._folder.glob(pattern))

    def defines(self, module: str, name: str) -> bool:
        """Whether ``from module import name`` works."""
        tree = self.module(module)
        if tree is None:
            return False
        return name in names_of(tree) or self.module(f"{module}.{name}") is not None

    def classes(self, path: str) -> Iterator[tuple[ast.Module, ast.ClassDef]]:
        """The class of a dotted path, and its bases, each with the module that it is in."""
        module, _, name = path.rpartition(".")
        tree = self.module(module)
        if tree is None:
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield tree, node
                for base in node.bases:
                    yield from self._bases(tree, module, ast.unparse(base))
                return

    def _bases(
        self, tree: ast.Module, module: str, name: str
    ) -> Iterator[tuple[ast.Module, ast.ClassDef]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from self.classes(f"{module}.{name}")
                return
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            if name in {each.asname or each.name for each in node.names}:
                yield from self.classes(f"{node.module}.{name}")
                return

    def members(self, path: str) -> dict[str, ast.AST]:
        """What instances of a class have: methods, fields, and what methods assign to ``self``."""
        members: dict[str, ast.AST] = {}
        for _, node in self.classes(path):
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    members.setdefault(each.name, each)
                elif isinstance(each, ast.AnnAssign):
                    members.setdefault(ast.unparse(each.target).removeprefix("self."), each)
                elif isinstance(each, ast.Assign):
                    for target in each.targets:
                        for part in ast.walk(target):
                            if isinstance(part, ast.Name | ast.Attribute):
                                members.setdefault(ast.unparse(part).removeprefix("self."), each)
        return members

    @cached_property
    def config_classes(self) -> dict[str, str]:
        """Dotted paths of vLLM's configs, by the name of an attribute that holds one."""
        return {
            node.name.lower(): f"vllm.config.{path.stem}.{node.name}"
            for path in self.files("vllm/config/*.py")
            for node in self.tree(path).body
            if isinstance(node, ast.ClassDef)
        }

    @cached_property
    def arguments(self) -> set[str]:
        """Arguments of the command line: fields of the classes of arguments, and what is added one
        by one."""
        names: set[str] = set()
        for pattern in COMMAND_LINE:
            for path in self.files(pattern):
                for node in ast.walk(self.tree(path)):
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                        names.add(node.target.id)
                    if text_of(node).startswith("--"):
                        names.add(text_of(node)[2:].replace("-", "_"))
                    if isinstance(node, ast.Call) and called(node) == "add_argument":
                        names |= {text_of(each) for each in node.args}
        return names

    @cached_property
    def routes(self) -> set[str]:
        """Paths of the HTTP server."""
        kinds = {"get", "post", "put", "api_route", "add_api_route", "websocket", "Mount", "Route"}
        return {
            text_of(node.args[0])
            for path in self.files("vllm/entrypoints/**/*.py")
            for node in ast.walk(self.tree(path))
            if isinstance(node, ast.Call) and called(node) in kinds
            if node.args and text_of(node.args[0]).startswith("/")
        }

    @cached_property
    def salted_routes(self) -> set[str]:
        """Paths that generate text and whose body has a ``cache_salt``."""
        bodies = {
            node.name: node
            for path in self.files("vllm/entrypoints/**/protocol.py")
            for node in ast.walk(self.tree(path))
            if isinstance(node, ast.ClassDef)
        }

        def has_salt(name: str) -> bool:
            if name not in bodies:
                return False
            fields = [each for each in bodies[name].body if isinstance(each, ast.AnnAssign)]
            if any(ast.unparse(each.target) == "cache_salt" for each in fields):
                return True
            return any(has_salt(ast.unparse(base)) for base in bodies[name].bases)

        paths = set()
        for path in self.files("vllm/entrypoints/**/api_router.py"):
            if {"pooling", "render"} & {*path.parts}:  # these sample nothing
                continue
            for node in ast.walk(self.tree(path)):
                if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                    continue
                kinds = {ast.unparse(each.annotation) for each in node.args.args if each.annotation}
                for each in node.decorator_list if any(map(has_salt, kinds)) else ():
                    if isinstance(each, ast.Call) and called(each) == "post" and each.args:
                        paths.add(str(ast.literal_eval(each.args[0])))
        return paths

    @cached_property
    def variables(self) -> set[str]:
        tree = self.module("vllm.envs")
        assert tree is not None, "no vllm/envs.py"
        return set(VARIABLE.findall(ast.unparse(tree)))


def names_of(tree: ast.Module) -> set[str]:
    """What a module defines or imports, and names that it loads when they are first used."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return ast.unparse(node.func).rpartition(".")[2]


def text_of(node: ast.AST) -> str:
    """A literal string's value; empty for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def problems(wheel: Wheel) -> list[str]:
    """What the plugin uses and this version lacks; empty: the plugin supports it."""
    lacking: list[str] = []
    for path in sorted(PLUGIN.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        lacking += [f"{path.name}: {each}" for each in failing_imports(wheel, tree)]
        lacking += [f"{path.name}: {each}" for each in _members(wheel, tree, path.stem)]

    for owner, fields in FIELDS.items():
        members = wheel.members(owner)
        lacking += [f"{owner} has no {name}" for name in fields if name not in members]

    server = ast.parse((PLUGIN / "server.py").read_text("utf-8"))
    ours = {
        str(key.value)
        for node in ast.walk(server)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ours"
        for key in getattr(node.value, "keys", [])
    }
    assert ours, "server.py sets no arguments in `ours`"
    for name in sorted({*ours, *OWNED, *DEFAULTS, *NOTED, *SETTINGS, *ARGUMENTS}):
        if name not in wheel.arguments:
            lacking.append(f"no argument {name}")

    # A route that only some versions have does no harm; a salt that we do not set would.
    for route in sorted(wheel.salted_routes - SALTED - OWN_ROUTES):
        lacking.append(f"the route {route} has a cache_salt, and front.SALTED lacks it")

    used = set(ENVIRONMENT)
    for path in PLUGIN.glob("*.py"):
        used |= set(VARIABLE.findall(path.read_text("utf-8")))
    for name in sorted(used - wheel.variables - NOT_READ):
        if name.startswith("VLLM_"):
            lacking.append(f"no environment variable {name}")
    return lacking


def failing_imports(wheel: Wheel, tree: ast.Module, package: str = "vllm") -> Iterator[str]:
    """Imports of a package that fail. One branch of a ``try`` with ``except ImportError`` has to
    work."""
    handled: set[ast.AST] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try):
            continue
        kinds = " ".join(ast.unparse(each.type) for each in node.handlers if each.type)
        if "ImportError" not in kinds and "ModuleNotFoundError" not in kinds:
            continue
        ways = [node.body, *(handler.body for handler in node.handlers)]
        failures = [
            [
                lack
                for each in way
                for part in ast.walk(each)
                for lack in _lacks(wheel, part, package)
            ]
            for way in ways
        ]
        handled |= {part for way in ways for each in way for part in ast.walk(each)}
        if all(failures):
            yield " and ".join(failure[0] for failure in failures)
    for node in ast.walk(tree):
        if node not in handled:
            yield from _lacks(wheel, node, package)


def _lacks(wheel: Wheel, node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
        for each in node.names:
            if not wheel.defines(str(node.module), each.name):
                yield f"cannot import {each.name} from {node.module}"
    if isinstance(node, ast.Import):
        for each in node.names:
            if each.name.split(".")[0] == package and wheel.module(each.name) is None:
                yield f"no module {each.name}"


def _members(wheel: Wheel, tree: ast.Module, file: str) -> Iterator[str]:
    """Attributes of vLLM's objects that they lack, and arguments that their methods lack."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        aliases: dict[str, str] = {}
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Attribute):
                continue
            chain = ast.unparse(node.value)
            if isinstance(node.targets[0], ast.Name) and _roots(chain, file):
                aliases[node.targets[0].id] = chain
        calls = {
            id(node.func): node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute):
                continue
            text = ast.unparse(node)
            first, _, rest = text.partition(".")
            text = f"{aliases[first]}.{rest}" if first in aliases else text
            for owner, name in _resolve(wheel, text, file):
                member = wheel.members(owner).get(name)
                if member is None:
                    yield f"{owner} has no {name}"
                elif id(node) in calls:
                    yield from _arguments(owner, name, member, calls[id(node)])


def _roots(text: str, file: str) -> tuple[tuple[str, ...], list[str]] | None:
    """The classes at the root of a chain of attributes, and the names that follow."""
    parts = text.split(".")
    if "engine" in parts[:-1] and file in FILES:
        return ENGINE, parts[parts.index("engine") + 1 :]
    if file == "worker" and parts[:2] == ["self", "model_runner"] and len(parts) > 2:
        return RUNNERS, parts[2:]
    if file == "worker" and parts[0] == "self" and not parts[1].startswith(("prime_rl_", "_prime")):
        return WORKER, parts[1:]
    return None


def _resolve(wheel: Wheel, text: str, file: str) -> Iterator[tuple[str, str]]:
    """(class, attribute) of the last name of a chain. A config on the way is known by its name."""
    if not re.fullmatch(r"[\w.]+", text) or (root := _roots(text, file)) is None:
        return
    owners, names = root
    for name in names[:-1]:
        owner = wheel.config_classes.get(name.replace("_", "").lower())
        if owner is None:
            return
        owners = (owner,)
    for owner in owners:
        yield owner, names[-1]


def _arguments(owner: str, name: str, member: ast.AST, call: ast.Call) -> Iterator[str]:
    if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) or member.args.kwarg:
        return
    known = {each.arg for each in (*member.args.args, *member.args.kwonlyargs)}
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            yield f"{owner}.{name} has no argument {keyword.arg}"


def minor(version: str) -> tuple[int, int]:
    """(0, 33) of 0.33.0."""
    first, second, *_ = version.split(".")
    return int(first), int(second)


def newest_of_minors() -> list[str]:
    """The newest release of each minor version, newest first. Raises ``NoRegistry``."""
    found: dict[tuple[int, int], str] = {}
    for version in versions("vllm"):
        if re.fullmatch(r"[\d.]+", version):
            found.setdefault(minor(version), version)
    return [found[each] for each in sorted(found, reverse=True)]


def declared_range() -> tuple[tuple[int, int], tuple[int, int]]:
    """The oldest and the newest minor version that the plugin accepts."""
    match = BOUNDS.search((ROOT / INTERPRETER).read_text("utf-8"))
    assert match is not None, f"{INTERPRETER} has no OLDEST, NEWEST"
    numbers = [int(each) for each in match.groups()]
    return (numbers[0], numbers[1]), (numbers[2], numbers[3])


def requirement(oldest: tuple[int, int], newest: tuple[int, int]) -> str:
    """``vllm>=0.32,<0.34`` of (0, 32) and (0, 33)."""
    return f"vllm>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"


def write_range(oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Where the repository declares it."""
    for name in DECLARED:
        path = ROOT / name
        path.write_text(RANGE.sub(requirement(oldest, newest), path.read_text("utf-8")), "utf-8")
    path = ROOT / INTERPRETER
    bounds = f"OLDEST = {oldest}\nNEWEST = {newest}"
    path.write_text(BOUNDS.sub(bounds, path.read_text("utf-8")), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools.vllm_names", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the range that passes")
    parser.add_argument("--last", type=int, default=4, help="look at so many minor versions")
    args = parser.parse_args()

    results: list[tuple[str, list[str]]] = []
    for version in newest_of_minors()[: args.last]:
        lacking = problems(Wheel(sources("vllm", version)))
        results.append((version, lacking))
        print(f"vLLM {version}: {'passes' if not lacking else ''}")
        for each in lacking:
            print(f"    {each}")

    passing = [version for version, _ in takewhile(lambda result: not result[1], results)]
    if not passing:
        print("The newest version does not pass: fix the plugin first.")
        return 1
    span = minor(passing[-1]), minor(passing[0])
    print(f"range: {requirement(*span)}; declared: {requirement(*declared_range())}")
    if args.write:
        write_range(*span)
    return 0


if __name__ == "__main__":
    sys.exit(main())
