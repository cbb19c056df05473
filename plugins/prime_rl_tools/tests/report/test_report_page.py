"""The page's data: what is in it, joined how, and that the file stands alone."""

from __future__ import annotations

import base64
import gzip
import json
import re

import numpy as np
import pytest
from report_runs import make_run
from typer.testing import CliRunner

from prime_rl import Rollout, Sample
from prime_rl.config.orchestrator import AlgoConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl_app.cli.app import app
from prime_rl_app.saved_rollouts import StoredRollout, read_step, step_files
from prime_rl_tools.report import data, write_report
from prime_rl_tools.report.exports import StepExports
from prime_rl_tools.report.source import CHUNK_TOKENS, _parts
from prime_rl_tools.report.tokens import Pieces, columns_of, short


def blocks(path):
    """Every block of a page by its id, decoded."""
    found = re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', path.read_text())
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def made(tmp_path, algo="observing"):
    make_run(tmp_path / "run", algo)
    out = tmp_path / "page.html"
    facts = write_report(tmp_path / "run", out)
    return tmp_path / "run", out, facts


def saved(run_dir):
    return [s for path in step_files(run_dir).values() for s in read_step(path).rollouts]


def test_every_saved_rollout_is_a_row_in_order(tmp_path):
    run_dir, out, facts = made(tmp_path)
    table = blocks(out)["facts"]["table"]
    stored = saved(run_dir)
    assert facts.num_rollouts == len(stored) == len(table["columns"]["step"])
    assert facts.num_tokens == sum(s.rollout.num_tokens for s in stored)
    assert facts.num_bytes == out.stat().st_size
    assert table["columns"]["reward"] == [s.rollout.reward for s in stored]
    names = table["texts"]["dropped"]
    assert [names[i] for i in table["columns"]["dropped"]] == [s.dropped_by or "" for s in stored]


def test_a_chunk_has_the_tokens_of_its_rows(tmp_path):
    run_dir, out, _ = made(tmp_path)
    found = blocks(out)
    chunks = [row for name, rows in found.items() if name.startswith("chunk") for row in rows]
    for shown, stored in zip(chunks, saved(run_dir), strict=True):
        (sample,), (column,) = stored.rollout.samples, shown["samples"]
        assert column["ids"] == sample.token_ids.tolist()
        assert column["mask"] == sample.loss_mask.astype(int).tolist()
        np.testing.assert_allclose(column["logprobs"], sample.inference_logprobs, atol=1e-6)
        np.testing.assert_allclose(column["advantages"], sample.advantages, atol=1e-6)
        np.testing.assert_allclose(column["ce"], sample.ce_weights, atol=1e-6)
        assert "rl" not in column and "ref_kl" not in column
        assert shown["rewards"] == {"right": 0.5} and shown["task"] == {"prompt": "say it"}


def test_the_facts_name_the_algorithm_of_each_env(tmp_path):
    _, out, _ = made(tmp_path)
    facts = blocks(out)["facts"]
    assert facts["algorithms"]["words"]["type"] == "observing"
    assert facts["algorithms_again"] is None and facts["has_exports"] is False
    assert facts["has_tokenizer"] is False


def test_an_env_that_is_only_evaluated_has_no_algorithm(tmp_path):
    run_dir, _, _ = made(tmp_path)
    file = run_dir / "configs/run.json"
    config = json.loads(file.read_text())
    assert [env["name"] for env in config["orchestrator"]["train"]["env"]] == ["words"]
    config["orchestrator"]["train"]["env"][0]["name"] = "others"
    config["orchestrator"]["eval"]["env"] = [{"id": "some-words", "name": "words"}]
    file.write_text(json.dumps(config))
    write_report(run_dir, tmp_path / "again.html")
    assert [*blocks(tmp_path / "again.html")["facts"]["algorithms"]] == ["others"]


