"""Tables of agents: what does not fit the taskset is refused before any process starts."""

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.agents import parts_of
from prime_rl_app.config import installed_defaults, merge
from prime_rl_app.resolve import Resolved

OPPONENT = {
    "model": "other",
    "client": {"type": "eval", "base_url": "http://127.0.0.1:1/v1"},
}


def resolved(agents, **env):
    """The env ``propose-solve``, whose agents are ``proposer`` and ``solver``."""
    table = {
        "model": {"name": "tiny-chat"},
        "max_steps": 1,
        "orchestrator": {"train": {"env": [{"id": "propose-solve", "agents": agents, **env}]}},
    }
    return Resolved(RunConfig.model_validate(merge(installed_defaults(), table)))


def refusal(agents, **env):
    with pytest.raises(ConfigError) as caught:
        resolved(agents, **env).algorithm(0)
    return str(caught.value)


def of(name, **settings):
    return {"algo": {"type": name, **settings}}


def test_an_agent_that_the_taskset_lacks_is_named_with_those_that_it_has():
    assert refusal({"slover": of("rae")}) == (
        "env 'propose-solve': agents.slover: taskset 'propose-solve' has no agent of this name. "
        "Its agents: proposer, solver. Did you mean 'solver'?"
    )


def test_an_agent_with_a_model_of_its_own_has_no_algorithm():
    assert "args.proposer gives this agent a model of its own, so it never trains" in refusal(
        {"proposer": of("rae")}, args={"proposer": OPPONENT}
    )


def test_an_agent_has_to_be_left_to_train():
    assert "no agent is left to train (proposer, solver)" in refusal(
        {"proposer": {"algo": "none"}, "solver": {"algo": "none"}}
    )


def test_an_algorithm_that_no_agent_reads_is_refused():
    both = {"proposer": of("rae"), "solver": of("grpo_std")}
    assert "algo is read by no agent: each that trains (proposer, solver)" in refusal(
        both, algo={"type": "grpo"}
    )


def test_agents_have_no_part_in_the_rollouts_of_a_source():
    algo = {"type": "sft", "sampling": {"source": {"type": "dataset", "path": "rows.jsonl"}}}
    assert "come from source 'dataset', not from its agents" in refusal(
        {"solver": of("rae")}, algo=algo
    )


def test_every_agent_is_checked_by_its_own_algorithm():
    made = resolved({"proposer": of("rae", decay=0.5), "solver": {"algo": "none"}})
    parts = parts_of(made.algorithm(0))
    assert [(part.agent, part.algorithm.name) for part in parts] == [("proposer", "rae")]
    assert parts[0].algorithm.config.decay == 0.5


def test_a_wrong_setting_is_named_by_the_agent():
    assert refusal({"proposer": of("rae", decay=2.0)}) == (
        "env 'propose-solve': agents.proposer.algo (algorithm 'rae').decay: Input should be less "
        "than 1 (got 2.0)"
    )
