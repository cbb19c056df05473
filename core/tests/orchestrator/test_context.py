"""What core lends to an env's algorithm."""

from types import SimpleNamespace

import pytest

from prime_rl import BranchFailed, ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.context import EnvHost
from prime_rl.testing import make_rollout


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


@pytest.mark.parametrize(
    ("agents", "env", "said"),
    [
        (("white", "black"), {"id": "a"}, "it has the agents white, black"),
        (("agent",), {"id": "a", "address": ["tcp://h:1"]}, "its workers are elsewhere"),
    ],
)
async def test_an_env_that_cannot_go_on_from_the_middle_of_a_rollout(agents, env, said):
    train = {"env": [env]}
    config = RunConfig(model={"name": "m"}, max_steps=1, orchestrator={"train": train})
    run = SimpleNamespace(config=config)
    host = EnvHost("a", SimpleNamespace(agents=agents), SimpleNamespace(run=run, branches=None))
    rollout = make_rollout(1.0)
    with pytest.raises(ConfigError, match=f"cannot go on from the middle of a rollout: {said}"):
        await host.rollout(rollout.prefix(2))
    with pytest.raises(ConfigError, match=said):
        await host.reward(rollout.samples[0], rollout)


async def test_branches_are_counted_and_have_seeds_of_their_own():
    asked = []

    class Branches:
        async def rollout(self, prefix, environment, *, sampling, seed, seq_len):
            asked.append(seed)
            if prefix.end == 0:
                raise BranchFailed("no")
            return make_rollout(1.0, completion=4)

    train = {"env": [{"id": "a"}]}
    config = RunConfig(model={"name": "m"}, max_steps=1, orchestrator={"train": train})
    run = SimpleNamespace(config=config)
    host = EnvHost(
        "a", SimpleNamespace(agents=("agent",)), SimpleNamespace(run=run, branches=Branches())
    )
    rollout = make_rollout(1.0)
    for end, number in ((2, 0), (2, 1), (3, 0), (2, 0)):
        await host.rollout(rollout.prefix(end), number=number)
    with pytest.raises(BranchFailed):
        await host.rollout(rollout.prefix(0))
    assert asked[0] == asked[3] and len(set(asked)) == 4
    assert host.take_metrics() == {
        "scoring/a/branches": 5,
        "scoring/a/sampled_tokens": 16,
        "scoring/a/failed_branches": 1,
    }
