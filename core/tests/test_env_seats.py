"""Who plays an env's agents decides what trains."""

from types import SimpleNamespace

import pytest

from prime_rl import ConfigError
from prime_rl.config import RunConfig
from prime_rl.env.environment import Environment, EnvSettings
from prime_rl.orchestrator.context import EnvHost


def environment(id, **args):
    return Environment(
        EnvSettings(default_harness={"id": "in-process"}, id=id, name="a", args=args)
    )


def test_a_seat_that_the_policy_plays_has_no_sampling_of_its_own():
    with pytest.raises(ConfigError) as caught:
        environment("reverse-retry", agent={"sampling": {"temperature": 0.2}})
    assert str(caught.value) == (
        "env 'a': args.agent.sampling: the policy plays this agent, and the trainer has to "
        "reproduce how it is sampled. Set the env's sampling table instead, or give the agent a "
        "model and client of its own."
    )


def test_an_agent_with_a_model_of_its_own_is_none_of_the_policys():
    assert environment("propose-solve").agents == ("proposer", "solver")
    fixed = {"model": "other", "sampling": {"temperature": 0.1}}
    assert environment("propose-solve", solver=fixed).agents == ("proposer",)


@pytest.mark.parametrize(("takes", "fits"), [(8, False), (16, True), (None, True)])
async def test_a_reference_that_takes_less_than_a_rollout_may_have_is_refused_at_start(takes, fits):
    class Pool:
        where, model, max_model_len = "env 'a': reference", "big", takes

        async def wait_ready(self, timeout):
            pass

    config = RunConfig(model={"name": "m"}, max_steps=1, inference={"max_model_len": 16})
    shared = SimpleNamespace(scores=None, run=SimpleNamespace(config=config))
    host = EnvHost("a", None, shared)
    host._connected.append(Pool())
    if fits:
        return await host.wait_ready(1.0)
    with pytest.raises(ConfigError, match=r"'big' takes 8 tokens .* a rollout may have 16"):
        await host.wait_ready(1.0)
