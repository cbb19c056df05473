"""The page's views of a run that learns, clicked in a real browser: frozen, and live."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import numpy as np
import pytest
from report_browser import browser_path, chromium
from report_runs import make_run

from prime_rl import Rollout, Sample
from prime_rl.orchestrator.records import encode_rollouts
from prime_rl_app.rollouts import write_rollouts
from prime_rl_tools.report import write_report
from prime_rl_tools.watch.server import Server, Watched

pytestmark = [
    pytest.mark.slow,  # a Chromium for the file, beside everything else
    pytest.mark.skipif(
        browser_path() is None, reason="no Chromium here (Debian: apt-get install chromium)"
    ),
]

MINUS = "\N{MINUS SIGN}"
GIVEN = [20, 21]
SIBLINGS = [([1, 2, 3, 9], 1.0), ([1, 2, 4, 9], 1.0), ([1, 5, 6, 9], 0.0), ([1, 5, 6, 9], 0.0)]
"""Sampled tokens and rewards of a group; every token with probability a half."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        page.size(1440, 900)
        yield page


@pytest.fixture(autouse=True)
def no_errors(browser):
    browser.errors.clear()
    browser.size(1440, 900)
    yield
    assert browser.errors == []


def rollout(sampled, reward, *, group=0, example=7, member=0, version=0):
    ids = np.array([*GIVEN, *sampled])
    mask = np.arange(len(ids)) >= len(GIVEN)
    sample = Sample(
        token_ids=ids, loss_mask=mask, inference_logprobs=np.where(mask, np.log(0.5), 0.0),
        roles=np.where(mask, 2, 1), is_content=ids != 9,
    )  # fmt: skip
    return Rollout(
        env="words", example_id=example, group_id=group, episode_id=member, reward=reward,
        samples=[sample], policy_version=version,
    )  # fmt: skip


def add_step(run_dir, step, rollouts):
    write_rollouts(run_dir / "rollouts" / f"step_{step}.msgpack", step, rollouts, {})


def add_metrics(run_dir, step, **values):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")


def add_eval(run_dir, version, answers):
    """One answer and its reward per example."""
    path = run_dir / "eval_rollouts" / f"step_{version}" / "words.msgpack"
    path.parent.mkdir(parents=True)
    rollouts = [
        (rollout(ids, reward, group=n, example=n, version=version), None)
        for n, (ids, reward) in enumerate(answers)
    ]
    path.write_bytes(encode_rollouts(version, rollouts))


def learned(run_dir):
    """Two steps of one example, and two evaluations of two others."""
    make_run(run_dir, "centred", steps=0)
    group = [rollout(ids, r, member=n) for n, (ids, r) in enumerate(SIBLINGS)]
    add_step(run_dir, 1, group)
    add_step(run_dir, 2, [rollout([1, 2, 8, 9], 0.5, group=1, version=1)])
    fresh = {"off_policy/behind/0": 1.0}
    mixed = {"off_policy/behind/0": 0.25, "off_policy/behind/2": 0.75}
    add_metrics(run_dir, 1, **{"loss/rl": -0.00766, "train/words/all/reward/mean": 0.5}, **fresh)
    add_metrics(run_dir, 2, **{"loss/rl": -0.00366, "train/words/all/reward/mean": 0.5}, **mixed)
    add_eval(run_dir, 0, [([3, 3, 9], 0.25), ([4, 9], 0.5)])
    add_eval(run_dir, 2, [([3, 5, 9], 0.75), ([4, 9], 0.5)])
    return run_dir


@pytest.fixture
def frozen(browser, tmp_path):
    """A page of the run, in one file."""
    write_report(learned(tmp_path / "run"), tmp_path / "page.html")
    browser.prefers("light")
    browser.open(tmp_path / "page.html")
    return browser


def texts(page, selector):
    return page.eval(
        f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
    )


