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
from prime_rl_app.saved_rollouts import write_rollouts
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


def rollout(sampled, reward, *, group=0, example=7, member=0, version=0, **fields):
    ids = np.array([*GIVEN, *sampled])
    mask = np.arange(len(ids)) >= len(GIVEN)
    sample = Sample(
        token_ids=ids, loss_mask=mask, inference_logprobs=np.where(mask, np.log(0.5), 0.0),
        roles=np.where(mask, 2, 1), is_content=ids != 9,
    )  # fmt: skip
    return Rollout(
        env="words", example_id=example, group_id=group, episode_id=member, reward=reward,
        samples=[sample], policy_version=version, **fields,
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
        "0.0% of batch 2: 1 version behind",
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
    assert browser.text(".differs summary") == "1 key of the config differs"
    lines = "document.querySelectorAll('#curves .chart:first-child polyline')"
    colors = browser.eval(f"[...{lines}].map(line => line.getAttribute('stroke'))")
    assert colors == browser.eval("[runColor(0), runColor(1)]")
    letters = browser.eval(
        "[...document.querySelectorAll('#about b[style]')].map(b => b.innerText)"
    )
    assert [each.split()[0] for each in letters] == ["A", "B"]
    browser.press("v")
    browser.until("document.querySelectorAll('#cards .said').length === 4")
    assert texts(browser, "#cards article:first-child .said") == ["⟨3⟩⟨5⟩", "⟨3⟩⟨7⟩"]
    browser.press("Escape")
    browser.eval("select(13)")
    browser.until("document.querySelector('.top .sub').innerText.includes('other')")
    assert texts(browser, ".talk .tok")[-2:] == ["⟨8⟩", "⟨9⟩"]


TOP = "document.getElementById('detail').getBoundingClientRect().top"


@pytest.mark.parametrize("width", [390, 800])
def test_below_each_other_a_click_brings_the_rollout_into_view_and_a_button_the_list(frozen, width):
    frozen.size(width, 844)
    frozen.click(".row[data-row='2']")
    frozen.until("document.querySelector('.siblings button[aria-current=true]').innerText === '0'")
    frozen.until(f"Math.abs({TOP}) < 2")
    frozen.click("#row-after")
    frozen.until(f"current === 3 && Math.abs({TOP}) < 2")
    frozen.click("#row-before")
    frozen.until(f"current === 2 && Math.abs({TOP}) < 2")
    frozen.click("#to-list")
    frozen.until("Math.abs(document.getElementById('list').getBoundingClientRect().top) < 2")


def test_the_held_out_prompts_come_into_view_on_a_phone(frozen):
    frozen.size(390, 400)
    frozen.press("v")
    frozen.until("Math.abs(document.getElementById('heldout').getBoundingClientRect().top) < 2")
    frozen.press("Escape")


def test_beside_each_other_nothing_moves(frozen):
    frozen.click(".row[data-row='2']")
    frozen.until("current === 2 && scrollY === 0")
    assert frozen.eval("getComputedStyle(document.querySelector('.walk')).display") == "none"


@pytest.mark.parametrize("width", [390, 1440])
def test_the_token_looked_at_is_described_within_the_window(browser, tmp_path, width):
    """Also under a reply that is longer than the window."""
    make_run(tmp_path / "run", "centred", steps=0)
    add_step(tmp_path / "run", 1, [rollout([*range(1, 900)], 1.0)])
    write_report(tmp_path / "run", tmp_path / "page.html")
    browser.size(width, 844)
    browser.open(tmp_path / "page.html")
    browser.press("Enter")
    browser.until("document.querySelector('#card .what') !== null")
    box = browser.eval("document.getElementById('card').getBoundingClientRect().toJSON()")
    assert box["top"] >= 0
    assert box["bottom"] <= 845


def referring(run_dir):
    """A rollout with a reference, one with another name for it, and one that has none."""
    make_run(run_dir, "centred", steps=0)
    tasks = [{"prompt": "x", "answer": "Paris"}, {"solution": ["a", 1]}, {"prompt": "y"}]
    add_step(run_dir, 1, [rollout([1, 9], 1.0, member=n, task=t) for n, t in enumerate(tasks)])
    path = run_dir / "eval_rollouts" / "step_0" / "words.msgpack"
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_rollouts(0, [(rollout([1, 9], 1.0, task=tasks[0]), None)]))
    return run_dir


