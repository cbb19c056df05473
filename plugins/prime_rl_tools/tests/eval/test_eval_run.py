"""``prime-rl eval`` against a scripted endpoint: figures worked out by counting, files, resume."""

import json
import re
from collections import Counter

import pytest
from eval_endpoint import Endpoint, command, exact, make_run, served

from prime_rl.errors import ConfigError
from prime_rl_environments.tiny.tokenizer import build_tokenizer

NUM_EXAMPLES = 4


def rows(folder, env="reverse-text"):
    return [json.loads(line) for line in (folder / env / "rollouts.jsonl").read_text().splitlines()]


SIZE = ("--num-examples", NUM_EXAMPLES, "--group-size", 4)


def test_the_figures_are_those_counted_from_the_traces(tmp_path):
    with served(exact) as endpoint:
        done = command(endpoint, tmp_path / "out", *SIZE, "--json", "--temperature", 0.5,
                       "--max-tokens", 9, "--seed", 100)  # fmt: skip
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)["envs"]["reverse-text"]
    found = rows(tmp_path / "out")
    assert not [(row["error_type"], row["error"]) for row in found if not row["ok"]]
    assert {(row["example"], row["member"]) for row in found} == {
        (e, m) for e in range(NUM_EXAMPLES) for m in range(4)
    }
    for row in found:  # counted from the conversation
        asked, answered = (message["content"] for message in row["messages"])
        right = sum(a == b for a, b in zip(asked[::-1], answered, strict=True)) / len(asked)
        assert row["reward"] == pytest.approx(right)
        assert row["usage"] == [len(asked), 3]
    # Each example was right twice in four: pass@1 = 1/2, pass@2 = 1 - C(2,2)/C(4,2) = 5/6
    assert printed["avg@4"] == pytest.approx(sum(row["reward"] for row in found) / 16)
    assert printed["pass@1"] == printed["pass^1"] == printed["avg@4"] == 0.5
    assert (printed["pass@2"], printed["pass^2"]) == (pytest.approx(5 / 6), pytest.approx(1 / 6))
    assert (printed["pass@4"], printed["pass^4"]) == (1.0, 0.0)
    assert printed["all/reward/stderr"] == 0.0 and printed["all/num_output_tokens/mean"] == 3.0
    assert "policy_version" not in printed and printed["errors"] == {}
    sent = endpoint.bodies
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in sent} == {
        (0.5, 9, "small")
    }
    assert sorted(body["seed"] for body in sent) == list(range(100, 116))
    assert (
        json.loads((tmp_path / "out/summary.json").read_text())["envs"]["reverse-text"] == printed
    )


def test_failures_are_counted_by_kind_and_sampled_again_on_resume(tmp_path):
    with served(lambda word, times: 500 if times <= 2 else word[::-1]) as endpoint:
        first = command(endpoint, tmp_path, *SIZE)
        assert first.exit_code == 0
        assert "reverse-text: 8 failed: ProviderError 500: " in first.stdout
        rates, *_ = re.split(r"(?m)^failed \(reward 0\) +8 *$", first.stdout)
        assert rates != first.stdout
        # Two of four failed, two are right: pass@1 = 1/2, pass@2 = 1 - C(2,2)/C(4,2) = 5/6
        assert re.search(r"pass@1 +0\.5000", rates) and re.search(r"pass@2 +0\.8333", rates)
        assert sum(endpoint.asked.values()) == 16
        before = [row for row in rows(tmp_path) if row["ok"]]
        with pytest.raises(ConfigError, match=r"holds an evaluation\. Add --resume to continue it"):
            command(endpoint, tmp_path, *SIZE)
        second = command(endpoint, tmp_path, *SIZE, "--json", "--resume")
        assert sum(endpoint.asked.values()) == 24  # the eight that failed
        printed = json.loads(second.stdout)["envs"]["reverse-text"]
        assert (printed["num_rollouts"], printed["num_failed"], printed["pass^4"]) == (16, 0, 1.0)
        assert (
            printed["all/num_output_tokens/mean"] == 3.0 and printed["all/num_branches/mean"] == 1.0
        )
        assert [row for row in rows(tmp_path) if row["ok"]][: len(before)] == before
        with pytest.raises(ConfigError, match=r"sampling.temperature was None, is 0.0\. Name"):
            command(endpoint, tmp_path, *SIZE, "--resume", "--temperature", 0)


def test_if_every_rollout_fails_the_exit_code_is_1(tmp_path):
    with served(lambda word, times: 429) as endpoint:
        done = command(endpoint, tmp_path, "--num-examples", 2)
    assert done.exit_code == 1
    assert "2 failed: ProviderError 429: " in done.stdout and "avg@1" in done.stdout


TWO = """
[orchestrator.eval.sampling]
temperature = 0.25
[[orchestrator.eval.env]]
id = "reverse-text"
name = "first:half"
num_examples = 2
[[orchestrator.eval.env]]
id = "reverse-text"
name = "greedy"
sampling = {temperature = 0.0}
num_examples = 3
"""


def test_the_toml_of_a_run_gives_several_envs(tmp_path):
    (tmp_path / "two.toml").write_text(TWO)
    with served(lambda word, times: word[::-1], models=("small",)) as endpoint:
        done = command(endpoint, tmp_path / "out", "--orchestrator.eval.env.0.num_examples", 1,
                       what=[str(tmp_path / "two.toml")], model=None)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "first:half" in done.stdout and "greedy" in done.stdout
    assert len(rows(tmp_path / "out", "first_half")) == 1
    assert len(rows(tmp_path / "out", "greedy")) == 3
    assert Counter(body["temperature"] for body in endpoint.bodies) == {0.25: 1, 0.0: 3}


def test_a_run_is_evaluated_with_its_renderer(tmp_path):
    run_dir = make_run(tmp_path)
    tokenizer, asked = build_tokenizer(), []

    class Tokens(Endpoint):
        """Answers the engine contract's token route with the word of the prompt, backwards."""

        routes = ("/inference/v1/generate",)

        def chat(self, body):
            if not body:
                return 400, {"error": {"message": "no tokens"}}
            prompt = tokenizer.decode(body["token_ids"])
            asked.append(prompt)  # requests come side by side
            word = prompt.split("\n")[1].removesuffix("<|im_end|>")
            ids = tokenizer.encode(word[::-1] + "<|im_end|>", add_special_tokens=False)
            logprobs = [{"token": f"token_id:{i}", "token_id": i, "logprob": -1.0} for i in ids]
            choice = {"index": 0, "token_ids": ids, "finish_reason": "stop",
                      "logprobs": {"content": logprobs}}  # fmt: skip
            return 200, {"request_id": "x", "choices": [choice]}

    with served(exact, kind=Tokens) as endpoint:
        done = command(endpoint, tmp_path / "out", "--json", what=[str(run_dir)])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["envs"]["reverse-text"]["avg@1"] == 1.0
    assert len(asked) == 3  # as the run's config says
    assert all(
        prompt.startswith("<|im_start|>user\n")
        and prompt.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
        for prompt in asked
    )
    for row in rows(tmp_path / "out"):  # for --resume: 18 - 6 tokens beside the word's; its end
        word = row["messages"][0]["content"]
        assert row["usage"] == [len(word) + 12, len(word) + 1]
    record = json.loads((tmp_path / "out/eval.json").read_text())
    assert record["renderer"] == {
        "name": "qwen3",
        "enable_thinking": False,
        "thinking_retention": None,
    }
