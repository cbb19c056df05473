"""The docs say what the code does: pages are fresh, examples run, commands parse, links resolve."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from pydantic import BaseModel
from tools.docs.__main__ import main as docs_main
from tools.docs.__main__ import outdated
from tools.docs.config_page import TABLES, tables_of
from tools.docs.hooks_page import hooks_page
from typer.testing import CliRunner
from waiting import LIMIT

from prime_rl import (
    CONTRACT_VERSION,
    Algorithm,
    EngineLaunch,
    FrozenModel,
    Group,
    PluginConfig,
    Rollout,
    hookimpl,
)
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError
from prime_rl.registry.checks import SPECS
from prime_rl.registry.manager import Hooks
from prime_rl.registry.offers import ALGORITHM, KINDS, collect
from prime_rl.rundir.directory import SUBFOLDERS
from prime_rl.testing import CHECKS, FakeHost, make_group, score
from prime_rl_app.cli import main
from prime_rl_app.cli.app import app
from prime_rl_app.config import build_config, fitted, load_config, merge, read_toml
from prime_rl_app.errors import explained
from prime_rl_app.resolve import check
from prime_rl_broadcast.connection import Member, header_of
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_devkit.verdicts import promise_of
from prime_rl_engine_kit.requests import GenerateBody, GenerateSampling, UpdateBody

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FOLLOWED = {
    *("tutorial-algorithm.md", "migrating.md", "first-environment.md", "agents.md", "AGENTS.md"),
    *("sft.md", "gateway.md", "several-agents.md"),
}
"""Pages whose blocks are executed in order by ``test_tutorial.py``, ``test_sft.py`` and
``test_gateway_run.py``, not one by one here."""
READMES = sorted([*ROOT.glob("*/README.md"), *ROOT.glob("plugins/*/README.md")])
CONFIGS = sorted((ROOT / "configs").glob("**/*.toml"))


def named(path: Path) -> str:
    """A path as pytest shows it."""
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str, mark: str = "") -> list[str]:
    """Fenced code of one language; with a mark, only what follows that comment."""
    before = re.escape(f"<!-- {mark} -->\n") if mark else ""
    return re.findall(
        rf"^{before}```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE
    )


def commands() -> Iterator[list[str]]:
    """The arguments of every ``prime-rl`` command that a console block shows."""
    for page in dict.fromkeys([*PAGES, *READMES]):
        for block in [] if page.name in FOLLOWED else blocks(page, "console"):
            for line in block.splitlines():
                name, _, arguments = line.strip().removeprefix("$ ").partition(" ")
                if name.rpartition("/")[2] == "prime-rl":
                    yield arguments.split()


# -- generated pages -----------------------------------------------------------------------------


def test_generated_pages_say_what_the_code_says() -> None:
    assert outdated(ROOT / "docs") == [], "run: make docs"


@pytest.mark.slow
def test_a_page_that_differs_is_named_with_the_command_that_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docs_main([str(tmp_path)]) == 0
    assert docs_main(["--check", str(tmp_path)]) == 0
    (tmp_path / "hooks.md").write_text("# Hooks\n")
    assert docs_main(["--check", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "hooks.md differs from the code" in said
    assert "python -m tools.docs" in said
    assert "config.md" not in said


def test_every_hook_is_documented_with_a_section_of_its_own() -> None:
    headings = re.findall(r"^### `(\w+)`$", hooks_page(), re.MULTILINE)
    assert sorted(headings) == sorted(SPECS)
    assert [name for name, spec in SPECS.items() if not (spec.__doc__ or "").strip()] == []


def test_every_key_of_the_config_is_documented() -> None:
    """A table is documented by its own section; every other key by the string under its field."""
    schema = RunConfig.model_json_schema()
    models = {**schema["$defs"], "RunConfig": schema}
    silent = [
        f"{name}.{key}"
        for name in tables_of(schema)
        for key, prop in models[name].get("properties", {}).items()
        if not prop.get("description") and "$ref" not in prop and "items" not in prop
    ]
    assert silent == []


def test_every_kind_of_offer_has_a_table_its_settings_are_documented_under() -> None:
    assert sorted(TABLES) == sorted(kind.name for kind in KINDS)


def test_every_setting_of_every_model_is_a_row_of_the_config_page() -> None:
    """Counted without the generator: fields of pydantic models, counted here again."""
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    for model in _models(RunConfig):
        assert set(model.model_fields) <= set(rows), model.__name__


def test_every_key_of_the_config_page_has_a_description() -> None:
    rows = re.findall(r"^\| `.*\|$", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    assert len(rows) > 350
    assert [row for row in rows if len(row.split("|")[-2].split()) < 2] == []


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for info in model.model_fields.values():
        for found in _models_in(info.annotation):
            yield from _models(found)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)


# -- configs and commands ------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether vLLM's own environment is here already, the package with the pretrained model, or a
    data set of the hub, does not matter to a page or a config."""
    monkeypatch.setattr("prime_rl_vllm.check_interpreter", lambda python: None)
    monkeypatch.setattr("prime_rl_vllm.check_nixl", lambda python: None)
    monkeypatch.setattr("prime_rl_app.sft._num_rows", lambda sft: 640)
    monkeypatch.setattr("prime_rl_smollm2.convert.locate", lambda: Path("smollm2.gguf"))