def test_the_reference_stands_beside_the_reply(browser, tmp_path):
    write_report(referring(tmp_path / "run"), tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert texts(browser, ".talk .turn.reference") == ["reference\nParis"]
    last = "document.querySelector('.talk').lastElementChild.className"
    assert browser.eval(last) == "turn reference"  # after the last reply
    browser.eval("select(1)")
    browser.until("document.querySelector('.turn.reference div').innerText === '[\"a\",1]'")
    browser.eval("select(2)")
    browser.until("document.querySelector('.turn.reference') === null")
    browser.press("s")
    browser.until("document.querySelectorAll('.one').length === 3")
    assert texts(browser, ".one .turn.reference div") == ["Paris", '["a",1]']
    browser.press("v")
    browser.until("document.querySelector('#cards .wanted') !== null")
    assert texts(browser, "#cards .wanted") == ["reference Paris"]
    browser.press("Escape")


def add_many_metrics(run_dir):
    """600 metrics of five steps, those of rewards and replies among them."""
    for step in range(1, 6):
        more = {f"group_{n // 20}/metric_{n}": n * step for n in range(600)}
        named = {
            "train/words/all/reward/mean": step / 5,
            "train/words/all/rewards/right/mean": step / 10,
            "train/words/all/rewards/format/mean": 0.25,
            "train/words/all/num_output_tokens/mean": 4.0 * step,
        }
        add_metrics(run_dir, step, **named, **more)


@pytest.fixture
def many(browser, tmp_path):
    make_run(tmp_path / "run", "centred", steps=0)
    add_step(tmp_path / "run", 1, [rollout([1, 9], 1.0)])
    add_many_metrics(tmp_path / "run")
    write_report(tmp_path / "run", tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    return browser


def test_reward_terms_and_the_length_of_replies_are_drawn_at_once(many):
    titles = many.eval("[...document.querySelectorAll('.chart h2')].map(h => h.firstChild.data)")
    assert titles[:3] == ["Reward", "Reward terms", "Reply length"]
    legends = texts(many, ".legend")
    assert "right 0.5" in legends[1]
    assert "format 0.25" in legends[1]
    assert "tokens 20" in legends[2]


def test_failures_stand_beside_the_sampled_and_the_held_out_reward(browser, tmp_path):
    run_dir = learned(tmp_path / "run")
    add_metrics(run_dir, 3, **{"train/agg/all/has_error/mean": 0.25})
    add_metrics(run_dir, 3, **{"eval/words/all/has_error/mean": 0.5})
    add_metrics(run_dir, 4, **{"train/agg/all/has_error/mean": 0.125})
    write_report(run_dir, tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert "failed 12.5%, held out failed 50.0%" in texts(browser, ".chart")[0]


DRAWN = "document.querySelector('#curves .menu').closest('.chart').querySelector('svg').ariaLabel"


def test_the_menu_finds_one_of_hundreds_of_metrics_by_parts_of_its_name(many):
    many.click("#curves .menu input")
    many.until("!document.getElementById('metrics').hidden")
    assert many.eval("document.querySelectorAll('#metrics [role=option]').length") == 200
    assert "404 more metrics" in many.text("#metrics li:last-child")

    many.call("Input.insertText", text="_417 group")
    many.until("document.querySelectorAll('#metrics [role=option]').length === 1")
    many.press("Enter")
    many.until(f"{DRAWN} === 'group_20/metric_417'")
    assert many.eval("document.getElementById('metrics').hidden") is True

    many.click("#curves .menu input")
    many.call("Input.insertText", text="METRIC_41")
    many.until("document.querySelectorAll('#metrics [role=option]').length === 11")
    many.press("ArrowDown")
    many.press("ArrowDown")
    assert many.text("#metrics [aria-selected=true]") == "group_20/metric_411"
    many.click("#metrics li:nth-child(4)")
    many.until(f"{DRAWN} === 'group_20/metric_412'")

    many.click("#curves .menu input")
    many.call("Input.insertText", text="no such metric")
    many.until("document.getElementById('metrics').innerText === 'no metric has these words'")
    many.press("Enter")
    many.press("Escape")
    many.until(f"document.getElementById('metrics').hidden && {DRAWN}.endsWith('_412')")
    assert many.eval("document.querySelector('#curves .menu input').value").endswith("_412")


@pytest.mark.parametrize("width", [390, 800, 1440])
def test_the_open_menu_is_within_the_window(many, width):
    many.size(width, 900)
    many.click("#curves .menu input")
    many.until("!document.getElementById('metrics').hidden")
    box = many.eval("document.getElementById('metrics').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= width
    many.press("Escape")


def test_smoothing_is_the_mean_of_the_last_steps_over_a_faint_line(many):
    points = (
        "[...document.querySelectorAll('#curves .chart:first-child polyline')]"
        ".map(line => [line.getAttribute('class'), line.getAttribute('points')])"
    )
    ((_, before),) = many.eval(points)
    many.eval(
        "(e => { e.value = '5'; e.dispatchEvent(new Event('change')) })"
        "(document.getElementById('smoothing'))"
    )
    (kind, raw), (_, smooth) = many.eval(points)
    assert (kind, raw) == ("raw", before)
    assert smooth != before
    assert "⌀ 0.6" in texts(many, ".legend")[0]  # of 0.2, 0.4, 0.6, 0.8, 1
    asked = "(smoothing = 5, smoothed([[1, 1], [2, 3], [6, 5], [7, 7], [20, 9]]))"
    assert many.eval(asked) == [[1, 1], [2, 2], [6, 4], [7, 6], [20, 9]]


def test_what_is_typed_in_the_menu_survives_a_step_of_the_run(browser, tmp_path):
    run_dir = learned(tmp_path / "run")
    server = Server(Watched([run_dir]))
    server.start()
    try:
        browser.call("Page.navigate", url=server.url)
        browser.until("document.documentElement?.dataset.ready === 'true'")
        browser.click("#curves .menu input")
        browser.call("Input.insertText", text="loss")
        add_metrics(run_dir, 3, **{"loss/rl": 0.5})
        browser.until("runs[0].curves['loss/rl'].at(-1)[0] === 3")
        field = "document.querySelector('#curves .menu input')"
        assert browser.eval(f"[{field}.value, document.activeElement === {field}]") == [
            "loss",
            True,
        ]
        browser.press("Enter")
        browser.until(f"{DRAWN} === 'loss/rl'")
        browser.until("document.querySelectorAll('.legend')[1].innerText.includes('0.5')")
    finally:
        server.close()
    browser.until("document.getElementById('live').className === 'lost'")
    browser.call("Page.navigate", url="about:blank")
    browser.errors.clear()


def test_small_numbers_are_short(frozen):
    numbers = [0, 0.5, -0.00020712, 0.001, 9.357e-6, 123456.0]
    written = frozen.eval(f"{json.dumps(numbers)}.map((each) => number(each, 3))")
    assert written == ["0", "0.5", f"{MINUS}2.07e{MINUS}4", "0.001", f"9.36e{MINUS}6", "123000"]


def test_one_of_a_thing_has_no_plural(frozen):
    said = "[plural(0, 'key'), plural(1, 'key'), plural(2, 'key'), plural(1200, 'more token')]"
    assert frozen.eval(said) == ["0 keys", "1 key", "2 keys", "1,200 more tokens"]


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
