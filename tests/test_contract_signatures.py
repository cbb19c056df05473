"""The public contract, name by name, equals ``contract.txt``.

After a change that is meant:    python tests/test_contract_signatures.py

The checks of ``prime_rl.testing`` are the kit's, so this is no test of core alone.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pluggy import HookimplMarker

import prime_rl
import prime_rl.testing
from prime_rl.plugins.base import Offer
from prime_rl.registry.checks import CONTRACT_VERSION, SPECS
from prime_rl.registry.manager import GROUPS

GOLDEN = Path(__file__).parents[1] / "core/tests/contract/contract.txt"

WAY_OUT = f"""
The public contract differs from {GOLDEN.name}. Lines with + alone are additions (a new hook, an
optional argument of a hook, a field with a default): rewrite the file and note it in the
CHANGELOG. A line with - is a plugin that stops working: deprecate first
(prime_rl.registry.checks.DEPRECATED), remove with the next CONTRACT_VERSION. To write the file:

    python tests/test_contract_signatures.py
"""


def test_the_public_contract_matches_its_file() -> None:
    expected, found = GOLDEN.read_text().splitlines(), contract().splitlines()
    changes = list(difflib.unified_diff(expected, found, "promised", "found", lineterm="", n=0))
    assert not changes, "\n".join([WAY_OUT, *changes])


def test_every_public_name_is_pinned() -> None:
    """A name that the walk misses could change unnoticed."""
    text = GOLDEN.read_text()
    for module in (prime_rl, prime_rl.testing):
        names = [
            name
            for name, found in public(module)
            if not name.startswith("_") and not inspect.ismodule(found)
        ]
        missing = [name for name in names if f"\n{module.__name__}.{name}" not in text]
        assert missing == []
    assert [name for name in SPECS if f"\nhook {name}(" not in text] == []


def test_a_changed_signature_is_found(monkeypatch) -> None:
    before = contract()

    def next_example(self, env: int) -> tuple[int, int]: ...

    monkeypatch.setattr(prime_rl.Sampler, "next_example", next_example)
    (gone,) = set(before.splitlines()) - set(contract().splitlines())
    assert gone == "    next_example(self) -> tuple[int, int]"


# -- the contract as text --------------------------------------------------------------------------


def contract() -> str:
    """One line per name, one indented line per member."""
    lines = [f"contract version {CONTRACT_VERSION}", f"entry-point groups {', '.join(GROUPS)}", ""]
    lines += [f"hook {name}{signature(spec)}{async_mark(spec)}" for name, spec in SPECS.items()]
    for name, found in sorted(public_names()):
        lines += ["", *described(name, found)]
    return "\n".join(lines) + "\n"


def public(module: ModuleType) -> list[tuple[str, Any]]:
    """The names of a module and what they are; ``prime_rl`` imports each when it is asked for."""
    return [(name, getattr(module, name)) for name in dir(module)]


def public_names() -> Iterator[tuple[str, Any]]:
    yield "prime_rl.plugins.base.Offer", Offer
    for module in (prime_rl, prime_rl.testing):
        for name, found in public(module):
            if not name.startswith("_") and not inspect.ismodule(found):
                yield f"{module.__name__}.{name}", found


def described(name: str, found: Any) -> Iterator[str]:
    """A public name: a class with its members, a function, or a value."""
    if isinstance(found, type) and found.__module__ != "builtins":
        bases = ", ".join(base.__name__ for base in found.__bases__ if base is not object)
        keywords = is_dataclass(found) and all(each.kw_only for each in fields(found))
        yield f"{name} is a class ({bases})" + (" of keywords only" if keywords else "")
        yield from (f"    {line}" for line in members(found))
    elif inspect.isroutine(found):
        yield f"{name}{signature(found)}"
    elif isinstance(found, Mapping):
        yield f"{name} = {sorted(found)}"
    elif isinstance(found, HookimplMarker):
        yield f"{name}{signature(found.__call__)}"
    else:
        yield f"{name} = {found!r}"


def members(cls: type) -> Iterator[str]:
    """Fields, class attributes and methods that a class defines itself."""
    default = {f.name: default_of(f) for f in fields(cls)} if is_dataclass(cls) else {}
    for name, kind in inspect.get_annotations(cls).items():
        given = default.get(name, "") if default else class_default(cls, name)
        if not name.startswith("_"):
            yield f"{name}: {kind if isinstance(kind, str) else kind.__name__}{given}"
    for name, found in vars(cls).items():
        own = name == "__init__" and not is_dataclass(cls) and not is_protocol(cls)
        if name in default or (name.startswith("_") and not own and name != "__call__"):
            continue
        if isinstance(found, classmethod | staticmethod):
            kind = type(found).__name__
            yield f"{name} ({kind}){signature(found.__func__)}"
        elif isinstance(found, property):
            yield f"{name} (property){signature(found.fget)}"
        elif inspect.isroutine(found):
            yield f"{name}{signature(found)}{async_mark(found)}"


def async_mark(function: Any) -> str:
    return " (async)" if inspect.iscoroutinefunction(function) else ""


def is_protocol(cls: type) -> bool:
    return getattr(cls, "_is_protocol", False)


def default_of(field: Any) -> str:
    if field.default is not MISSING:
        return " = ..." if callable(field.default) else f" = {field.default!r}"
    return "" if field.default_factory is MISSING else f" = {field.default_factory.__name__}()"


def class_default(cls: type, name: str) -> str:
    """A default of a class attribute, or of a pydantic field."""
    info = getattr(cls, "model_fields", {}).get(name)
    if info is not None:
        return "" if info.is_required() else f" = {info.default!r}"
    found = vars(cls).get(name, MISSING)
    if found is MISSING:
        return ""
    if isinstance(found, frozenset):
        return f" = {sorted(found)}"
    return f" = {found.__name__ if isinstance(found, type) else repr(found)}"


def signature(function: Any) -> str:
    """As written, without quotes; the default of a function is ``...``."""
    found = inspect.signature(function)
    plain = [
        each.replace(default=...)
        if callable(each.default) and each.default is not each.empty
        else each
        for each in found.parameters.values()
    ]
    text = str(found.replace(parameters=plain)).replace("'", "")
    return text.replace("Ellipsis", "...")


if __name__ == "__main__":
    GOLDEN.write_text(contract())
    print(f"wrote {GOLDEN}")
