"""Liveness decides: salt, ageing, and who is waited for."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from waiting import LIMIT, until

from prime_rl import (
    Algorithm,
    ConfigError,
    FrozenModel,
    PluginConfig,
    PluginError,
    RolloutPlan,
    Source,
    hookimpl,
)
from prime_rl.config.contract import SamplingConfig
from prime_rl.env.environment import ExampleFailed
from prime_rl.env.episode import BranchTokens, ModelEndpoint, RolloutResult
from prime_rl.inference.timing import RetryPolicy
from prime_rl.orchestrator.context import Outages
from prime_rl.orchestrator.sampling import prepare
from prime_rl.orchestrator.sources import (
    ExternalSource,
    RolloutFailed,
    RolloutRequest,
    RolloutSource,
    Sampled,
    SampledFrozen,
)
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rundir.machine import free_ports
from prime_rl.testing import FakeHost, make_rollout


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("KEY", "secret")


ASK = RolloutRequest(group_id=7, example_id=2, member=3, policy_version=5, seed=11)
BRANCH = BranchTokens(
    token_ids=[1, 2, 3],
    sampled_mask=[False, True, True],
    logprobs=[0.0, -0.5, -0.25],
    roles=["user", "assistant", "assistant"],
    is_content=[True, True, True],
    node_ids=[0, 1, 1],
    policy_versions=None,
)
GOOD = RolloutResult(ok=True, reward=0.5, branches=[BRANCH], agent="solver")
REFUSED = RolloutResult(ok=False, error_type="ProviderError", error="gone", status_code=400)
AWAY = RolloutResult(ok=False, error_type="ProviderError", error="away", status_code=500)
OVERLOADED = RolloutResult(ok=False, error_type="ProviderError", error="full", status_code=503)


class Examples:
    def __getitem__(self, index):
        fields = {"prompt": f"word {index}"}
        return SimpleNamespace(id=index, fields=fields, with_prompt=lambda prompt: Hinted(prompt))


@dataclass
class Hinted:
    id: str
    """The prompt: it stands for the number of the example in ``Env.calls``."""


@dataclass
class Env:
    """Stands for the verifiers adapter: answers in turn, and remembers what it was asked."""

    answers: list
    examples: Examples = field(default_factory=Examples)
    num_examples: int = 4
    calls: list = field(default_factory=list)

    async def run(self, example, **asked):
        self.calls.append((example.id, asked))
        answer = self.answers[min(len(self.calls), len(self.answers)) - 1]
        return [answer]


class OneEndpoint:
    """Stands for the router: always the same endpoint."""

    async def run(self, key, episode):
        return await episode(ModelEndpoint("m", "http://127.0.0.1:1/v1"))


def live(*answers):
    env = Env(list(answers))
    return Sampled("a", env, OneEndpoint(), SamplingConfig(temperature=0.7)), env


@pytest.fixture
async def frozen():
    made = []

    def make(urls, *answers, client="tokens", on_waiting=lambda text: None, rendering=None):
        env, sampling = Env(list(answers)), SamplingConfig()
        table = {"name": "t", "base_url": urls, "api_key_var": "KEY"}
        model = FrozenModel(**table, max_concurrency=2, timeout=9)
        made.append(SampledFrozen("a", env, model, client, sampling, rendering, on_waiting))
        return made[-1], env

    yield make
    for source in made:
        await source.pool.close()


async def test_a_live_rollout_is_salted_by_its_version_and_ages():
    source, env = live(GOOD)
    (rollout,) = await source.produce(ASK)
    example, asked = env.calls[0]
    assert (example, asked["cache_salt"], asked["seed"], asked["group_id"]) == (
        "word 2",
        "5",
        11,
        7,
    )
    assert source.is_live and rollout.is_live and rollout.has_logprobs
    assert (rollout.policy_version, rollout.episode_id, rollout.agent) == (5, 3, "solver")
    assert rollout.task == {"prompt": "word 2"} and rollout.samples[0].temperature == 0.7


async def test_a_frozen_rollout_has_a_stable_cache_and_never_ages(there, frozen):
    source, env = frozen(there, GOOD)
    (rollout,) = await source.produce(ASK)
    _, asked = env.calls[0]
    assert asked["cache_salt"] is None
    assert asked["model"] == ModelEndpoint("t", there, "KEY", timeout=9)
    assert not source.is_live and not rollout.is_live and rollout.source == "frozen"


class Curious(Algorithm):
    """Samples every other member of a group hotter, with a hint."""

    name = "curious"

    @hookimpl
    async def prepare_rollout(self, plan):
        await asyncio.sleep(0)
        if plan.member % 2:
            plan.temperature, plan.max_completion_tokens = 1.5, 8
            plan.prompt = f"{plan.prompt}, step by step"


async def test_a_hook_changes_how_one_rollout_is_sampled_and_the_trainer_learns_of_it():
    seen = []

    class Looks:
        @hookimpl(wrapper=True)
        def prepare_rollout(self, plan):
            seen.append((plan.env, plan.group_id, plan.example_id, plan.member, plan.temperature))
            yield
            seen.append(plan.temperature)

    hooks = scope("a", Hooks(), [Looks(), Curious(PluginConfig())])
    source, env = live(GOOD)
    for member in (3, 4):
        ask = replace(ASK, member=member, prepare=hooks.prepare_rollout)
        (rollout,) = await source.produce(ask)
        assert rollout.samples[0].temperature == (1.5 if member == 3 else 0.7)
    (hinted, first), (plain, second) = env.calls
    assert (hinted, plain) == ("word 2, step by step", "word 2")
    first, second = first["sampling"], second["sampling"]
    assert (first.temperature, first.max_completion_tokens) == (1.5, 8)
    assert (second.temperature, second.max_completion_tokens) == (0.7, None)
    assert (first.top_p, first.top_k, first.min_p) == (1.0, -1, 0.0)
    assert seen == [("a", 7, 2, 3, 0.7), 1.5, ("a", 7, 2, 4, 0.7), 0.7]


@pytest.mark.parametrize(
    ("key", "value"),
    [("top_p", 0.9), ("temperature", 0.0), ("max_completion_tokens", 0), ("prompt", 3),
     ("extra_body", {"repetition_penalty": 1.1})],
)  # fmt: skip
async def test_a_plan_refuses_what_the_trainer_cannot_reproduce(key, value):
    with pytest.raises(ValidationError, match=key):
        setattr(RolloutPlan(), key, value)


async def test_a_plan_is_checked_again_and_the_runs_own_settings_stay():
    async def penalize(plan):
        plan.extra_body["repetition_penalty"] = 1.1

    source, _ = live(GOOD)
    with pytest.raises(ValidationError, match="repetition_penalty would shape"):
        await source.produce(replace(ASK, prepare=penalize))
    (rollout,) = await source.produce(ASK)
    assert rollout.samples[0].temperature == 0.7


async def test_a_temperature_that_the_algorithm_cannot_learn_at_is_refused():
    algorithm = Curious(PluginConfig())
    hooks = scope("a", Hooks(), [algorithm])
    env = SimpleNamespace(name="a", algorithm=algorithm, hooks=hooks, group_size=1, limits=None)
    env.group_size = 8
    await prepare(env, RolloutPlan(member=1))
    algorithm.needs_temperature = 1.0
    await prepare(env, RolloutPlan(member=0))
    with pytest.raises(PluginError, match=r"temperature = 1\.5, and 'curious' learns at 1\.0 only"):
        await prepare(env, RolloutPlan(member=1))


async def test_members_beyond_a_lowered_group_size_are_not_sampled():
    class Fewer(Curious):
        @hookimpl
        async def prepare_rollout(self, plan):
            assert plan.group_size == 4
            plan.group_size = 5 if plan.example_id == 9 else 2

    algorithm = Fewer(PluginConfig())
    hooks = scope("a", Hooks(), [algorithm])
    env = SimpleNamespace(name="a", algorithm=algorithm, hooks=hooks, group_size=4, limits=None)
    source, ran = live(GOOD)
    asks = [replace(ASK, member=m, prepare=partial(prepare, env)) for m in range(4)]
    assert [len(await source.produce(ask)) for ask in asks] == [1, 1, 0, 0]
    assert len(ran.calls) == 2
    with pytest.raises(PluginError, match=r"group_size = 5, expected at most the 4 of env 'a'"):
        await prepare(env, RolloutPlan(example_id=9))


async def test_a_failed_episode_is_unusable_and_says_how():
    source, _ = live(RolloutResult(ok=False, error_type="TaskError", error="no"))
    with pytest.raises(RolloutFailed) as caught:
        await source.produce(ASK)
    assert caught.value.result.error_type == "TaskError"


async def test_an_episode_without_trainable_tokens_is_unusable():
    bare = RolloutResult(ok=True, branches=[])
    source, _ = live(bare)
    with pytest.raises(RolloutFailed, match="no agent left tokens to train"):
        await source.produce(ASK)


async def test_an_example_that_the_env_cannot_make_costs_its_rollout():
    source, env = live(GOOD)

    class Failing:
        def __getitem__(self, index):
            raise ExampleFailed("no row")

    env.examples = Failing()
    with pytest.raises(RolloutFailed, match="no row"):
        await source.produce(ASK)


async def test_a_rollout_with_an_image_does_not_train():
    source, _ = live(replace(GOOD, has_images=True))
    with pytest.raises(RolloutFailed, match="there is no training on images"):
        await source.produce(ASK)


def trace_of(message, tools=()):
    data = SimpleNamespace(model_dump=lambda exclude_none: {"prompt": "its own"})
    return SimpleNamespace(
        messages=[message],
        nodes=[SimpleNamespace(tools=tools)],
        branches=[SimpleNamespace(tools=tools)],
        task=SimpleNamespace(data=data),
    )


class Models(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "t"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def there():
    """The URL of an endpoint that is there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Models)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def nobody():
    """The URL of a port that nobody listens on."""
    (port,) = free_ports(1)
    return port, f"http://127.0.0.1:{port}/v1"