def test_the_page_needs_no_other_file(tmp_path):
    _, out, _ = made(tmp_path)
    text = re.sub(r'<script type="text/plain".*?</script>', "", out.read_text())
    addresses = re.findall(r"https?://[^\"' ]+", text)
    assert addresses == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert not re.search(r"<link|\bsrc=|@import|url\(|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text and "{{" not in text


def test_the_text_of_a_rollout_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script>"
    run_dir = tmp_path / "<b>run"
    make_run(run_dir, "centred")
    path = step_files(run_dir)[1]
    path.write_bytes(path.read_bytes().replace(b"\xa6say it", b"\xa6</scr>"))
    out = tmp_path / "page.html"
    write_report(run_dir, out)
    assert evil not in out.read_text() and "</scr>" not in out.read_text()
    assert "<title>&lt;b&gt;run" in out.read_text()
    assert blocks(out)["chunk-0"][0]["task"] == {"prompt": "</scr>"}


def test_the_command_writes_into_the_run_directory(tmp_path):
    make_run(tmp_path / "run", "centred")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0 and re.search(r"wrote .*report.html: \d+ rollouts", result.output)
    assert (tmp_path / "run" / "report.html").exists()
    assert [path.name for path in (tmp_path / "run").glob("*.tmp")] == []
    with pytest.raises(ConfigError, match="not a run directory"):
        write_report(tmp_path, tmp_path / "page.html")
    with pytest.raises(RunError, match="cannot be written"):
        write_report(tmp_path / "run", tmp_path / "missing" / "page.html")


def test_a_run_without_rollouts_has_a_page_of_curves(tmp_path):
    make_run(tmp_path / "run", "centred", steps=0)
    facts = write_report(tmp_path / "run", tmp_path / "page.html")
    assert facts.num_rollouts == 0
    assert blocks(tmp_path / "page.html")["facts"]["algorithms"]["words"]["type"] == "centred"


# -- what the trainer saw ------------------------------------------------------------------------


def sample_of(size=4, token=5):
    mask = np.arange(size) >= 2
    return Sample(
        token_ids=np.arange(size) + token, loss_mask=mask,
        inference_logprobs=np.where(mask, np.float32(-0.1), 0),
    )  # fmt: skip


def export(run_dir, *samples, env="words", step=1, **columns):
    directory = run_dir / "token_exports" / f"step_{step}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "rank_0.jsonl").open("a") as file:
        for sample in samples:
            record = {
                "env_name": env, "token_ids": sample.token_ids.tolist(),
                "inference_logprobs": sample.inference_logprobs.tolist(), **columns,
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")


def test_an_exported_sequence_finds_its_sample_by_env_tokens_and_logprobs(tmp_path):
    mine, other = sample_of(), sample_of(token=6)
    export(tmp_path, other, trainer_logprobs=[None, None, -9.0, -9.0])
    export(
        tmp_path, mine, trainer_logprobs=[None, None, -0.5, -0.25],
        importance_ratio=[None, None, 2.0, 0.5], is_masked=[None, None, True, False], entropy=None,
    )  # fmt: skip
    exports = StepExports(tmp_path, 1, seq_len=64)
    assert exports and exports.take("elsewhere", mine) == {}
    assert exports.take("words", mine) == {
        "trainer_logprobs": [None, None, -0.5, -0.25],
        "ratio": [None, None, 2.0, 0.5],
        "is_masked": [None, None, True, False],
    }
    assert exports.take("words", mine) == {}, "each exported sequence is taken once"


def test_a_sample_cut_to_seq_len_finds_its_packed_part(tmp_path):
    whole = sample_of(6)
    cut = Sample(
        token_ids=whole.token_ids[:4], loss_mask=whole.loss_mask[:4],
        inference_logprobs=whole.inference_logprobs[:4],
    )  # fmt: skip
    export(tmp_path, cut, trainer_logprobs=[None, None, -0.5, -0.25])
    seen = StepExports(tmp_path, 1, seq_len=4).take("words", whole)
    assert seen == {"trainer_logprobs": [None, None, -0.5, -0.25, None, None]}


def test_a_run_without_exports_joins_nothing(tmp_path):
    exports = StepExports(tmp_path, 1, seq_len=4)
    assert not exports and exports.take("words", sample_of()) == {}


def test_only_trained_samples_are_joined(tmp_path):
    sample = sample_of()
    export(tmp_path, sample, trainer_logprobs=[None, None, -0.5, -0.25])
    rollout = Rollout(env="words", example_id=0, group_id=0, reward=0.0, samples=[sample])
    dropped = data.shown(StoredRollout(rollout, "stale"), None, StepExports(tmp_path, 1, 64))
    kept = data.shown(StoredRollout(rollout, None), None, StepExports(tmp_path, 1, 64))
    assert "trainer_logprobs" not in dropped["samples"][0]
    assert kept["samples"][0]["trainer_logprobs"] == [None, None, -0.5, -0.25]


def test_an_export_that_cannot_be_read_is_named(tmp_path):
    export(tmp_path, sample_of())
    path = tmp_path / "token_exports" / "step_1" / "rank_0.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RunError, match=r"rank_0.jsonl: the token export cannot be read"):
        StepExports(tmp_path, 1, seq_len=4)


# -- small parts ---------------------------------------------------------------------------------


def test_a_column_of_one_value_is_that_value_and_floats_are_short():
    assert short(np.array([True, True])) == 1 and short(np.array([True, False])) == [1, 0]
    assert short(np.array([0.1, 0.25], np.float32)) == [0.1, 0.25]
    assert short(np.array([1 / 3] * 3)) == 0.333333
    alike = Sample(token_ids=[7, 7], loss_mask=[1, 1], inference_logprobs=[-1, -1])
    assert columns_of(alike) == {"ids": [7, 7], "mask": 1, "logprobs": -1.0}


def test_tokens_without_a_tokenizer_show_their_numbers(tmp_path):
    pieces = Pieces([tmp_path])
    pieces.add(np.array([5, 3, 5]))
    assert pieces.table() == {"ids": [3, 5], "texts": ["⟨3⟩", "⟨5⟩"]}
    assert not pieces.is_known


def test_curves_are_by_metric_and_in_the_order_of_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2, "time": 1.0, "loss/rl": 0.5}\n{"step": 1, "loss/rl": 0.123456789}\n'
        '{"step": 2, "eval/x": 1, "note": "no number"}\n{"step": 3, "lo'
    )
    points, end = data.curves(path)
    assert points == {"eval/x": [[2, 1.0]], "loss/rl": [[1, 0.123457], [2, 0.5]]}
    assert data.curves(path, end) == ({}, end)  # the rest of a line that is still being written
    with path.open("a") as file:
        file.write('ss/rl": 0.25}\n')
    assert data.curves(path, end) == ({"loss/rl": [[3, 0.25]]}, path.stat().st_size)
    assert data.curves(tmp_path / "missing") == ({}, 0)


def test_chunks_are_cut_by_tokens():
    def stored(size):
        column = np.zeros(size)
        sample = Sample(token_ids=column, loss_mask=column, inference_logprobs=column)
        rollout = Rollout(env="e", example_id=0, group_id=0, reward=0, samples=[sample])
        return StoredRollout(rollout, None)

    half = CHUNK_TOKENS // 2
    parts = _parts([stored(half), stored(half), stored(CHUNK_TOKENS + 1), stored(1)])
    assert [len(part) for part in parts] == [2, 1, 1]


def test_the_scale_leaves_out_the_largest_few_and_is_never_zero():
    assert data.scale([None, 0.0]) == 1.0
    assert data.scale([*([0.5] * 99), -100.0]) == 0.5


def test_long_texts_are_cut_and_tables_become_json():
    texts = data._texts({"long": "x" * 3000, "table": {"a": [1]}})
    assert len(texts["long"]) == data.TEXT_LIMIT + 2 and texts["table"] == '{"a":[1]}'


def test_an_algorithm_shows_its_settings():
    table = AlgoConfig.model_validate({"type": "x", "tau": 0.5})
    described = data.describe(table)
    assert described["type"] == "x" and described["settings"]["tau"] == 0.5