def put(page, field, value):
    page.eval(
        f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('input', "
        f"{{bubbles: true}})) }})(document.getElementById('{field}'))"
    )


def test_labels_of_an_axis_have_one_power_of_ten(frozen):
    asked = "axisLabels({}).map(([, label]) => label)"
    for values, labels in (
        ([0, 6.06e-7, 1.212e-6], ["0", f"0.606e{MINUS}6", f"1.21e{MINUS}6"]),
        ([-2e-5, 0, 2e-5], [f"{MINUS}2e{MINUS}5", "0", f"2e{MINUS}5"]),
        ([0, 1.5e6, 3e6], ["0", "1.5e6", "3e6"]),
        ([0.25, 0.5, 0.75], ["0.25", "0.5", "0.75"]),
    ):
        assert frozen.eval(asked.format(values)) == labels


def test_labels_of_an_axis_are_whole_with_their_sign(frozen):
    labels = "[...document.querySelectorAll('#curves .chart:nth-child(2) svg text')]"
    assert f"{MINUS}0.00766" in frozen.eval(f"{labels}.map(t => t.textContent)")
    box = "document.querySelector('#curves .chart:nth-child(2) svg').getBoundingClientRect()"
    lefts = frozen.eval(f"{labels}.map(t => t.getBoundingClientRect().left - {box}.left)")
    assert min(lefts) >= 0


def test_the_table_shows_replies_and_no_column_that_is_constant(frozen):
    heads = texts(frozen, "#head button")
    assert "reply" in heads and "reward" in heads and "set" in heads
    assert not {"env", "algorithm", "turns", "agent", "dropped", "run"} & set(heads)
    assert texts(frozen, ".row .reply")[0] == "⟨1⟩⟨2⟩⟨3⟩"


def test_search_finds_what_was_sampled_and_frames_it(frozen):
    put(frozen, "f-text", "⟨5⟩⟨6⟩")
    frozen.until("order.length === 2")
    assert frozen.eval("order") == [2, 3]
    frozen.click(".row[data-row='2']")
    frozen.until("document.querySelectorAll('.talk .tok.found').length === 2")
    assert texts(frozen, ".talk .tok.found") == ["⟨5⟩", "⟨6⟩"]
    put(frozen, "f-text", "/⟨(3|8)⟩/")
    frozen.until("order.length === 4")  # two siblings, two held-out answers
    frozen.click("#filters button[type=reset]")
    frozen.until("order.length === 9")


def test_a_bar_of_the_histogram_keeps_its_rewards_and_an_export_has_them(frozen):
    assert "mean 0.5 of 9 rollouts" in frozen.text("#histogram")
    frozen.click("#histogram button:last-child")
    assert frozen.eval("order") == [0, 1]
    lines = [json.loads(line) for line in frozen.eval("exported()").splitlines()]
    assert [(line["reward"], line["step"], line["example"]) for line in lines] == [(1, 1, 7)] * 2
    assert lines[0]["reply"] == ["⟨1⟩⟨2⟩⟨3⟩⟨9⟩"] and lines[0]["prompt"] == ["⟨20⟩⟨21⟩"]


def test_a_histogram_shows_how_far_a_batch_is_behind(frozen):
    bars = "[...document.querySelectorAll('#ages .bars span')].map(e => e.title)"
    assert "batch 2" in frozen.text("#ages .average")
    assert frozen.eval(bars) == [
        "25.0% of batch 2: 0 versions behind",
        "0.0% of batch 2: 1 versions behind",
        "75.0% of batch 2: 2 versions behind",
    ]
    frozen.eval(
        "(e => { e.value = 0; e.dispatchEvent(new Event('input')) })"
        "(document.querySelector('#ages input'))"
    )
    assert frozen.eval(bars)[0] == "100.0% of batch 1: 0 versions behind"


def test_the_tree_shows_where_winners_and_losers_part(frozen):
    frozen.click("#tree")
    frozen.until("document.querySelector('.tree') !== null")
    assert "Winners and losers part after token 1: that choice explains 100 %" in frozen.text(
        ".talk .hint"
    )
    chips = [text.split("\n") for text in texts(frozen, ".tree .chips")]
    runs = texts(frozen, ".tree .run")
    assert [chip[:3] for chip in chips] == [
        ["4 of 4", "p 0.5", "reward 0.5"],
        ["2 of 4", "p 0.5", "reward 1"],
        ["1 of 4", "p 0.5", "reward 1"],
        ["1 of 4", "p 0.5", "reward 1"],
        ["2 of 4", "p 0.5", "reward 0"],
    ]
    assert runs == ["⟨1⟩", "⟨2⟩", "⟨3⟩⟨9⟩", "⟨4⟩⟨9⟩", "⟨5⟩⟨6⟩⟨9⟩"]
    assert "they part below" in chips[0] and "2 end here" in chips[4]
    frozen.press("Escape")


def test_changes_of_an_example_between_steps(frozen):
    frozen.eval("select(4)")
    frozen.click("#diff")
    frozen.until("document.querySelectorAll('.one').length === 2")
    assert texts(frozen, ".talk .gone") == ["⟨3⟩"] and texts(frozen, ".talk .fresh") == ["⟨8⟩"]
    frozen.press("{")
    frozen.until("columns.step[current] === 1")
    frozen.press("Escape")


def test_the_slider_shows_each_prompt_at_each_version(frozen):
    frozen.click("#toggle-heldout")
    frozen.until("document.querySelectorAll('#cards .said').length === 2")
    assert texts(frozen, "#cards h3") == ["⟨20⟩⟨21⟩"] * 2
    assert frozen.text("#at-version") == "version 2 · mean reward 0.625, first 0.375"
    assert texts(frozen, "#cards .said") == ["⟨3⟩⟨5⟩", "⟨4⟩"]
    assert texts(frozen, "#cards .tok.fresh") == ["⟨5⟩"]
    put(frozen, "version", "0")
    frozen.until("document.querySelector('#cards .said').innerText === '⟨3⟩⟨3⟩'")
    assert frozen.text("#at-version").startswith("version 0 · mean reward 0.375")
    assert texts(frozen, "#cards .tok.fresh") == []
    frozen.click("#cards .answer button")  # opens it in the table
    frozen.until("document.querySelector('.top .sub')?.innerText.includes('held out, version 0')")
    assert frozen.eval("document.getElementById('heldout').hidden") is True


def test_two_runs_beside_each_other(browser, tmp_path):
    first, second = learned(tmp_path / "run"), learned(tmp_path / "other")
    add_eval(second, 4, [([3, 7, 9], 1.0), ([4, 9], 0.5)])
    config = json.loads((second / "configs" / "run.json").read_text())
    config["trainer"]["optim"]["lr"] = 0.5
    (second / "configs" / "run.json").write_text(json.dumps(config))
    write_report(first, tmp_path / "page.html", beside=[second])
    browser.open(tmp_path / "page.html")
    assert browser.text("#count") == "20 rollouts" and "run" in texts(browser, "#head button")
    browser.eval("document.querySelector('.differs').open = true")
    assert "trainer.optim.lr" in browser.text(".differs table")
    assert "0.5" in texts(browser, ".differs td")
    dashed = "document.querySelectorAll('#curves .chart:first-child [stroke-dasharray=\"4 3\"]')"
    assert browser.eval(f"{dashed}.length") == 1
    browser.press("v")
    browser.until("document.querySelectorAll('#cards .said').length === 4")
    assert texts(browser, "#cards article:first-child .said") == ["⟨3⟩⟨5⟩", "⟨3⟩⟨7⟩"]
    browser.press("Escape")
    browser.eval("select(13)")
    browser.until("document.querySelector('.top .sub').innerText.includes('other')")
    assert texts(browser, ".talk .tok")[-2:] == ["⟨8⟩", "⟨9⟩"]


def test_only_tokens_near_the_window_are_spans_and_the_others_come_when_scrolled_to(
    browser, tmp_path
):
    make_run(tmp_path / "run", "centred", steps=0)
    long = [rollout([*range(1, 2000)], n / 4, member=n) for n in range(4)]
    add_step(tmp_path / "run", 1, long)
    write_report(tmp_path / "run", tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.press("s")
    browser.until("document.querySelectorAll('.one').length === 4")
    browser.until("document.querySelectorAll('.one .tok').length > 0")
    spans = browser.eval("document.querySelectorAll('.tok').length")
    assert spans < 4000
    assert "⟨1999⟩" in browser.eval("document.querySelector('.one').textContent")
    browser.eval("document.querySelector('.part:last-child').scrollIntoView()")
    browser.until("document.querySelector('.one .part:last-child .tok:last-child') !== null")
    browser.press("Enter")
    for _ in range(2):
        browser.press("ArrowRight")
    assert "position 4" in browser.text("#card .what")


@pytest.mark.parametrize(
    "view",
    [
        "select(0)",
        "toggle('tree')",
        "toggle('side')",
        "(mode = 'diff', select(4))",
        "toggleHeldOut(true)",
    ],
)
def test_a_phone_needs_no_sideways_scrolling(frozen, view):
    frozen.size(390, 844)
    frozen.eval(f"({view}, 1)")
    frozen.until("document.querySelector('.tok, .tree, #cards .said') !== null")
    wide = (
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().width && "
        "e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.talk, svg'))"
        ".map(e => e.tagName + '#' + e.id + '.' + e.className)"
    )
    frozen.until(f"!({wide}).length")
    assert frozen.eval("document.documentElement.scrollWidth") <= 390


def test_a_watched_run_grows_without_a_reload(browser, tmp_path):
    run_dir = learned(tmp_path / "run")
    server = Server(Watched([run_dir]))
    server.start()
    try:
        browser.requested.clear()
        browser.call("Page.navigate", url=server.url)
        browser.until("document.documentElement?.dataset.ready === 'true'")
        assert browser.text("#count") == "9 rollouts"
        browser.eval("window.kept = true")
        browser.press("j")
        add_step(run_dir, 3, [rollout([1, 2, 3, 9], 0.75, group=2, version=2)])
        add_metrics(run_dir, 3, **{"loss/rl": 0.5, "train/words/all/reward/mean": 0.75})
        add_eval(run_dir, 3, [([6, 9], 1.0), ([4, 9], 0.5)])
        browser.until("document.getElementById('count').innerText === '12 rollouts'")
        browser.until("document.querySelector('.legend').innerText.includes('sampled 0.75')")
        assert browser.eval("[kept, current, versionsOf()]") == [True, 1, [0, 2, 3]]
        browser.press("v")
        browser.until("document.querySelectorAll('#cards .said').length === 2")
        assert texts(browser, "#cards .said") == ["⟨6⟩", "⟨4⟩"]
        assert {urlsplit(url).netloc for url in browser.requested} == {urlsplit(server.url).netloc}
    finally:
        server.close()
    browser.until("document.getElementById('live').className === 'lost'")
    browser.errors.clear()  # the connection is refused, as it should be
    browser.call("Page.navigate", url="about:blank")
    browser.errors.clear()
