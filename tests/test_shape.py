"""The size of the code: what issue 14 promises for core holds for every package that ships."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core/src/prime_rl"
SHIPPED = [
    file
    for folder in ("core", "prime_rl_*", "plugins/prime_rl_*", ".")
    for file in sorted(ROOT.glob(f"{folder}/src/**/*.py"))
]

MOST_LINES_OF_CORE = 18_000
MOST_LINES_OF_THE_LOOP = 200
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_ARGUMENTS = 7


def num_lines(file):
    return len(file.read_text().splitlines())


def nodes(kind):
    """The syntax nodes of a kind, each with its place."""
    for file in SHIPPED:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kind):
                yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_core_is_small():
    total = sum(num_lines(file) for file in CORE.rglob("*.py"))
    assert total <= MOST_LINES_OF_CORE


def test_the_loop_fits_a_few_screens():
    assert num_lines(CORE / "orchestrator/loop.py") <= MOST_LINES_OF_THE_LOOP


def test_no_file_is_long():
    assert CORE / "rollout.py" in SHIPPED
    sizes = {str(file.relative_to(ROOT)): num_lines(file) for file in SHIPPED}
    assert {file: size for file, size in sizes.items() if size > MOST_LINES_OF_A_FILE} == {}


def test_no_function_is_long():
    functions = nodes((ast.FunctionDef, ast.AsyncFunctionDef))
    sizes = {place: node.end_lineno - node.lineno + 1 for place, node in functions}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FUNCTION} == {}


def test_no_constructor_has_many_arguments():
    """Records (dataclasses) are not limited: their fields are data, named at each use."""
    found = {}
    for place, node in nodes(ast.ClassDef):
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                given = method.args
                found[place] = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
    assert {place: number for place, number in found.items() if number > MOST_ARGUMENTS} == {}


@pytest.mark.parametrize(
    "word", ["sampler", "rollout", "algorithm", "filters", "packer", "wire", "trainer", "weights"]
)
def test_the_loop_names_the_words_of_the_flow(word):
    assert word in (CORE / "orchestrator/loop.py").read_text()
