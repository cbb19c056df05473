"""What core lends to an env's algorithm."""

from types import SimpleNamespace

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator import context
from prime_rl.orchestrator.context import EnvHost, rendering_of, scorer_over


@pytest.mark.parametrize(("takes", "fits"), [(8, False), (16, True), (None, True)])
async def test_a_reference_model_with_a_context_shorter_than_a_rollout_is_refused(
    takes, fits, tmp_path
):
    class Pool:
        label, max_model_len = "env 'a': reference 'big'", takes

        async def wait_ready(self, timeout):
            pass

    config = RunConfig(model={"name": "m"}, max_steps=1, inference={"max_model_len": 16})
    shared = SimpleNamespace(run=SimpleNamespace(config=config))
    host = EnvHost("a", None, shared)
    host._connected.append(Pool())
    if fits:
        return await host.wait_ready(1.0)
    with pytest.raises(ConfigError, match=r"'big' takes 8 tokens .* a rollout may have 16"):
        await host.wait_ready(1.0)


def test_what_the_host_lends_of_the_run(tmp_path):
    envs = [{"id": "a", "sampling": {"max_completion_tokens": 7}}, {"id": "b"}]
    train = {"env": envs, "sampling": {"max_completion_tokens": 9}}
    config = RunConfig(
        model={"name": "m"}, max_steps=1, seq_len=64, seed=5, orchestrator={"train": train}
    )
    run = SimpleNamespace(config=config, run_dir=tmp_path)
    engines = SimpleNamespace(policy=SimpleNamespace(version=3))
    shared = SimpleNamespace(
        run=run,
        engines=engines,
    )
    one, other = (EnvHost(env, None, shared) for env in ("a", "b"))
    assert (one.max_completion_tokens, other.max_completion_tokens) == (7, 9)
    assert (one.seq_len, one.seed, one.step) == (64, 5, 3)
    assert one.folder.is_dir() and one.folder != other.folder and tmp_path in one.folder.parents
    assert one.logger.name.endswith(".a")


def test_what_nothing_installed_can_lend_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr(context, "entries", lambda group: [])
    with pytest.raises(ConfigError, match=r"prime_rl\.scorers .* pip install prime-rl-engine-kit"):
        scorer_over(None, "m")
    with pytest.raises(ConfigError, match=r"pip install prime-rl-renderers"):
        rendering_of(tmp_path, None)
