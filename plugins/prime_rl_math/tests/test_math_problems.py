"""Rows from files and from a hub on loopback; answers; whole episodes with a scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from loopback import listening
from renderers import Qwen3RendererConfig
from scripted_replies import TOKENIZER, replying
from waiting import LIMIT

from math_problems import MathProblemsConfig, MathProblemsTaskset
from math_problems.check import is_answer, is_right
from math_problems.files import hub_files
from prime_rl import ConfigError
from prime_rl.env.environment import Environment, EnvSettings, ModelEndpoint, SamplingSettings

GSM8K = [
    {"question": "Half of 48?", "answer": "48 / 2 = <<48/2=24>>24\n#### 24"},
    {"question": "A thousand and 234?", "answer": "1,000 + 234\n#### 1,234"},
    {"question": "Half of one?", "answer": "\\frac{1}{2}"},
]


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    return path


def environment(**args: Any) -> Environment:
    settings = EnvSettings(
        id="math-problems", args=args, default_harness={"id": "in-process"}, timeout=LIMIT
    )
    return Environment(settings)


# -- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "answer", "boxed", "anywhere"),
    [
        ("so \\boxed{24}", GSM8K[0]["answer"], True, True),
        ("The answer is 24.", GSM8K[0]["answer"], False, True),
        ("\\boxed{48}", GSM8K[0]["answer"], False, False),
        ("\\boxed{1234}", GSM8K[1]["answer"], True, True),
        ("\\boxed{1,234}", GSM8K[1]["answer"], True, True),
        ("\\boxed{0.5}", GSM8K[2]["answer"], True, True),
        ("first \\boxed{3}, no: \\boxed{4}", "4", True, False),
        ("<think>\\boxed{4}</think>5", "4", False, False),
        ("\\boxed{x + 1}", "$1 + x$", True, True),
        ("\\boxed{(1, 2)}", "The point is $\\boxed{(1,2)}$", True, True),
        ("\\boxed{}", "4", False, False),
        ("", "4", False, False),
    ],
)
def test_a_reply_is_right_if_its_answer_equals_the_rows(
    reply: str, answer: str, boxed: bool, anywhere: bool
) -> None:
    assert is_right(reply, answer, "boxed") is boxed
    assert is_right(reply, answer, "reply") is anywhere


OWN_ANSWERS = (
    *("24", "-3", "1,234.50", "\\frac{1}{2}", "2\\sqrt{3}", "10:30", "[1, 2]", "(1,2)", "x=5"),
    *("\\text{Monday}", "Paris", "(A)", "12 apples", "\\{1,2,3\\}", "5%", "\\$5.00", "1e+20"),
)


@pytest.mark.parametrize("answer", OWN_ANSWERS)
def test_a_reply_that_gives_the_rows_own_answer_is_right(answer: str) -> None:
    assert is_answer(answer)
    assert is_right(f"So it is \\boxed{{{answer}}}.", answer, "boxed")
    assert not is_right("So it is \\boxed{77}.", answer, "boxed")


@pytest.mark.parametrize(
    ("cell", "reply"),
    [(24, "24"), (-0.5, "-\\frac{1}{2}"), (1e20, "100000000000000000000"), (1e-7, "0.0000001")],
)
def test_a_number_in_a_cell_is_an_answer(tmp_path: Path, cell: float, reply: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "?", "answer": cell}))
    answer = environment(path=tmp_path).examples[0].task.data.answer
    assert is_right(f"\\boxed{{{reply}}}", answer, "boxed")


def test_jsonl_may_have_a_byte_order_mark_blank_lines_and_any_character(tmp_path: Path) -> None:
    questions = ["a\u2028b", "a\u0085b\x1c", "ü?"]
    rows = [
        json.dumps({"question": question, "answer": "1"}, ensure_ascii=False)
        for question in questions
    ]
    text = "\ufeff\r\n" + "\r\n\n \n".join(rows) + "\n\n"
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    assert prompts(path=tmp_path) == questions


# -- rows -------------------------------------------------------------------------------------


def prompts(**args: Any) -> list[str]:
    env = environment(**args)
    return [str(env.examples[index].task.data.prompt) for index in range(len(env.examples))]


def test_jsonl_and_parquet_give_the_same_rows(gsm8k: Path, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(GSM8K), tmp_path / "rows.parquet")
    expected = [row["question"] for row in GSM8K]
    assert prompts(path=gsm8k) == prompts(path=tmp_path / "rows.parquet") == expected
    assert prompts(path=tmp_path) == expected * 2  # the files of a folder
    assert prompts(path=gsm8k, first=1, num_examples=1) == expected[1:2]


@pytest.mark.parametrize(
    ("line", "args", "message"),
    [
        ("{", {}, "gsm8k.jsonl, line 4: no JSON"),
        ('{"question": "a", "question": "b"}', {}, "line 4: no JSON .the key 'question' stands tw"),
        ("[" * 9999, {}, "gsm8k.jsonl, line 4: no JSON"),
        ("[1]", {}, r"line 4: expected an object, found '\[1\]'"),
        ('{"problem": "?"}', {}, "no column 'question'; its columns are: problem"),
        ('{"question": "?", "answer": ""}', {}, "math-verify reads no answer in str ''"),
        ('{"question": "?", "answer": [1, 2]}', {}, r"found list \[1, 2\]"),
        ('{"question": "?", "answer": {"a": 1}}', {}, "'answer': expected a text or a number"),
        ('{"question": "?", "answer": null}', {}, "found NoneType None"),
        ('{"question": "?", "answer": true}', {}, "found bool True"),
        ('{"question": "?", "answer": NaN}', {}, "found float nan"),
        ('{"question": null, "answer": "1"}', {}, "'question': expected a text"),
        ('{"question": " ", "answer": "1"}', {}, "'question': expected a text"),
        ('{"question": [{"role": "user", "content": "?"}], "answer": "1"}', {}, "found list"),
        ("", {"path": "/nowhere"}, "at /nowhere there is nothing .jsonl or .parquet"),
        ("", {"dataset": "a/b"}, "set either path"),
        ("", {"path": None}, "set either path"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    gsm8k: Path, line: str, args: dict[str, Any], message: str
) -> None:
    with gsm8k.open("a") as file:
        file.write(line)
    with pytest.raises(ConfigError, match=message):
        environment(**{"path": gsm8k} | args)


HUB = """
import sys
from math_problems.files import hub_files, rows_of
for file in hub_files("openai/gsm8k", "main/*.jsonl"):
    print(*(row["question"] for _, row in rows_of(file)))