async def test_an_endpoint_that_is_there_and_refuses_is_a_failure_like_any_other(there, frozen):
    source, env = frozen(there, REFUSED)
    with pytest.raises(RolloutFailed, match="gone"):
        await source.produce(ASK)
    assert len(env.calls) == 1


async def test_a_dead_replica_is_passed_over(there, frozen):
    _, dead = nobody()
    source, env = frozen([dead, there], GOOD)
    await source.produce(ASK)
    assert [asked["model"].base_url for _, asked in env.calls] == [there]


async def test_an_outage_pauses_names_the_endpoint_and_ends_when_it_is_back(frozen):
    outages = Outages()
    seen = []
    outages.changed = lambda: seen.append(outages.waiting_for)
    port, url = nobody()
    source, env = frozen(url, GOOD, on_waiting=outages.reporter())
    asking = asyncio.create_task(source.produce(ASK))
    await until(lambda: len(seen) == 2)
    where = f"env 'a': algo.sampling.source 't' at {url[:-3]}"
    assert seen[-1] == f"{where} did not answer /health: Connection refused"
    assert not asking.done()
    server = ThreadingHTTPServer(("127.0.0.1", port), Models)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        (rollout,) = await asyncio.wait_for(asking, LIMIT)
    finally:
        server.shutdown()
        server.server_close()
    assert rollout.reward == 0.5 and seen[-1] is None and len(env.calls) == 1


