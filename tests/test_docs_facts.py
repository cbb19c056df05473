"""What pages count and list, compared with the code and with a real run."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import warm
from tools.docs import config_page
from tools.docs.config_examples import example
from tools.docs.packages_page import _commands, _offers, _projects
from typer.testing import CliRunner
from waiting import LIMIT

from prime_rl import Launcher, LossInputs
from prime_rl.plugins import hookspecs
from prime_rl.registry.manager import GROUPS
from prime_rl.registry.offers import KINDS
from prime_rl_app.cli.app import app
from prime_rl_devkit.facts import inventory
from prime_rl_devkit.scaffold.names import ENVIRONMENT
from prime_rl_devkit.scaffold.names import KINDS as NEW

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("plugins/*/README.md"),
    ]
)

# -- counts --------------------------------------------------------------------------------------

WORDS = (
    *("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
)
NUMBER = rf"(?:\d+|{'|'.join(WORDS[1:])})"
COUNTED = (
    r"(?:checks|hooks|kinds|packages|distributions|losses|commands|routes|metrics|recipes|promises"
    r"|methods|launchers|floors|exceptions|rules|optimizers|verdicts|scopes|hookspecs|renderers"
    r"|samplers|monitors|observers|entry points|entry-point groups|algorithms|environments|places)"
)
COUNT = re.compile(rf"\b({NUMBER})((?: [a-z-]+)? \[?{COUNTED})\b", re.IGNORECASE)


def mixed() -> dict[str, int]:
    """Algorithms and environments of the config that mixes them."""
    table = tomllib.loads((ROOT / "configs/mixed.toml").read_text("utf-8"))
    envs = table["orchestrator"]["train"]["env"]
    default = table["orchestrator"].get("algo", {}).get("type", "grpo")
    algorithms = {env.get("algo", {}).get("type", default) for env in envs}
    return {"algorithms": len(algorithms), "environments": len(envs)}


def numbered(page: str, heading: str) -> int:
    """Entries of the first numbered list after a text of a page."""
    rest = (ROOT / page).read_text("utf-8").partition(heading)[2]
    return max(int(number) for number in re.findall(r"^(\d+)\. ", rest.partition("\n## ")[0], re.M))


def rows_after(page: str, text: str) -> int:
    """Rows of the table after a text."""
    rest = (ROOT / page).read_text("utf-8").partition(text)[2].partition("\n\n")[2]
    return len(rest.partition("\n\n")[0].splitlines()) - 2


COUNTS: dict[tuple[str, str], Callable[[], int]] = {
    ("README.md", "four algorithms"): lambda: mixed()["algorithms"],
    ("README.md", "four environments"): lambda: mixed()["environments"],
    ("docs/algorithms.md", "four environments"): lambda: mixed()["environments"],
    ("docs/map.md", "Three floors"): lambda: rows_after("docs/map.md", "## Three floors"),
    ("docs/map.md", "seven places"): lambda: numbered("docs/map.md", "relies on this in"),
    ("docs/hooks.md", "Five rules"): lambda: len(
        re.findall(r"^\* ", str(hookspecs.__doc__).partition("Five rules")[2], re.M)
    ),
    ("docs/multi-node.md", "five methods"): lambda: sum(
        callable(getattr(Launcher, name)) and not name.startswith("_")
        for name in vars(Launcher)
        if name not in ("config_class", "started")
    ),
    ("docs/deployment.md", "Three metrics"): lambda: len(
        re.findall(
            r"`[a-z_]+/[a-z_/]+`",
            (ROOT / "docs/deployment.md")
            .read_text("utf-8")
            .partition("Three metrics")[2]
            .partition("\n\n")[0],
        )
    ),
}
"""What a page counts, with where the number comes from."""


def counts_shown() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
        for match in COUNT.finditer(text.replace("\n", " ")):
            yield str(page.relative_to(ROOT)), match[0].replace("[", "")


def test_every_number_of_things_of_the_code_has_a_source() -> None:
    """Two and one are words of sentences, and counts in a range are."""
    shown = {each for each in counts_shown() if not re.match(r"(?i)(one|two|1|2)\b", each[1])}
    assert shown - set(COUNTS) == set(), "leave the number out, or give it a source in COUNTS"
    assert set(COUNTS) - shown == set(), "no page has these any more"


@pytest.mark.parametrize(("page", "shown"), COUNTS, ids=lambda each: str(each))
def test_a_number_on_a_page_is_that_of_the_code(page: str, shown: str) -> None:
    word = shown.split()[0].lower()
    number = int(word) if word.isdigit() else WORDS.index(word)
    assert number == COUNTS[page, shown]()


def test_both_groups_of_entry_points_are_explained() -> None:
    assert len(GROUPS) == 2 and "## Two groups, two processes" in (
        ROOT / "docs/plugins.md"
    ).read_text("utf-8")


def test_the_first_six_fields_of_a_losss_inputs_are_always_there() -> None:
    """``docs/api.md`` and the docstring of ``LossInputs`` say six."""
    has_default = [
        field.default is not MISSING or field.default_factory is not MISSING
        for field in fields(LossInputs)
    ]
    assert has_default.index(True) == 6
    assert all(has_default[6:])


# -- lists ---------------------------------------------------------------------------------------


def test_the_readme_of_each_distribution_names_what_it_offers() -> None:
    """Renderers excepted: those of another package, more than thirty."""
    plugins = inventory()
    commands = [*_commands()]
    missing = list[str]()
    for folder, settings in _projects():
        readme = folder / "README.md"
        text = readme.read_text("utf-8")
        for offered in _offers(settings["name"], plugins, commands):
            kind, *names = re.split(r" ?`(?:, )?`?", offered)
            if kind != "renderers" and folder != ROOT:
                missing += [
                    f"{settings['name']}: {kind} {name}"
                    for name in names
                    if name and not re.search(rf"[`\" ]{re.escape(name)}[`\" ]", text)
                ]

    assert missing == []


def test_the_kinds_of_a_new_plugin_and_the_commands_are_listed_whole() -> None:
    """In the help of ``plugins new``, and at the top of docs/plugins.md."""
    kinds = [*NEW, ENVIRONMENT]
    said = CliRunner().invoke(app, ["plugins", "new", "--help"], env={"COLUMNS": "400"}).output
    (listed,) = re.findall(r"(algorithm, filter[\w, ]+); several", said)
    assert re.split(", | or ", listed) == kinds
    page = (ROOT / "docs/plugins.md").read_text("utf-8")
    (block,) = re.findall(r"^```text\n(prime-rl plugins new.*?)```", page, re.DOTALL | re.MULTILINE)
    (shown,) = re.findall(r"--kind ([\w|]+)\]", block)
    assert shown.split("|") == kinds
    said = CliRunner().invoke(app, ["plugins", "--help"], env={"COLUMNS": "200"}).output
    commands = re.findall(r"^│ (\w+) +\w", said, re.MULTILINE)
    assert {*commands} == {*re.findall(r"^prime-rl plugins (\w+)", block, re.MULTILINE)}


def test_contributing_lists_every_target_of_the_makefile() -> None:
    """``setup`` and ``run`` are explained above the table."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    named = set(re.findall(r"`make ([\w-]+)", rows))
    assert {*targets.split()} - named == {"setup", "run"}
    assert named <= {*targets.split()}


def test_the_index_names_what_each_distribution_offers() -> None:
    """`plugins list` shows it, and errors name the package to install. Renderers excepted, as
    above. Harnesses are no classes of ours."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    known = project["entry-points"]["prime_rl.known"]
    offers = {
        f"{kind.name}.{name}": row["distribution"]
        for row in inventory()
        for kind in KINDS
        for name in row["offers"].get(kind.plural, ())
        if kind.name != "renderer"
    }
    offers |= {f"command.{name.replace(' ', '.')}": package for name, package in _commands()}
    assert {name: package.replace("-", "_") for name, package in offers.items()}.items() <= (
        known.items()
    )
    others = {name for name in known.keys() - offers.keys() if "renderer." not in name}
    assert {name.partition(".")[0] for name in others} == {"harness"}


# -- the examples of docs/config.md ---------------------------------------------------------------


def test_every_key_of_the_config_has_an_example() -> None:
    """A key whose value is a table has that table's block instead."""
    page = (ROOT / "docs/config.md").read_text("utf-8")
    shown = set[str]()
    for block in re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        table = ""
        for line in block.splitlines():
            if header := re.fullmatch(r"\[+(.+?)\]+", line):
                table = header[1].replace(".mine", ".<name>")
            elif key := re.match(r"(?:# )?(\w+) = ", line):
                shown.add(f"{table}.{key[1]}".lstrip("."))

    rows = [*rows_of_the_config()]
    assert len(rows) > 300
    assert [key for key, is_table in rows if not is_table and key not in shown] == []


@pytest.mark.slow
def test_the_examples_of_plugins_are_settings_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package").mkdir()  # what a loss of one's own names
    (tmp_path / "my_package/losses.py").write_text("def clipped(inputs, clip): ...\n")
    monkeypatch.chdir(tmp_path)
    ours = config_page._documented()
    for kind in KINDS:
        for name, offered in config_page._offers(kind).items():
            if ours is not None and offered.source.distribution not in ours:
                continue
            model = offered.cls.config_class
            selected = config_page.TABLES[kind.name].format(name)
            block = example(selected, model.model_json_schema(), {})
            table: Any = tomllib.loads(block.removeprefix("```toml").removesuffix("```"))
            for key in re.findall(r"[\w-]+", selected.partition("]")[0]):
                table = table.get(key, {})
                table = table[0] if isinstance(table, list) else table
            own = {key: value for key, value in table.items() if key in model.model_fields}
            required = {
                key
                for key, field in model.model_fields.items()
                if field.is_required() and key not in own
            }
            if not required:  # of a table of its own
                model.model_validate(own)


# -- keys and code -------------------------------------------------------------------------------


def rows_of_the_config() -> Iterator[tuple[str, bool]]:
    """``table.key`` of every row of the generated page, and whether its value is a table. A table
    in several places counts under the first."""
    table = ""
    outer = ""
    for line in (ROOT / "docs/config.md").read_text("utf-8").splitlines():
        named = re.findall(r"\[+([\w.<>-]+)\]+", line)
        if line.startswith("## "):
            table = named[0] if named else ""
        elif re.match(r"`\[.*`, from ", line):
            outer = table = named[0]
        elif line.startswith("Its table"):
            table = f"{outer}.{named[0]}"
        elif row := re.match(r"\| `(\w+)` \| ([^|]*)\|", line):
            yield f"{table}.{row[1]}".lstrip("."), "table" in row[2]


def keys_of_the_config() -> Iterator[str]:
    """Every key and table, at each place that a table may have."""
    places = dict[str, list[str]]()
    for line in (ROOT / "docs/config.md").read_text("utf-8").splitlines():
        named = re.findall(r"\[+([\w.<>-]+)\]+", line)
        if line.startswith("## ") and named:
            first = named[0]
            places[first] = [first]
        elif line.startswith("Also "):
            places[first] += named

    for key, _ in rows_of_the_config():
        table, _, name = key.rpartition(".")
        for place in places.get(table, [table]):
            yield place
            yield f"{place}.{name}".lstrip(".")


NO_KEYS = {
    *("run.weights", "run.metrics", "run.step"),  # of Python
    "trainer.save_model",  # of TRL
    "model.safetensors",  # a file
}


def test_dotted_keys_in_the_docs_are_keys_of_the_config() -> None:
    """In ``migrating.md`` the first column has keys of upstream and of earlier versions."""
    known = set(keys_of_the_config())
    pattern = re.compile(
        "|".join(re.escape(key).replace("<name>", "[^.]+") for key in known if key)
    )
    tops = {key.partition(".")[0] for key in known}
    wrong = [
        f"{page.relative_to(ROOT)}: {key}"
        for page in PAGES
        if page.name != "migrating.md"
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)`", page.read_text("utf-8"))
        if key.partition(".")[0] in tops
        and not pattern.fullmatch(key)
        and key not in NO_KEYS
        and not re.search(r"\.(?:py|toml|jsonl?|md|png|html|log)$", key)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_that_is_not_run_imports_names_that_exist(page: Path) -> None:
    """``py`` blocks show what cannot run here: another library, an engine of the reader's own."""
    for block in re.findall(
        r"^```py\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    ):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prime_rl"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_in_the_docs_parses(page: Path) -> None:
    text = page.read_text("utf-8")
    for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


# -- the first questions ---------------------------------------------------------------------------

QUESTIONS = {
    "Which GPU does my model need": ("recipes.md", "GPU"),
    "How do I train on my data": ("python.md#prompts-and-a-reward", "JSONL"),
    "How do I use my own reward": ("first-environment.md#2-a-reward-to-learn-from", "reward"),
    "How do I train an agent that I have": ("first-environment.md#4-further", "agents"),
    "How do I use my own model": ("model-families.md", "families"),
    "How do I train with LoRA": ("scaling.md#lora", "rank"),
    "How long does it take": ("observability.md#the-live-view", "left"),
    "What does the curve mean": ("learning-problems.md", "held-out"),
    "How do I resume": ("recovery.md", "checkpoint"),
    "How do I use the result": ("observability.md#evaluate-without-a-run", "serve"),
}
"""What a newcomer asks first: the page with the rest of the answer, and a word that is there."""


def section_of(page: str, anchor: str) -> str:
    """The text below the heading that an anchor names, or the whole page."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    if not anchor:
        return text
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        title = part.partition("\n")[0].lstrip("# ").lower()
        if re.sub(r"[^\w\- ]", "", title).replace(" ", "-") == anchor:
            return part
    raise AssertionError(f"{page} has no heading #{anchor}")


def links_in(text: str) -> set[str]:
    return set(re.findall(r"\]\(([^)\s]+)\)", text))


def test_the_index_links_to_the_first_questions() -> None:
    assert "questions.md" in links_in((ROOT / "docs/index.md").read_text("utf-8"))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_first_question_is_answered_two_clicks_from_the_index(question: str) -> None:
    target, word = QUESTIONS[question]
    page = (ROOT / "docs/questions.md").read_text("utf-8")
    (answer,) = (part for part in page.split("\n## ") if part.startswith(f"{question}?"))
    assert target in links_in(answer)
    assert word.lower() in section_of(*target.partition("#")[::2]).lower()


# -- a real run ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Path:
    """Four steps with evaluations and two checkpoints."""
    folder = tmp_path_factory.mktemp("facts")
    command = [
        *(sys.executable, "-c", "from prime_rl_app.cli import main; main()"),
        *("run", str(ROOT / "configs/reverse_text/grpo.toml"), "--max-steps", "4"),
        *("--model.warmup_exact", "0.15", "--orchestrator.batch_size", "8"),
        *("--orchestrator.group_size", "4", "--ckpt.interval", "2"),
        *("--output-dir", str(folder), "--run.name", "run"),
    ]
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache)}
    done = warm.run(command, env=env, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


LABELS = ("A", "ENV", "NAME", "N", "K", "R", "V", "KIND", "SLOT", "STAGE", "TERM")
LABELS += ("COMPONENT", "PLUGIN")


def pattern_of(name: str) -> str:
    """A name of a page as a regular expression: ``LABELS`` stand for anything."""
    tokens = re.findall(r"\.\.\.|[A-Z]+(?![a-z])|[{},]|[^{},A-Z.]+|.", name)
    special = {"{": "(?:", "}": ")", ",": "|", "...": ".*", "*": ".*"}
    return "".join(
        special.get(token) or (".+" if token in LABELS else re.escape(token)) for token in tokens
    )


def names_listed() -> list[str]:
    table = (ROOT / "docs/metrics.md").read_text("utf-8").partition("| names | what |")[2]
    return re.findall(
        r"`([^`]+)`", "\n".join(row.split("|")[1] for row in table.split("\n")[2:] if row)
    )


def sources() -> list[Path]:
    folders = ("core/src", "app/src", "plugins/*/src", "prime_rl_*/src")
    return sorted(file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py"))


def test_no_row_is_about_a_metric_that_nothing_writes() -> None:
    """Every word of a name stands in the code; of a composed name, each of its two halves does."""
    known = set(re.findall(r"[a-z0-9_]+", "".join(file.read_text("utf-8") for file in sources())))
    known |= {part.strip("_") for part in known} | {word.partition("_")[0] for word in known}

    def is_written(word: str) -> bool:
        parts = word.strip("_").split("_")
        halves = [("_".join(parts[:cut]), "_".join(parts[cut:])) for cut in range(1, len(parts))]
        return word.strip("_") in known or any(known.issuperset(pair) for pair in halves)

    unknown = []
    for line in (ROOT / "docs/metrics.md").read_text("utf-8").splitlines():
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line[:3] == "| `" else ():
            words = re.findall(r"(?<![A-Za-z0-9_])[a-z][a-z0-9_]{3,}(?![A-Z])", name)
            unknown += [f"{name}: {word}" for word in words if not is_written(word)]

    assert unknown == []


def alternatives(name: str) -> list[str]:
    """The names that braces stand for."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if braces is None:
        return [name]
    before, after = name[: braces.start()], name[braces.end() :]
    return [
        each
        for part in braces[1].split(",")
        for each in alternatives(f"{before}{part.strip()}{after}")
    ]


def metrics_named() -> Iterator[tuple[str, str]]:
    """Where a page or a docstring has the name of a metric in backticks, and the name. Not: the
    names of upstream, in the first column of their table."""
    groups = {part.partition("/")[0] for name in names_listed() for part in alternatives(name)}
    for path in [*PAGES, *sources()]:
        text = path.read_text("utf-8").partition("## Metrics with other names upstream")[0]
        for span in re.findall(r"(?<!`)`{1,2}([a-z_]+/[^`\s]+)`", text):
            is_file = re.search(r"/$|\.(?:[a-z]+|\.)$", span) and not span.endswith("...")
            if span.partition("/")[0] in groups and not is_file:
                for name in alternatives(span):
                    yield str(path.relative_to(ROOT)), re.sub(r"<\w+>", "NAME", name)


NO_METRICS = {
    "tokens/s",  # a unit
    *("wait/PROCESS/REASON", "eval/ENV/NAME", "tokens/NAME"),  # forms of names
    *("train/A/all", "train/A/effective", "eval/ENV"),  # what names begin with
    *("train/LABEL", "eval/LABEL"),  # places of an env in the config
    "past/step_N",  # a folder
}


def test_a_metric_that_a_page_or_docstring_names_has_a_row() -> None:
    """An ending ``...`` stands for the names that begin so."""
    rows = [each for name in names_listed() for each in alternatives(name)]
    full = re.compile("|".join(map(pattern_of, rows)))
    named = [*metrics_named()]
    wrong = [
        f"{where}: {name}"
        for where, name in named
        if name not in NO_METRICS
        and not full.fullmatch(name)
        and not (name.endswith("...") and any(begins(row, name[:-3]) for row in rows))
    ]

    assert len(named) > 200
    assert wrong == []


def begins(row: str, beginning: str) -> bool:
    """Whether a row's name begins so, part by part."""
    parts = row.split("/")
    words = beginning.rstrip("/").split("/")
    return len(words) <= len(parts) and all(
        re.fullmatch(pattern_of(part), word) or (word == words[-1] and part.startswith(word))
        for part, word in zip(parts, words, strict=False)
    )


@pytest.mark.slow
def test_every_metric_of_a_run_has_a_row(run_dir: Path) -> None:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    columns = {name for line in lines for name in line} - {"step", "time"}
    assert len(columns) > 500
    listed = re.compile("|".join(map(pattern_of, names_listed())))
    assert [name for name in sorted(columns) if not listed.fullmatch(name)] == []


@pytest.mark.slow
def test_the_metrics_to_read_are_there(run_dir: Path) -> None:
    """Each name of the tables above the list, in a run of one env."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text("utf-8").splitlines())
    columns = {name for line in lines for name in line}
    text = (ROOT / "docs/metrics.md").read_text("utf-8").partition("## All metrics")[0]
    cells = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(cells) == 20
    for name in names:
        assert any(re.fullmatch(pattern_of(name), column) for column in columns), name


@pytest.mark.slow
def test_every_file_of_a_run_is_documented(run_dir: Path) -> None:
    text = (ROOT / "docs/run-directory.md").read_text("utf-8")
    listed = [
        re.sub(r"_1$", "_N", name)
        for row in re.findall(r"^\| `.*$", text, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]

    def is_listed(name: str) -> bool:
        return any(
            re.fullmatch(pattern_of(each) + ("/?.*" if each.endswith("/") else ""), name)
            for each in listed
        )

    found = [str(path.relative_to(run_dir)) for path in sorted(run_dir.rglob("*"))]
    files = [name for name in found if not (run_dir / name).is_dir()]
    assert [re.sub(r"attempt_\d", "attempt_N", name) for name in files if not is_listed(name)] == []