"""


async def test_a_dataset_of_the_hub_is_downloaded(
    gsm8k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client, in a process of its own, and the routes that it asks."""
    import asyncio

    async def info(request: web.Request) -> web.Response:
        names = ("main/train.jsonl", "main/note.txt")
        siblings = [{"rfilename": name} for name in names]
        return web.json_response({"id": "openai/gsm8k", "sha": "a" * 40, "siblings": siblings})

    async def tree(request: web.Request) -> web.Response:
        size = gsm8k.stat().st_size
        return web.json_response(
            [{"type": "file", "path": "main/train.jsonl", "size": size, "oid": "b" * 40}]
        )

    async def resolve(request: web.Request) -> web.Response:
        headers = {"ETag": '"e"', "X-Repo-Commit": "a" * 40}
        return web.Response(body=gsm8k.read_bytes(), headers=headers)

    app = web.Application()
    app.router.add_get("/api/datasets/openai/gsm8k/revision/{name}", info)
    app.router.add_get("/api/datasets/openai/gsm8k/tree/{name:.*}", tree)
    app.router.add_get("/datasets/openai/gsm8k/resolve/{name:.*}", resolve)
    async with listening(app) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", HUB], capture_output=True, text=True
        )
    assert done.stdout.split("\n")[0] == " ".join(row["question"] for row in GSM8K), done.stderr


def test_a_file_is_no_dataset_of_the_hub() -> None:
    with pytest.raises(ConfigError, match=r"found a file, 'm.jsonl'. Set args.path instead"):
        hub_files("m.jsonl", "*.parquet")


def test_a_bad_cell_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"question": "1 + 1?", "answer": 2}\n\n{"question": "2 + 2?", "answer": [4]}\n'
    )
    config = MathProblemsConfig(id="math-problems", path=path)
    found = r"m.jsonl, line 3: column 'answer': .* found list \[4\]"
    with pytest.raises(ConfigError, match=found):
        list(MathProblemsTaskset(config).load())


def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"fetching 'no/such' .*copy its files here and set path"):
        hub_files("no/such", "*.parquet")


# -- episodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reward", "metrics"),
    [("It is \\boxed{24}", 1.0, {"boxed": 1.0}), ("It is 24", 0.0, {"boxed": 0.0})],
)
async def test_an_episode_is_rewarded_for_the_boxed_answer(
    gsm8k: Path, tmp_path: Path, reply: str, reward: float, metrics: dict[str, float]
) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    settings = EnvSettings(
        id="math-problems",
        args={"path": gsm8k},
        default_harness={"id": "in-process"},
        renderer=Qwen3RendererConfig(enable_thinking=False),
        tokenizer_path=tmp_path,
        timeout=LIMIT,
    )
    async with replying() as engine, Environment(settings) as env:
        engine.script = lambda prompt: reply
        (result,) = await env.run(
            env.examples[0],
            model=ModelEndpoint("scripted", engine.base_url),
            sampling=SamplingSettings(),
        )
    assert (result.error, result.reward, result.metrics) == (None, reward, metrics)
    assert [role for role, _ in result.messages] == ["system", "user", "assistant"]


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    for content in (b"", b"PAR1", b"no parquet" * 9):
        (tmp_path / "rows.parquet").write_bytes(content)
        with pytest.raises(ConfigError, match=r"rows\.parquet: expected a Parquet file: "):
            prompts(path=tmp_path / "rows.parquet")