class Said(SimpleNamespace):
    """A message of the assistant, as verifiers has it."""

    def __init__(self, content):
        super().__init__(role="assistant", content=content)

    def model_dump(self, exclude_none):
        return {"role": self.role, "content": self.content}


async def test_replies_in_text_are_tokenized_as_the_policy_would_have_written_them(there, frozen):
    message = Said("b")
    trace = trace_of(message)
    reply = RolloutResult(ok=True, reward=1.0, trace=trace)
    source, env = frozen(there, reply, client="chat", rendering=FakeHost)
    (rollout,) = await source.produce(ASK)
    assert env.calls[0][1]["model"].client == "chat"
    (sample,) = rollout.samples
    assert sample.token_ids.tolist() == [ord("b")] and sample.loss_mask.tolist() == [True]
    assert not rollout.has_logprobs


async def test_the_end_of_a_reply_that_was_cut_off_is_not_trained(there, frozen):
    message = Said("bc")
    reply = RolloutResult(ok=True, trace=trace_of(message), is_truncated=True)
    source, _ = frozen(there, reply, client="chat", rendering=FakeHost)
    (rollout,) = await source.produce(ASK)
    assert rollout.samples[0].loss_mask.tolist() == [True, False]


async def test_a_reply_that_the_policy_could_not_have_written_costs_its_rollout(there, frozen):
    """A thought where the renderer has none, for example: the frozen model's text decides."""

    class Refusing(FakeHost):
        def supervised_samples(self, messages, tools=None):
            raise ConfigError("message 1 could not be sampled in a rollout")

    message = Said("b")
    reply = RolloutResult(ok=True, reward=1.0, trace=trace_of(message))
    source, _ = frozen(there, reply, client="chat", rendering=Refusing)
    with pytest.raises(RolloutFailed, match="cannot be tokenized: ConfigError: message 1 could"):
        await source.produce(ASK)


