"""Agents of an env: the policy's train, others do not. What its programs may see."""

import asyncio
import os

import pytest

from prime_rl import ConfigError
from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import import_verifiers


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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"sovler": {"max_turns": 2}},
            "args.sovler: Extra inputs are not permitted; did you mean 'solver'? The env's agents: "
            "proposer, solver. (got {'max_turns': 2})",
        ),
        (
            {"splitt": "train"},
            "args.splitt: Extra inputs are not permitted; did you mean 'split'? The env's agents: "
            "proposer, solver. (got 'train')",
        ),
        ({"solver": {"turns": 2}}, "args.solver.turns: Extra inputs are not permitted (got 2)"),
        (
            {"solver": "strong"},
            "args.solver is one of the env's agents: expected a table such as {max_turns = 2}, got "
            "'strong'",
        ),
    ],
)
def test_a_wrong_agent_is_an_error_with_the_agents_that_exist(args, says):
    with pytest.raises(ConfigError) as caught:
        environment("propose-solve", **args)
    assert (
        str(caught.value).removeprefix("env 'a': ").removeprefix("args or harness do not fit: ")
        == says
    )


SECRETS = {
    "PRIME_RL_ADMIN_KEY": "1",
    "PRIME_RL_ENGINE_API_KEY": "2",
    "HF_TOKEN": "3",
    "AWS_SECRET_ACCESS_KEY": "4",
    "WANDB_API_KEY": "5",
    "MY_PASSWORD": "6",
    "GITHUB_TOKEN": "7",
}


@pytest.mark.parametrize("method", ["run", "open_process", "run_background"])
def test_a_program_of_a_rollout_gets_no_key_of_ours(method, tmp_path, monkeypatch):
    """verifiers' own runtime starts the program, in each of its ways."""
    import_verifiers(EnvSettings(default_harness={}, id="reverse-text", name="a"))
    from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    async def environment_of_program():
        runtime = SubprocessRuntime(SubprocessConfig(), name="test")
        runtime.workdir = tmp_path
        command, env = ["env"], {"GIVEN_ON_PURPOSE": "yes"}
        if method == "run":
            return (await runtime.run(command, env)).stdout
        if method == "open_process":
            await runtime.open_process(command, env)
            return (await runtime._background[0].communicate())[0].decode()
        await runtime.run_background(command, env, "log")
        await runtime._background[0].wait()
        return (tmp_path / "log").read_text()

    lines = asyncio.run(environment_of_program()).splitlines()
    found = dict(line.partition("=")[::2] for line in lines)
    assert found["GIVEN_ON_PURPOSE"] == "yes" and found["PATH"] == os.environ["PATH"]
    assert not found.keys() & SECRETS.keys()