def files_of(path: Path) -> list[Path]:
    """What a command names to run it: those of ``configs/algorithms`` are laid over another."""
    laid = path.parent.name == "algorithms"
    return [*([ROOT / "configs/reverse_text/grpo.toml"] if laid else []), path]


@pytest.mark.parametrize("path", CONFIGS, ids=named)
def test_every_shipped_config_loads_and_fits_the_installed_plugins(path: Path) -> None:
    check(load_config(files_of(path)))


def test_a_file_that_is_laid_over_another_names_its_command() -> None:
    for path in (ROOT / "configs/algorithms").glob("*.toml"):
        base, part = (each.relative_to(ROOT) for each in files_of(path))
        command = f"prime-rl run {base} {part}"
        assert f"# Laid over another file: {command}\n" in path.read_text()

        alone = ["run", str(path), "--dry-run"]
        with pytest.raises(ConfigError) as refused:
            load_config([path])
        assert explained(str(refused.value), alone).endswith(f"over a whole one. Write: {command}")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs/algorithms").glob("*.toml")), ids=lambda path: path.stem
)
def test_a_file_that_is_laid_over_another_passes_a_dry_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that it names; ``--quick``, because all have the env of the first run."""
    monkeypatch.chdir(ROOT)
    named_files = [str(each.relative_to(ROOT)) for each in files_of(path)]
    words = ["prime-rl", "run", *named_files, "--dry-run", "--quick"]
    monkeypatch.setattr("sys.argv", [*words, "--output-dir", str(tmp_path)])
    with suppress(SystemExit):
        main()
    shown = capsys.readouterr()
    assert shown.out.startswith("valid; the resolved config is"), shown.err


@pytest.mark.parametrize("path", CONFIGS, ids=named)
def test_every_shipped_config_can_be_run_for_six_steps(path: Path) -> None:
    config, _ = fitted(load_config(files_of(path), ["--max-steps", "6"]))
    config.trainer.scheduler.fitted(6).check(config.trainer.optim.lr, 6)


def test_configs_are_shipped() -> None:
    assert ROOT / "configs" / "reverse_text" / "grpo.toml" in CONFIGS


def measured(arguments: list[str]) -> Any:
    """``plan`` measures a model, in a process that imports transformers."""
    marks = [pytest.mark.slow] if arguments[0] == "plan" else []
    return pytest.param(arguments, id=" ".join(arguments), marks=marks)


UNIQUE = {" ".join(arguments): arguments for arguments in commands()}


@pytest.mark.parametrize("arguments", map(measured, UNIQUE.values()))
def test_every_command_in_the_docs_parses(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training commands are run up to their first process: with ``--dry-run``."""
    monkeypatch.chdir(ROOT)
    if arguments[0] == "run" and "--help" not in arguments:
        arguments = [*arguments, "--output-dir", str(tmp_path)]
        arguments += [each for each in ("--dry-run", "--quick") if each not in arguments]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output or result.exception


def test_the_docs_show_commands() -> None:
    shown = [" ".join(arguments) for arguments in commands()]
    assert "plugins list" in shown
    assert any(line.startswith("run configs/") for line in shown)


def test_make_targets_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rules = re.findall(r"^(\w[\w -]*):(?!=)", makefile, re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for page in PAGES:
        shown = set(re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.MULTILINE))
        assert shown <= targets, page