async def test_a_conversation_with_tools_cannot_be_told_from_its_text(there, frozen):
    message = Said("b")
    reply = RolloutResult(ok=True, trace=trace_of(message, tools=[{"name": "get"}]))
    source, _ = frozen(there, reply, client="chat", rendering=FakeHost)
    with pytest.raises(ConfigError, match="also tells the model of tools"):
        await source.produce(ASK)


async def test_an_endpoint_that_is_there_and_keeps_failing_is_a_failure_in_the_end(
    there, monkeypatch, frozen
):
    source, env = frozen(there, AWAY)
    monkeypatch.setattr(source.pool, "_pause", RetryPolicy(first_wait=0.001))
    with pytest.raises(RolloutFailed, match="away"):
        await source.produce(ASK)
    assert len(env.calls) == 5


async def test_an_endpoint_that_has_no_room_is_asked_until_it_has(there, monkeypatch, frozen):
    source, env = frozen(there, *[OVERLOADED] * 12, GOOD)
    monkeypatch.setattr(source.pool, "_pause", RetryPolicy(first_wait=0.001, longest_wait=0.01))
    await source.produce(ASK)
    assert len(env.calls) == 13


async def test_no_more_episodes_at_once_than_the_model_may_have(there, frozen):
    class Slow(Env):
        running, most = 0, 0

        async def run(self, example, **asked):
            self.running += 1
            self.most = max(self.most, self.running)
            await asyncio.sleep(0.01)
            self.running -= 1
            return [GOOD]

    source, _ = frozen(there, GOOD)
    source._environment = Slow([])
    await asyncio.gather(*(source.produce(ASK) for _ in range(6)))
    assert source._environment.most == 2


class Shelf(Source):
    name = "shelf"

    async def group(self, request):
        return [make_rollout(1.0, group_id=request.group_id)] * request.example_id


async def test_a_source_hands_out_whole_groups_and_an_empty_one_is_no_failure():
    source = ExternalSource("a", Env([]), Shelf(PluginConfig()))
    rollouts = await source.produce(ASK)
    assert source.whole_group and len(rollouts) == 2 and rollouts[0].group_id == 7
    assert await source.produce(RolloutRequest(7, 0, 5, 0, 11)) == []


def test_a_source_may_have_examples_of_its_own():
    class Own(Shelf):
        def task(self, example_id):
            return {"prompt": "its own"}

    assert ExternalSource("a", Env([]), Own(PluginConfig())).task(0) == {"prompt": "its own"}
    assert ExternalSource("a", Env([]), Shelf(PluginConfig())).task(1) == {"prompt": "word 1"}


def test_only_an_installed_source_can_have_nothing_to_give():
    assert RolloutSource().is_ready()
    for has_more in (True, False):
        source = SimpleNamespace(is_ready=has_more)
        assert ExternalSource("e", None, source).is_ready() is has_more
