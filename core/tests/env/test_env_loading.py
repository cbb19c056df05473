"""Agents of an env: the policy's train, others do not."""

import pytest

from prime_rl import ConfigError
from prime_rl.env.environment import Environment, EnvSettings


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


def test_the_policy_does_not_play_an_agent_with_a_model_of_its_own():
    assert environment("propose-solve").agents == ("proposer", "solver")
    fixed = {"model": "other", "sampling": {"temperature": 0.1}}
    assert environment("propose-solve", solver=fixed).agents == ("proposer",)