# -- examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_in_the_docs_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked blocks in their order, as one module; then the tests among them."""
    module = ModuleType("my_rloo")
    monkeypatch.setitem(sys.modules, "my_rloo", module)
    names: dict[str, Any] = vars(module)
    for block in blocks(page, "python", mark="tested"):
        exec(compile(block, str(page), "exec"), names)
    for name, function in list(names.items()):
        if name.startswith("test_"):
            function()


def test_the_readme_shows_an_algorithm_that_is_accepted_and_offered() -> None:
    algorithm, tests = blocks(ROOT / "README.md", "python", mark="tested")
    module = ModuleType("my_rloo")
    exec(algorithm, vars(module))
    hooks = Hooks()
    hooks.register(module, "rloo")
    offered = collect(hooks, ALGORITHM)["rloo"].cls
    assert offered.action_loss == "rl"
    assert "def test_" in tests


def test_python_in_the_docs_is_marked_as_tested() -> None:
    for page in PAGES:
        if page.name != "hooks.md":  # signatures
            assert len(blocks(page, "python")) == len(blocks(page, "python", mark="tested")), page


def test_the_wrapper_in_the_docs_acts_after_an_async_algorithm() -> None:
    names: dict[str, Any] = {}
    (wrapper,) = (b for b in blocks(ROOT / "docs/plugins.md", "python") if "Halve" in b)
    exec(wrapper, names)

    class Halved:
        score_group = staticmethod(names["score_group"])

    class Late(Algorithm):
        name = "late"

        @hookimpl
        async def score_group(self, group: Group) -> None:
            for rollout in group:
                rollout.assign_advantages(rollout.reward)

    group = make_group([1.0, 0.5])
    score(Late(PluginConfig()), group, Halved())
    credit = [rollout.advantages for rollout in group]
    assert [None if each is None else each.tolist() for each in credit] == [[0.5] * 3, [0.25] * 3]


@pytest.mark.parametrize("page", dict.fromkeys([*PAGES, *READMES]), ids=named)
def test_toml_in_the_docs_fits_the_schema(page: Path) -> None:
    """Fragments of a run's config are laid over one that is whole; other TOML has to parse."""
    whole = read_toml(ROOT / "configs/reverse_text/grpo.toml")
    of_sft = read_toml(ROOT / "configs/sft/reverse.toml")
    for block in blocks(page, "toml"):
        fragment = tomllib.loads(block)
        if "project" not in fragment:
            build_config(merge(of_sft if "sft" in fragment else whole, fragment))


# -- the engine's contract -------------------------------------------------------------------

ENGINES = ROOT / "docs/engines.md"


def test_every_route_of_the_embedded_engine_is_in_the_contract_and_no_other() -> None:
    source = (ROOT / "plugins/prime_rl_embedded/src/prime_rl_embedded/api.py").read_text()
    served = set(re.findall(r'\("(GET|POST)", "(/[\w/]+)"', source))
    assert len(served) == 13
    assert set(re.findall(r"`(GET|POST) (/[\w/]+)", ENGINES.read_text())) == served


def test_the_requests_in_the_contract_are_ones_the_embedded_engine_reads() -> None:
    requests = [json.loads(block) for block in blocks(ENGINES, "json")]
    (generate,) = (each for each in requests if "sampling_params" in each)
    assert set(generate) <= set(GenerateBody.__struct_fields__)
    assert set(generate["sampling_params"]) <= set(GenerateSampling.__struct_fields__)
    (update,) = re.findall(r"`POST /update_weights` with `(\{.+?\})`", ENGINES.read_text())
    (received,) = (each for each in requests if "meeting" in each)
    assert set(json.loads(update)) == set(UpdateBody.__struct_fields__) - {"meeting"}
    assert set(received) == set(UpdateBody.__struct_fields__)
    assert msgspec.convert(received, UpdateBody).meeting is not None
    assert set(received["meeting"]) == set(BroadcastGroup.__struct_fields__)


