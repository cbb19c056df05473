"""The page in a real browser: keys pressed, buttons clicked, what a person reads."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from report_browser import browser_path, chromium
from report_runs import make_run, offering

from prime_rl import Rollout, Sample
from prime_rl.config.orchestrator import AlgoConfig
from prime_rl_app.saved_rollouts import read_step, step_files, write_rollouts
from prime_rl_tools.replay import score
from prime_rl_tools.replay.score import read_run_config, read_steps, replay
from prime_rl_tools.report import write_report

pytestmark = [
    pytest.mark.slow,  # a Chromium for the file, beside everything else
    pytest.mark.skipif(
        browser_path() is None, reason="no Chromium here (Debian: apt-get install chromium)"
    ),
]

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"

SHOWN = "document.querySelector('.row[aria-selected=true]').dataset.row"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser, tmp_path):
    """A run of three steps, opened."""
    run_dir = tmp_path / "run"
    make_run(run_dir, "observing")
    add_metrics(run_dir)
    add_exports(run_dir)
    write_report(run_dir, tmp_path / "page.html")
    browser.errors.clear()
    browser.requested.clear()
    browser.size(1440, 900)
    browser.prefers("light")
    browser.open(tmp_path / "page.html")
    browser.run_dir = run_dir
    yield browser
    assert browser.errors == []


def add_metrics(run_dir):
    lines = [
        {"step": n, "train/words/all/reward/mean": n / 4, "train/agg/all/reward/mean": n / 4,
         "loss/rl": -n / 8, "loss/ce": 0.5, "loss/ref_kl": 0.0}
        for n in (1, 2, 3)
    ]  # fmt: skip
    lines.append({"step": 3, "eval/words/all/reward/mean": 0.625, "off_policy/mean": 1.0})
    lines += [{"step": n, "plugin/clip/share": n / 10} for n in (1, 2, 3)]
    seconds = ("pace/training", "pace/held", "pace/starved", "time/engines_paused")
    lines += [{"step": n} | dict.fromkeys(seconds, n / 987.6) for n in (1, 2, 3)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def add_exports(run_dir):
    """Of step 1: every sampled token twice as likely; the third token masked out."""
    directory = run_dir / "token_exports" / "step_1"
    directory.mkdir(parents=True)
    with (directory / "rank_0.jsonl").open("w") as file:
        for rollout in read_step(step_files(run_dir)[1]).kept:
            sample = rollout.samples[0]
            mask = sample.loss_mask[:12].tolist()
            record = {
                "env_name": "words", "token_ids": sample.token_ids[:12].tolist(),
                "inference_logprobs": sample.inference_logprobs[:12].tolist(),
                "trainer_logprobs": [-0.125 if m else None for m in mask],
                "importance_ratio": [2.0 if m else None for m in mask],
                "is_masked": [t == 3 if m else None for t, m in enumerate(mask)],
                "is_masked_high": [t == 3 if m else None for t, m in enumerate(mask)],
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def table_of(page):
    """The rollouts of the run, as the page should have them."""
    return [
        stored for path in step_files(page.run_dir).values() for stored in read_step(path).rollouts
    ]


def card(page):
    """What is said of the token looked at."""
    return page.eval(
        "Object.fromEntries([...document.querySelectorAll('#card dl div')]"
        ".map(d => [d.children[0].innerText, d.children[1].innerText]))"
    )


def test_the_page_makes_no_other_request(page):
    assert page.requested == [page.eval("location.href.split('#')[0]")]


def test_it_opens_on_the_first_rollout_with_curves_and_everything_counted(page):
    assert page.text("#count") == f"{len(table_of(page))} rollouts"
    assert page.text("#name") == "run" and "words: observing" in page.text("#about")
    assert page.eval(SHOWN) == "0"
    titles = page.eval("[...document.querySelectorAll('.chart h2')].map(h => h.firstChild.data)")
    assert titles[:4] == ["Reward", "Loss", "Entropy", "Mismatch KL"]
    legend = page.eval("[...document.querySelectorAll('.legend')].map(l => l.innerText)")
    assert "sampled 0.75" in legend[0] and "held out 0.625" in legend[0]
    assert f"rl {MINUS}0.375" in legend[1] and "ce 0.5" in legend[1] and "ref_kl" not in legend[1]


@pytest.mark.parametrize("width", [800, 1000, 1200, 1440, 1920])
def test_the_charts_fill_their_rows_and_the_title_one_line(page, width):
    page.size(width, 800)
    tops = page.eval("[...document.querySelectorAll('.chart')].map(c => c.offsetTop)")
    rows = [tops.count(top) for top in sorted(set(tops))]
    assert rows[0] - rows[-1] < len(rows), rows
    assert page.eval("document.querySelector('#about').clientHeight") < 50


def test_no_value_is_out_of_its_legend_in_charts_as_narrow_as_they_become(page):
    """Five lines of a legend are shown, and more by scrolling: a step and four values."""
    narrowest = page.eval("NARROWEST * document.querySelectorAll('.chart').length")
    page.size(narrowest, 900)
    page.until("document.querySelector('.chart').offsetWidth < NARROWEST + 1")
    hidden = (
        "[...document.querySelectorAll('.legend')].filter(l => l.scrollHeight > l.clientHeight)"
    )
    assert page.eval(f"{hidden}.map(l => l.innerText)") == []
    page.hover("#curves .chart:nth-child(5) svg")
    assert "step " in page.text("#curves .chart:nth-child(5) .legend")
    assert page.eval(f"{hidden}.map(l => l.innerText)") == []


def test_the_last_curve_is_of_a_metric_that_a_plugin_has_logged_or_of_any_other(page):
    """``add_metrics`` has one of a plugin."""
    chosen = "document.querySelector('#curves .menu input').value"
    drawn = "[...document.querySelectorAll('#curves svg')].at(-1).getAttribute('aria-label')"
    assert page.eval(chosen) == page.eval(drawn) == "plugin/clip/share"
    assert "0.3" in page.eval("[...document.querySelectorAll('.legend')].at(-1).innerText")


def test_j_and_k_and_the_arrows_move_from_rollout_to_rollout(page):
    for key, row in (("j", "1"), ("ArrowDown", "2"), ("k", "1"), ("ArrowUp", "0"), ("k", "0")):
        page.press(key)
        assert page.eval(SHOWN) == row
    page.press("G")
    assert page.eval(SHOWN) == str(len(table_of(page)) - 1)
    assert page.eval("location.hash") == f"#rollout-{len(table_of(page)) - 1}"


def test_enter_and_the_arrows_walk_the_tokens_and_escape_leaves(page):
    sample = table_of(page)[0].rollout.samples[0]
    page.press("Enter")
    seen = card(page)
    assert seen["mask"] == "sampled" and seen["component"] == f"rl {TIMES} 1"
    assert float(seen["advantage"].replace(MINUS, "-")) == pytest.approx(
        float(sample.advantages[3]), rel=1e-3
    )
    assert seen["log π (trainer)"] == f"{MINUS}0.125" and seen["ratio π/μ"] == "2"
    assert seen["trust region"] == "masked, too likely"
    assert seen["role"] == "assistant" and seen["attribution"] == "content"
    page.press("ArrowRight")
    assert f"id {sample.token_ids[4]}, position 4" in page.text("#card .what")
    assert card(page)["trust region"] == "inside"
    page.press("Escape")
    assert page.eval("document.querySelector('.tok.at')") is None


def test_hovering_an_observed_token_shows_that_it_trains_in_ce(page):
    page.hover(".tok:nth-child(2)")
    seen = card(page)
    assert (
        seen["mask"] == "given"
        and seen["component"] == f"ce {TIMES} 0.1"
        and seen["role"] == "user"
    )
    assert "log μ (inference)" not in seen and "policy version" not in seen


def test_marks_show_component_template_and_trust_region(page):
    sample = table_of(page)[0].rollout.samples[0]
    classes = page.eval("[...document.querySelectorAll('.talk .tok')].map(t => t.className)")
    given, sampled = 3, len(sample) - 3
    assert classes == [
        "tok ce scaffold", *["tok ce"] * (given - 1), "tok rl hit", *["tok rl"] * (sampled - 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "ids, num_content, roles",
    [
        # <|im_start|> system, tools, <|im_end|>; <|im_start|> user, text, <|im_end|>
        ([1, 5, 6, 7, 2, 1, 8, 9, 2], 7, ["template"] * 5 + ["user"] * 4),
        # <s> <|header|> system, date, <|eot|>; <|header|> user, text, <|eot|>
        ([0, 1, 5, 6, 2, 1, 8, 9, 2], 7, ["template"] * 5 + ["user"] * 4),
        # <|im_start|> user, text, <|im_end|>
        ([1, 8, 9, 2], 2, ["user"] * 4),
        # A text that contains the opening token itself
        ([1, 8, 9, 1, 2], 2, ["user"] * 5),
    ],
)
def test_what_the_template_wrote_before_the_first_message_is_not_labeled_user(
    page, ids, num_content, roles
):
    content = [int(t == num_content) for t in range(len(ids))]
    sample = json.dumps({"ids": ids, "roles": 1, "content": content})
    found = page.eval(
        f"(() => {{ const s = {sample}; return s.ids.map((_, t) => roleOf(s, t)); }})()"
    )
    assert found == roles


def test_membership_follows_the_weights_and_their_absence(page):
    """rl: 1 on the mask if absent, and never off it; the others: nothing if absent."""
    plain = "{mask: [0, 1]}"
    assert page.eval(f"weights({plain}, 0)") == {"rl": 0, "ce": 0, "ref_kl": 0}
    assert page.eval(f"weights({plain}, 1)") == {"rl": 1, "ce": 0, "ref_kl": 0}
    mixed = "{mask: [0, 1], rl: [3, 0.5], ce: 0.25, ref_kl: [0, 2]}"
    assert page.eval(f"weights({mixed}, 0)") == {"rl": 0, "ce": 0.25, "ref_kl": 0}
    assert page.eval(f"weights({mixed}, 1)") == {"rl": 0.5, "ce": 0.25, "ref_kl": 2}


def test_the_color_is_the_sign_of_the_credit(page):
    stored = table_of(page)
    for row in (0, 1, 2, 3):
        page.eval(f"select({row})")
        sample = stored[row].rollout.samples[0]
        style = page.eval("document.querySelector('.tok.rl').style.cssText")
        assert ("--pos" if sample.advantages[3] > 0 else "--neg") in style
        assert page.eval("document.querySelector('.tok.ce').style.cssText") == ""


@pytest.mark.parametrize(
    ("field", "value", "keep"),
    [
        ("f-step", "2-3", lambda step, stored: step in (2, 3)),
        ("f-step", "1", lambda step, stored: step == 1),
        ("f-min", "0.67", lambda step, stored: stored.rollout.reward >= 0.67),
        ("f-max", "0.67", lambda step, stored: stored.rollout.reward <= 0.67),
        ("f-dropped", "any", lambda step, stored: stored.dropped_by is not None),
        ("f-dropped", "trained", lambda step, stored: stored.dropped_by is None),
        ("f-dropped", "pre_batch_filters", lambda step, stored: stored.dropped_by is not None),
        ("f-env", "words", lambda step, stored: True),
        ("f-algorithm", "observing", lambda step, stored: True),
    ],
)
def test_filters_keep_matching_rollouts(page, field, value, keep):
    expected = [
        row
        for row, (step, stored) in enumerate(
            (step, stored)
            for step, path in step_files(page.run_dir).items()
            for stored in read_step(path).rollouts
        )
        if keep(step, stored)
    ]
    page.eval(
        f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('input', {{bubbles: true}})) }})"
        f"(document.getElementById('{field}'))"
    )
    assert expected and page.eval("order") == expected
    page.click("#filters button[type=reset]")
    page.until(f"order.length === {len(table_of(page))}")


def test_a_click_on_a_head_sorts_up_down_and_not(page):
    rewards = [stored.rollout.reward for stored in table_of(page)]
    up = sorted(range(len(rewards)), key=lambda row: rewards[row])
    reward = next(n for n in range(1, 20) if page.text(f"#head button:nth-child({n})") == "reward")
    page.click(f"#head button:nth-child({reward})")
    assert page.eval("order") == up
    page.click(f"#head button:nth-child({reward})")
    assert [rewards[row] for row in page.eval("order")] == sorted(rewards, reverse=True)
    page.click(f"#head button:nth-child({reward})")
    assert page.eval("order") == list(range(len(rewards)))


def test_a_click_on_a_row_shows_it_and_siblings_stand_side_by_side(page):
    page.click(".row[data-row='2']")
    stored = table_of(page)
    group = [
        row for row, s in enumerate(stored) if s.rollout.group_id == stored[2].rollout.group_id
    ]
    assert page.eval("document.querySelectorAll('.siblings button').length") == len(group) == 4
    page.click("#side")
    page.until("document.querySelectorAll('.one').length === 4")
    heads = page.eval(
        "[...document.querySelectorAll('.one h3 span:first-child')].map(h => h.innerText)"
    )
    rewards = [float(head.removeprefix("reward ")) for head in heads]
    assert rewards == [pytest.approx(stored[row].rollout.reward, abs=1e-3) for row in group]
    page.press("]")
    assert page.eval(SHOWN) == str(group[(group.index(2) + 1) % 4])
    page.press("s")
    page.until("document.querySelectorAll('.one').length === 0")


def test_a_dropped_rollout_shows_its_filter_and_that_it_does_not_train(page):
    row = next(n for n, stored in enumerate(table_of(page)) if stored.dropped_by)
    page.eval(f"select({row})")
    assert "dropped by pre_batch_filters" in page.text(".numbers")
    page.press("Enter")
    assert card(page)["component"] == "none: dropped"


def test_question_mark_lists_every_key_and_escape_closes(page):
    page.press("?")
    assert page.eval("document.getElementById('help').open") is True
    assert page.eval("document.querySelectorAll('#keys dt').length") == page.eval("KEYS.length")
    page.press("Escape")
    assert page.eval("document.getElementById('help').open") is False


def test_keys_typed_into_a_filter_are_text(page):
    page.eval("document.getElementById('f-step').focus()")
    page.press("j")
    assert page.eval(SHOWN) == "0"
    page.press("Escape")
    page.press("j")
    assert page.eval(SHOWN) == "1"


def luminance(color):
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(page, selector):
    text = page.eval(f"getComputedStyle(document.querySelector('{selector}')).color")
    ground = page.eval("getComputedStyle(document.getElementById('detail')).backgroundColor")
    light, dark = sorted((luminance(text), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(page, scheme):
    """WCAG AA: 4.5 to 1, the faint text too."""
    page.prefers(scheme)
    ground = page.eval("getComputedStyle(document.getElementById('detail')).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    for selector in ("h1", ".tok.rl", ".tok.scaffold", ".numbers", ".turn h4", "#head button"):
        assert contrast(page, selector) >= 4.5, selector


def test_t_turns_the_theme_over(page):
    page.press("t")
    ground = page.eval("getComputedStyle(document.getElementById('detail')).backgroundColor")
    assert luminance(ground) < 0.5
    page.press("t")
    assert page.eval("document.documentElement.dataset.theme") == "light"
    page.eval("localStorage.clear()")


def test_with_a_reference_the_color_is_its_distance(browser, tmp_path):
    make_run(tmp_path / "run", "taught")
    write_report(tmp_path / "run", tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser.eval("document.getElementById('color').value") == "reference"
    first = read_step(step_files(tmp_path / "run")[1]).rollouts[0].rollout.samples[0]
    gaps = (first.ref_logprobs - first.inference_logprobs)[first.loss_mask]
    styles = browser.eval(
        "[...document.querySelectorAll('.talk .tok.ref_kl')].map(t => t.style.cssText)"
    )
    assert len(styles) == len(gaps)
    signs = ["--pos" if gap > 0 else "--neg" for gap in gaps]
    assert all(sign in style for sign, style in zip(signs, styles, strict=True))


def test_a_replayed_page_shows_both_credits(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "load_plugins", lambda disabled=(): offering())
    run_dir = tmp_path / "run"
    make_run(run_dir, "centred")
    algorithms = {"words": AlgoConfig(type="counted")}
    steps = read_steps(run_dir)
    found = asyncio.run(replay(read_run_config(run_dir), steps, algorithms))
    out = tmp_path / "page.html"
    write_report(run_dir, out, steps=steps, replayed=found, algorithms=algorithms)
    browser.open(out)
    assert "centred → counted" in browser.text("#about")
    browser.press("j")
    assert "replayed +1" in browser.text(".numbers")
    browser.press("Enter")
    assert card(browser)["advantage replayed"] == "+1"
    labels = browser.eval("[...document.getElementById('color').options].map(o => o.value)")
    assert labels == ["credit", "again", "change", "logprob"]
    browser.press("m")
    assert "--pos" in browser.eval("document.querySelector('.tok.rl').style.cssText")


def test_ten_thousand_rollouts_have_few_rows_in_the_document(browser, tmp_path):
    run_dir = tmp_path / "run"
    make_run(run_dir, "centred", steps=0)
    for step in range(1, 21):
        rollouts = [small(step * 500 + n) for n in range(500)]
        write_rollouts(run_dir / "rollouts" / f"step_{step}.msgpack", step, rollouts, {})
    facts = write_report(run_dir, tmp_path / "page.html")
    assert facts.num_rollouts == 10_000
    browser.open(tmp_path / "page.html")
    assert browser.text("#count") == "10,000 rollouts"
    browser.press("G")
    browser.until(f"{SHOWN} === '9999'")
    browser.until("document.querySelector('.top h2').innerText.includes('group 2624')")
    assert browser.eval("document.querySelectorAll('.row').length") < 80
    assert browser.errors == []


def small(number):
    mask = np.arange(20) >= 10
    sample = Sample(
        token_ids=np.arange(20), loss_mask=mask, inference_logprobs=np.where(mask, -1.0, 0.0),
        advantages=np.where(mask, number % 7 - 3.0, 0.0),
    )  # fmt: skip
    return Rollout(
        env="words", example_id=number, group_id=number // 4, reward=number % 10 / 10,
        samples=[sample],
    )  # fmt: skip


def test_curves_with_more_points_than_a_call_takes_arguments_are_drawn(browser, tmp_path):
    run_dir = tmp_path / "run"
    make_run(run_dir, "centred", steps=1)
    names = ["train/agg/all/reward/mean", *(f"train/env{n}/all/reward/mean" for n in range(19))]
    lines = [{"step": step} | dict.fromkeys(names, step % 2) for step in range(10_000)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(run_dir, tmp_path / "page.html")
    browser.open(tmp_path / "page.html")

    drawn = "document.querySelector('.chart svg')"
    labels = browser.eval(f"[...{drawn}.querySelectorAll('text')].map(t => t.textContent)")
    assert labels == ["0", "0.5", "1", "0", "9999"]
    points = f"[...{drawn}.querySelectorAll('polyline')].map(l => l.points.length)"
    assert browser.eval(points) == [10_000] * 20
    assert browser.errors == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3846153846153847, "3.846e15"),
        (-1e17, f"{MINUS}1e17"),
        (999_949, "999900"),
        (999_960, "1e6"),
        (0.000207, f"2.07e{MINUS}4"),
        (0, "0"),
    ],
)
def test_a_large_number_is_as_short_as_a_small_one(page, value, text):
    assert page.eval(f"number({value})") == text
