"""Core names no plugin: names come from the TOML of a run and from the installed defaults."""

import ast
from importlib.metadata import entry_points
from pathlib import Path

from prime_rl.registry.manager import GROUPS, load_plugins
from prime_rl.registry.offers import KINDS, OBSERVER, collect

CORE = Path(__file__).parents[1] / "core/src/prime_rl"

OTHER_MEANINGS = {
    ("config/contract.py", "lora"),  # part of a key of an engine's request
    ("config/orchestrator.py", "auto"),  # env_workers
    ("config/trainer.py", "auto"),  # attention, device, fused_lm_head
    ("trainer/device.py", "auto"),
    ("trainer/model.py", "auto"),  # trainer.compile
    ("trainer/state.py", "auto"),
    ("trainer/self_check.py", "default"),  # a stance of torch.compiler
    ("registry/offers.py", "auto"),
    ("trainer/loop.py", "disk"),  # what the trainer waits for
    ("trainer/metrics.py", "values"),  # one of the ways in which a metric is reduced
    ("trainer/parallel.py", "gloo"),  # the process group of torch
}
"""Words of core that happen to be the name of a plugin's class, by file."""


def names_of_plugins():
    """What plugins outside core and the application offer, and what index packages know of."""
    own = ("prime-rl-core", "prime-rl-app")
    offered = {
        name
        for group in GROUPS
        for kind in KINDS
        for name, each in collect(load_plugins(group), kind).items()
        if each.source.distribution not in own
    }
    known = (
        entry.name.split(".", 1)
        for entry in entry_points(group="prime_rl.known")
        if entry.value.replace("_", "-") not in own
    )
    return offered | {name for kind, name in known if kind not in ("command", "key")}


def constants(file):
    """The strings of a file's code, without docstrings and docs of fields."""
    tree = ast.parse(file.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    }


def test_no_string_of_core_is_the_name_of_a_plugin():
    names = names_of_plugins()
    assert {"grpo", "embedded", "zero_advantage", "in-process", "vllm", "auto"} <= names
    found = {
        (str(file.relative_to(CORE)), word)
        for file in CORE.rglob("*.py")
        for word in constants(file) & names
    }
    assert found == OTHER_MEANINGS


def test_every_name_of_the_index_is_offered_under_it():
    """Checked against what is installed here: a misspelt index entry names no package."""
    offered = {
        (kind.name, name): each.source.distribution
        for group in GROUPS
        for kind in KINDS
        for name, each in collect(load_plugins(group), kind).items()
    }
    for each in collect(load_plugins(), OBSERVER).values():
        offered |= {("key", key): each.source.distribution for key in each.cls.reads}
    for entry in entry_points(group="prime_rl.known"):
        kind, name = entry.name.split(".", 1)
        if kind not in ("command", "harness"):
            assert offered[kind, name] == entry.value.replace("_", "-")