def test_an_engine_receives_weights_as_the_contract_shows(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    (receive,) = (b for b in blocks(ENGINES, "python", mark="tested") if "def receive" in b)
    exec(receive, names)
    cpu, tensors = torch.device("cpu"), {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
    group = BroadcastGroup(
        directory=str(tmp_path), group=str(tmp_path), backend="gloo", rank=0, world_size=2,
        timeout=LIMIT, loopback=True,
    )  # fmt: skip
    received: dict[str, torch.Tensor] = {}
    order = msgspec.structs.replace(group, rank=1)
    with ThreadPoolExecutor(1) as pool:
        take = partial(names["receive"], order, 0, cpu, lambda header: None, received.update)
        taking = pool.submit(take)
        with Member().join(group, cpu) as connection:
            connection.send(header_of(tensors, {}), tensors.values())
        taking.result()
    assert received.keys() == tensors.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())


def test_every_field_of_an_engine_launch_is_in_the_contract() -> None:
    table = ENGINES.read_text().partition("| field of `EngineLaunch`")[2].partition("\n\n")[0]
    for field in fields(EngineLaunch):
        assert f"`{field.name}`" in table


def test_every_folder_of_a_run_directory_is_documented() -> None:
    text = (ROOT / "docs/run-directory.md").read_text()
    for folder in SUBFOLDERS:
        assert f"`{folder}/" in text, folder


# -- plugins ---------------------------------------------------------------------------------------

PLUGINS = ROOT / "docs/plugins.md"


def test_every_promise_is_listed_as_the_kit_says_it() -> None:
    table = PLUGINS.read_text().partition("| check | promise |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
    assert rows == [(name, promise_of(f).replace("``", "`")) for name, f in CHECKS.items()]


def test_every_declaration_of_an_algorithm_is_listed_with_its_default() -> None:
    table = PLUGINS.read_text().partition("| attribute | default | what |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.+?)`? \|", table, re.MULTILINE))
    declared = {name: getattr(Algorithm, name) for name in Algorithm.__annotations__}
    assert rows == {k: f'"{v}"' if isinstance(v, str) else str(v) for k, v in declared.items()}


def test_the_page_names_the_version_of_the_contract() -> None:
    assert f"`prime_rl.CONTRACT_VERSION`, now {CONTRACT_VERSION}." in PLUGINS.read_text()


def test_the_cache_in_the_docs_asks_once() -> None:
    names: dict[str, Any] = {}
    (block,) = (each for each in blocks(PLUGINS, "python") if "class Cached" in each)
    exec(compile(block, "plugins.md", "exec", dont_inherit=True), names)
    host = FakeHost()
    frozen = FrozenModel(name="teacher", base_url=("http://127.0.0.1:1/v1",))
    model = names["CachingHost"](host).connect(frozen)

    async def together() -> list[Any]:
        return await asyncio.gather(*(model.logprobs([1, 2, 3]) for _ in range(4)))

    answers = asyncio.run(together())
    assert [each.tolist() for each in answers] == [[0.0, -0.5, -0.5]] * 4
    assert host.frozen.asked == [[1, 2, 3]]


def test_the_clock_in_the_docs_sees_the_whole_of_an_async_hook() -> None:
    names: dict[str, Any] = {}
    (block,) = (each for each in blocks(PLUGINS, "python") if "SECONDS" in each)
    exec(compile(block, "plugins.md", "exec", dont_inherit=True), names)

    class Waits(Algorithm):
        name = "waits"

        @hookimpl
        async def score_rollout(self, rollout: Rollout) -> None:
            await asyncio.sleep(0.02)
            rollout.assign_advantages(rollout.reward)

    clock = SimpleNamespace(score_rollout=names["score_rollout"])
    score(Waits(PluginConfig()), make_group([1.0, 0.5]), clock)
    assert len(names["SECONDS"]) == 2 and min(names["SECONDS"]) >= 0.015


# -- the site --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The built site, and what mkdocs said; with ``--quiet`` it would not warn."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.mark.slow
def test_every_page_is_in_the_sites_menu_and_the_site_builds_without_a_warning(
    site: tuple[Path, str],
) -> None:
    """mkdocs warns of a page in no menu, and of a link or an anchor that leads nowhere."""
    folder, said = site
    assert "WARNING" not in said, said
    for page in (ROOT / "docs").glob("*.md"):
        assert (folder / f"{page.stem}.html").exists()


@pytest.mark.slow
def test_search_works_on_every_page_and_nothing_is_fetched_from_elsewhere(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Chromium, over loopback: the search of the theme is a worker, which files cannot start."""
    monkeypatch.syspath_prepend(str(ROOT / "plugins/prime_rl_tools/tests/report"))
    from report_browser import browser_path, chromium  # type: ignore[import-not-found]

    if browser_path() is None:
        pytest.skip("no Chromium")
    handler = partial(QuietHandler, directory=str(site[0]))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium(tmp_path) as tab:
        Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}"
        tab.size(1300, 900)
        for page in sorted((ROOT / "docs").glob("*.md")):
            tab.call("Page.navigate", url=f"{home}/{page.stem}.html")
            tab.until(
                f"location.pathname === '/{page.stem}.html' && document.readyState === 'complete'"
            )
            tab.eval(
                "(() => { const q = document.querySelector('[data-md-component=search-query]');"
                "q.focus(); q.value = 'entropy';"
                "q.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
            )
            tab.until("document.querySelectorAll('.md-search-result__link').length > 2")
        server.shutdown()
        assert tab.errors == []
        assert [url for url in tab.requested if not url.startswith((home, "data:", "about:"))] == []


SEARCHED = {
    "gpu": "recipes",
    "jsonl": "python",
    "reward": "first-environment",
    "lora": "scaling",
    "resume": "run-directory",
    "entropy": "metrics",
    "checkpoint": "run-directory",
    "vllm": "vllm",
    "teacher": "algorithms",
    "kubernetes": "multi-node",
}
"""Words that a user searches, each with a page that explains it."""


@pytest.mark.slow
def test_the_search_index_of_the_built_site_finds_ten_words(site: tuple[Path, str]) -> None:
    index = json.loads((site[0] / "search/search_index.json").read_text("utf-8"))
    pages: dict[str, str] = {}
    for entry in index["docs"]:
        page = entry["location"].partition(".html")[0]
        pages[page] = f"{pages.get(page, '')} {entry['title']} {entry['text']}".lower()
    for word, page in SEARCHED.items():
        assert word in pages[page], f"{word} is not on {page}"


@pytest.mark.slow
def test_the_first_questions_are_two_clicks_away_on_the_built_site(site: tuple[Path, str]) -> None:
    def linked(page: str) -> set[str]:
        return set(re.findall(r'<a href="([^"]+)"', (site[0] / page).read_text("utf-8")))

    assert "questions.html" in linked("index.html")
    second = linked("questions.html")
    for target in ("recipes.html", "python.html#prompts-and-a-reward", "scaling.html#lora"):
        assert target in second
        page, _, anchor = target.partition("#")
        assert not anchor or f'id="{anchor}"' in (site[0] / page).read_text("utf-8")


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


# -- links and hygiene ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page", dict.fromkeys([*PAGES, *READMES, ROOT / "CHANGELOG.md"]), ids=named
)
def test_links_between_docs_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        if anchor:
            assert anchor in _anchors(linked), target


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_named_in_the_docs_exist(page: Path) -> None:
    """Paths in backticks that look like source: relative to the repository, to a ``src`` or to
    core's package."""
    roots = [
        ROOT,
        *(ROOT / each for each in ("core/src", "app/src")),
        *ROOT.glob("plugins/*/src"),
        ROOT / "core/src/prime_rl",
        ROOT / "plugins/prime_rl_embedded/src/prime_rl_embedded",
    ]
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for path in re.findall(r"`([\w./]+/[\w.]+\.(?:py|toml|md))`", text):
        of_app = ROOT / "app/src/prime_rl_app" / path.removeprefix("app/")
        exists = of_app.exists() or any((root / path).exists() for root in roots)
        assert exists, f"{page.name}: {path}"


def test_no_file_names_a_machine_or_a_registry() -> None:
    """Paths of somebody's machine, addresses of package registries: in nothing git would take."""
    patterns = [
        r"/(?:home|root|Users)/\w",
        r"/work/(?:main|shared)",
        r"/tmp/brief",
        r"https?://[\w.-]*(?:pypi|artifactory|nexus|devpi)",
    ]
    forbidden = re.compile("|".join(patterns))
    found = []
    for path in _files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if path != Path(__file__):
            lines = enumerate(text.splitlines(), 1)
            found += [
                f"{named(path)}:{n}: {line.strip()}" for n, line in lines if forbidden.search(line)
            ]
    assert found == []


def _files() -> list[Path]:
    """What git tracks or would; everything but hidden and built folders where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.splitlines()
    if listed.returncode or not names:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_every_distribution_has_a_readme_that_names_it() -> None:
    for pyproject in [
        *ROOT.glob("plugins/*/pyproject.toml"),
        *ROOT.glob("prime_rl_*/pyproject.toml"),
    ]:
        (name,) = re.findall(r'^name = "(.+)"$', pyproject.read_text(), re.MULTILINE)
        assert f"# {name}" in (pyproject.parent / "README.md").read_text()
        assert f"`{name}`" in (ROOT / "docs/packages.md").read_text()
