"""What ``prime-rl eval`` reads from a command line, and what it refuses."""

import pytest
from eval_endpoint import command, exact, make_run, served

from prime_rl.errors import ConfigError
from prime_rl_tools.commands.options import validated
from prime_rl_tools.eval.request import find_endpoint, read_envs, run_named, run_renderer
from prime_rl_tools.eval.settings import EvalSettings


def test_a_run_is_found_by_its_name_unless_a_taskset_has_that_name(tmp_path):
    make_run(tmp_path)
    make_run(tmp_path, "reverse-text")
    assert run_named(["a-run"], tmp_path) == tmp_path / "a-run"
    assert run_named(["reverse-text"], tmp_path) is None
    path = str(tmp_path / "reverse-text")
    assert run_named([path], tmp_path) == tmp_path / "reverse-text"
    assert run_named(["b-run"], tmp_path) is None


def refusal(call, *arguments, **settings):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **settings)
    return str(caught.value)


def test_an_unusable_endpoint_is_refused_with_the_reason(monkeypatch):
    assert "does not answer (ConnectError" in refusal(
        find_endpoint, "http://127.0.0.1:9/v1", None, None
    )
    assert "expected http(s)://HOST" in refusal(find_endpoint, "localhost:8000", None, None)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert "NO_SUCH_KEY is not set" in refusal(find_endpoint, "http://x/v1", None, "NO_SUCH_KEY")
    monkeypatch.setenv("WRONG", "guess")
    monkeypatch.setenv("RIGHT", "sesame")
    with served(exact, key="sesame") as endpoint:
        assert "it requires a key" in refusal(find_endpoint, endpoint.url, "small", None)
        assert "the key in WRONG" in refusal(find_endpoint, endpoint.url, "small", "WRONG")
        found = find_endpoint(endpoint.url + "/", "small", "RIGHT")
        assert (found.name, found.base_url, found.client) == ("small", endpoint.url, "chat")
        assert "no model 'smal' at" in refusal(find_endpoint, endpoint.url, "smal", "RIGHT")
        assert "Did you mean 'small'" in refusal(find_endpoint, endpoint.url, "smal", "RIGHT")
        assert "which model at" in refusal(find_endpoint, endpoint.url, None, "RIGHT")
    with served(exact, models=None) as endpoint:  # it lists none: what is asked for is believed
        assert find_endpoint(endpoint.url, "mine", None).name == "mine"
        assert "answers 404" in refusal(find_endpoint, endpoint.url, None, None)


def test_an_invalid_command_line_is_refused_with_the_reason(tmp_path):
    def refused(what, overrides=()):
        return refusal(read_envs, what, overrides, EvalSettings())

    expected = "expected one ENV, one RUN or TOML files"
    assert expected in refused(["a", "b"])
    assert refused(["a"], ["--bogus", "3"]).startswith("--bogus: unknown option. prime-rl eval")
    misspelt = refused(["a"], ["--base-ulr", "x"])
    assert misspelt.startswith("--base_ulr: unknown option; did you mean --base-url?")
    assert expected in refused([])
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\n")
    assert "no table [[orchestrator.eval.env]]" in refused([str(file)])
    assert "--trainer.lr: unknown option. prime-rl eval takes --orchestrator.eval.KEY" in refused(
        [str(file)], ["--trainer.lr", "3"]
    )
    file.write_text("[orchestrator.evals]\n")
    assert "orchestrator.evals: unknown key; did you mean 'eval'?" in refused([str(file)])


def test_options_are_checked_and_laid_over_every_env():
    options = {"env_args": '{"x": 1}', "temperature": 0.0}
    evaluation = read_envs(["a"], [], validated(EvalSettings, options))
    (env,) = evaluation.env
    assert env.args == {"x": 1} and env.num_examples == 64 and env.sampling.temperature == 0.0
    for options, reason in [
        ({"num_examples": 0}, "--num-examples: Input should be greater than 0 (got 0)"),
        ({"top_p": 1.5}, "--top-p: Input should be less than or equal to 1"),
        ({"env_args": "{"}, "--env-args: not JSON"),
        ({"env_args": '{"x": 1, "x": 2}'}, "--env-args: not JSON: the key 'x' stands twice"),
        ({"env_args": "[1]"}, "--env-args: expected a JSON object"),
    ]:
        assert reason in refusal(validated, EvalSettings, options)


def test_an_endpoint_that_takes_no_tokens_is_refused_for_a_run(tmp_path):
    run_dir = make_run(tmp_path)
    with (
        served(exact) as endpoint,
        pytest.raises(ConfigError, match=r"POST .*/inference/v1/generate answers 404"),
    ):
        command(endpoint, tmp_path / "out", what=[str(run_dir)])
    for file in (run_dir / "model").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer in .*weights nor in .*model"):
        run_renderer(run_dir)
    (run_dir / "configs/launch.json").unlink()  # as after a dry run
    with pytest.raises(ConfigError, match=r"no tokenizer in .*weights\. Evaluate an ENV"):
        run_renderer(run_dir)


def test_missing_envs_and_equal_names_are_refused(tmp_path):
    with served(exact) as endpoint:
        with pytest.raises(ConfigError, match=r"no taskset 'reverse-tex'.*Did you mean"):
            command(endpoint, tmp_path, what=["reverse-tex"])
        twice = tmp_path / "twice.toml"
        twice.write_text('[[orchestrator.eval.env]]\nid = "reverse-text"\n' * 2)
        with pytest.raises(ConfigError, match="2 envs are called 'reverse-text'"):
            command(endpoint, tmp_path, what=[str(twice)])
        with pytest.raises(ConfigError, match="--env-args: not JSON"):
            command(endpoint, tmp_path, "--env-args", "{")
        with pytest.raises(ConfigError, match="args"):
            command(endpoint, tmp_path / "x", "--env-args", '{"no_such": 1}')
    assert endpoint.bodies == []
