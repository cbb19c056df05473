"""Agents of an env: the policy's train, others do not. What its programs may see."""

import asyncio
import os
import sys
from types import ModuleType

import pytest
import verifiers.v1 as vf
from env_cases import PlainTaskset

from prime_rl import ConfigError
from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import import_verifiers


class Seats(vf.EnvConfig):
    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()


class ProposeSolve(vf.Env[Seats]):
    """Two agents. Nothing runs them here."""

    async def run(self, task, agents): ...


class OneAgent(vf.SingleAgentEnv, vf.Env[vf.SingleAgentEnvConfig]):
    """The one agent is called ``agent``."""


@pytest.fixture
def environment(monkeypatch):
    def make(*classes, **args):
        module = ModuleType("seats")
        module.__all__ = [each.__name__ for each in classes]
        vars(module).update({each.__name__: each for each in classes})
        monkeypatch.setitem(sys.modules, "seats", module)
        harness = {"id": "small-harness"}
        return Environment(EnvSettings(default_harness=harness, id="seats", name="a", args=args))

    return make


def test_a_seat_that_the_policy_plays_has_no_sampling_of_its_own(environment):
    with pytest.raises(ConfigError) as caught:
        environment(PlainTaskset, OneAgent, agent={"sampling": {"temperature": 0.2}})
    assert str(caught.value) == (
        "env 'a': args.agent.sampling: the policy plays this agent, and the trainer has to "
        "reproduce how it is sampled. Set the env's sampling table instead, or give the agent a "
        "model and client of its own."
    )


def test_the_policy_does_not_play_an_agent_with_a_model_of_its_own(environment):
    assert environment(PlainTaskset, ProposeSolve).agents == ("proposer", "solver")
    fixed = {"model": "other", "sampling": {"temperature": 0.1}}
    assert environment(PlainTaskset, ProposeSolve, solver=fixed).agents == ("proposer",)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"sovler": {"max_turns": 2}},
            "args.sovler: unknown key; did you mean 'solver'? known here: prompt, "
            "proposer, solver, system_prompt (agents: proposer, solver)",
        ),
        (
            {"promt": "ab"},
            "args.promt: unknown key; did you mean 'prompt'? known here: prompt, "
            "proposer, solver, system_prompt (agents: proposer, solver)",
        ),
        ({"solver": {"turns": 2}}, "args.solver.turns: unknown key (got 2)"),
        (
            {"solver": "strong"},
            "args.solver is one of the env's agents: expected a table such as {max_turns = 2}, got "
            "'strong'",
        ),
    ],
)
def test_a_wrong_agent_is_an_error_with_the_agents_that_exist(environment, args, says):
    with pytest.raises(ConfigError) as caught:
        environment(PlainTaskset, ProposeSolve, **args)
    said = str(caught.value).removeprefix("env 'a': ").removeprefix("args or harness do not fit: ")
    assert said == says


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
    import_verifiers(EnvSettings(default_harness={}, id="small-harness", name="a"))
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
