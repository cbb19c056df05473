"""Whatever an environment or an engine returns: it trains, or it has failed with the reason."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.env.episode import LONGEST_REASON, RolloutResult
from prime_rl.env.rendering import vocab_size_of
from prime_rl.env.traces import LARGEST_REWARD, build_rollout, fault_of, results_of
from prime_rl.errors import StreamError
from prime_rl.orchestrator.packer import pack
from prime_rl.orchestrator.records import decode_rollouts, encode_rollouts
from prime_rl.wire import encode_batch

pytest.importorskip("verifiers", reason="needs the extra run")
import verifiers.v1 as vf
from verifiers.v1.episode import EnvInfo, Episode
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, ModelCall, Reward, Trace, TraceTask

VOCABULARY = 100


def trace_of(**fields: Any) -> Trace:
    """A question of two tokens and a reply of two, with a reward of 1."""
    question = MessageNode(
        message=vf.UserMessage(content="q"), token_ids=[5, 6], mask=[False, False]
    )
    reply = MessageNode(
        parent=0,
        message=vf.AssistantMessage(content="a"),
        sampled=True,
        token_ids=[7, 8],
        mask=[True, True],
        logprobs=[-1.0, -2.0],
    )
    data = vf.TaskData(prompt="q")
    trace = Trace(
        task=TraceTask(type="T", data=data),
        agent=AgentInfo(config=vf.AgentConfig()),
        nodes=[question, reply],
        rewards={"right": Reward(score=1.0)},
        metrics={"length": 2.0},
        ok=True,
        is_completed=True,
    )
    for name, value in fields.items():
        setattr(trace, name, value)
    return trace


def read(trace: Trace) -> list[RolloutResult]:
    episode = Episode(env=EnvInfo(), task=trace.task, ok=True)
    episode.traces = [trace]
    return results_of(episode, vocab_size=VOCABULARY)


def reason(trace: Trace) -> str:
    """Why the rollout has failed."""
    (result,) = read(trace)
    assert (result.ok, result.error_type, result.branches) == (False, "BadResult", [])
    assert result.num_sampled == 0  # nothing reads the trace any more
    return result.error or ""


def use(result: RolloutResult, folder: Path) -> None:
    """Train, save and read a rollout."""
    rollout = build_rollout(
        result, env="e", example_id=0, group_id=0, policy_version=0, temperature=1.0
    )
    rollout.task = result.task_fields
    (folder / "r").write_bytes(encode_rollouts(1, [(rollout, None)]))
    (stored,) = decode_rollouts(folder / "r")["rollouts"]
    assert stored.rollout.reward == rollout.reward
    assert rollout.turns is not None
    for sample in rollout.samples:
        assert np.isfinite(sample.inference_logprobs).all()
        assert sample.token_ids.min() >= 0 and sample.token_ids.max() < VOCABULARY
    rollout.assign_advantages(rollout.reward)
    rows = pack(rollout.samples, ["e"] * len(rollout.samples), 64)
    assert encode_batch(1, rows)


def test_a_well_formed_trace_trains(tmp_path):
    (result,) = read(trace_of())
    assert result.ok and result.branches[0].logprobs == [0.0, 0.0, -1.0, -2.0]
    use(result, tmp_path)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("logprobs", [-1.0, NAN], r"logprobs\[1\] is nan; expected the logprob of the sampling"),
        ("logprobs", [-INF, -1.0], r"logprobs\[0\] is -inf"),
        ("logprobs", [-1e39, -1.0], r"logprobs\[0\] is -1e\+39"),  # -inf in float32
        ("logprobs", [0.5, -1.0], r"logprobs\[0\] is 0.5; expected .* at most 0"),
        (
            "logprobs",
            [-1.0],
            r"its logprobs are \[-1.0\] \(1\); expected a number for each of the 2",
        ),
        ("logprobs", [-1.0, None], "its logprobs are"),
        ("logprobs", [-1.0] * 3, r"its logprobs are .*\(3\)"),
        ("mask", [True], r"its mask is \[True\] \(1\); expected True or False for each of its 2"),
        ("mask", [True] * 3, r"its mask is .* \(3\)"),
        ("mask", [True, None], "its mask is"),
        ("mask", [1, 2], "its mask is"),
        ("token_ids", [7, -1], r"token_ids\[1\] is -1; expected 0 to 99"),
        ("token_ids", [100, 7], r"token_ids\[0\] is 100; expected 0 to 99"),
        ("token_ids", [2**40, 7], r"token_ids\[0\] is 1099511627776"),
        ("token_ids", [10**30, 7], "its token_ids are"),
        ("token_ids", [7.5, 8], "its token_ids are .*expected a list of integers"),
        ("token_ids", [[7], [8]], "its token_ids are"),
        ("token_ids", [[7], [8, 9]], "ValueError"),
        ("token_ids", None, "its token_ids are None"),
        ("is_content", [True], "is_content has 1 values"),
        ("parent", 1, "its parent is 1; expected an earlier message or None"),
        ("parent", 7, "its parent is 7"),
        ("parent", -1, "its parent is -1"),  # would walk in circles
        ("parent", "0", "its parent is '0'"),
    ],
)
def test_a_malformed_message_fails_its_rollout(field, value, expected):
    trace = trace_of()
    setattr(trace.nodes[1], field, value)
    assert re.search(f"^message 1 of the trace: .*{expected}", reason(trace), re.DOTALL)


@pytest.mark.parametrize(
    "spans",
    [[(-1, 0, 2)], [(2**31, 0, 2)], [(0, -1, 2)], [(0, 0)], [("a", 0, 2)], [(0.5, 0, 2)], 7],
)
def test_malformed_versions_fail_their_rollout(spans):
    reason(trace_of(info={"weight_versions": {"1": spans}}))


def test_a_result_says_whether_a_message_has_an_image():
    parts = [{"type": "text", "text": "q"}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    for content, expected in ((parts, False), ([*parts, image], True)):
        trace = trace_of()
        trace.nodes[0].message = vf.UserMessage.model_validate({"content": content})
        (result,) = read(trace)
        assert (result.ok, result.has_images) == (True, expected)


def test_versions_that_are_no_table_fail_their_rollout():
    assert "expected a table by node" in reason(trace_of(info={"weight_versions": [1]}))


@pytest.mark.parametrize(
    "value", [NAN, INF, -INF, 1e308, -1e39, 2e18, 10**30, np.float16(INF), np.float32(INF)]
)
def test_a_reward_that_float32_cannot_hold_fails_its_rollout(value):
    """Its square too: normalizers divide by a standard deviation."""
    term = Reward.model_construct(score=value, weight=1.0)
    assert "the reward 'right' is" in reason(trace_of(rewards={"right": term}))


def test_a_sum_of_rewards_that_float32_cannot_hold_fails_its_rollout():
    terms = {name: Reward(score=1e17, weight=20.0) for name in "abcdef"}
    assert "the reward 'the sum' is 1.2e+19" in reason(trace_of(rewards=terms))


@pytest.mark.parametrize(
    "value", [NAN, INF, 1e39, "3", [1.0], 10**400, np.float16(INF), np.float32(NAN), 1j]
)
def test_a_metric_that_float32_cannot_hold_fails_its_rollout(value):
    assert "the metric 'length' is" in reason(trace_of(metrics={"length": value}))


@pytest.mark.parametrize("value", [[0.5, 0.5], [NAN], [1e308], ["x"], 0.5, None, {"0": 1.0}])
def test_malformed_rewards_of_turns_fail_their_rollout(value):
    trace = trace_of(info={"turn_rewards": value})
    with pytest.raises(StreamError, match=r"trace\.info\['turn_rewards'\]: got"):
        read(trace)


CYCLE: dict[str, Any] = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    "info",
    [
        {"text": "\ud800"},
        {"number": 2**70},
        {3: "a key that is no text"},
        {("a", "b"): 1},
        CYCLE,
    ],
    ids=str,
)
def test_info_that_no_file_can_hold_fails_its_rollout(info):
    assert "cannot be saved" in reason(trace_of(info=info))


def test_numbers_of_other_classes_become_floats(tmp_path):
    term = Reward.model_construct(score=Fraction(1, 4), weight=1.0)
    (result,) = read(trace_of(rewards={"right": term}, metrics={"length": np.float32(0.5)}))
    assert result.ok and (result.reward, result.rewards) == (0.25, {"right": 0.25})
    assert type(result.metrics["length"]) is float
    use(result, tmp_path)


def test_a_rollout_that_failed_keeps_its_own_reason_and_status():
    trace = trace_of()
    trace.record_error(ProviderError("the context is full", status_code=400))
    trace.nodes[1].mask = [None]
    (result,) = read(trace)
    assert result.error == "the context is full" and result.status_code == 400
    trace.nodes[1].mask = [True, True]
    trace.info = {"text": "\ud800"}
    (result,) = read(trace)
    assert result.error == "the context is full" and result.status_code == 400
    assert fault_of(result) is None


def test_a_reason_with_a_lone_surrogate_is_readable():
    trace = trace_of()
    trace.record_error(RuntimeError("\ud800 broke"))
    (result,) = read(trace)
    assert result.error == "? broke"


def test_a_long_reason_keeps_both_of_its_ends():
    """Each failed rollout logs its reason: a document in it would fill the log."""
    trace = trace_of()
    trace.record_error(RuntimeError("begin" + "x" * 200_000 + "end"))
    (result,) = read(trace)
    assert len(result.error) < LONGEST_REASON + 100
    assert result.error.startswith("beginxx") and result.error.endswith("xxend")
    assert "(180,008 characters left out)" in result.error


def test_the_vocabulary_is_that_of_the_model(tmp_path):
    assert vocab_size_of(tmp_path) is None
    for text, expected in (
        ('{"vocab_size": 300}', 300),
        ('{"text_config": {"vocab_size": 400}}', 400),
        ('{"vocab_size": null}', None),
        ("[]", None),
        ("{", None),
    ):
        (tmp_path / "config.json").write_text(text)
        assert vocab_size_of(tmp_path) == expected


# -- any trace ------------------------------------------------------------------------------------

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(0, VOCABULARY - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["\ud800", b"x", np.float32(1), np.int64(3), object(), Fraction(1, 3)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=2)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
COLUMN = st.lists(st.integers(-2, 120) | st.booleans() | st.floats() | st.none(), max_size=4) | JUNK
NODE_FIELDS = ("parent", "token_ids", "mask", "logprobs", "is_content", "sampled")
TRACE_FIELDS = ("info", "metrics", "rewards", "stop_condition", "is_timeout", "ok")
SPANS = st.lists(st.tuples(*[st.integers(-2, 2**32) | st.none()] * 3), max_size=2) | JUNK


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    trace = trace_of()
    for node in trace.nodes:
        for name in draw(st.lists(st.sampled_from(NODE_FIELDS), max_size=2)):
            setattr(node, name, draw(COLUMN if name not in ("parent", "sampled") else JUNK))
    for name in draw(st.lists(st.sampled_from(TRACE_FIELDS), max_size=2)):
        setattr(trace, name, draw(JUNK))
    for table in draw(st.lists(st.sampled_from(["rewards", "metrics", "info"]), max_size=2)):
        if isinstance(getattr(trace, table), dict):
            value = draw(JUNK)
            if table == "rewards":
                value = Reward.model_construct(score=value, weight=draw(st.floats() | JUNK))
            getattr(trace, table)[draw(st.text(max_size=2) | JUNK.filter(hashable))] = value
    if isinstance(trace.info, dict):
        if draw(st.booleans()):
            trace.info["weight_versions"] = {"1": draw(SPANS)}
        if draw(st.booleans()):
            trace.info["turn_rewards"] = draw(st.lists(st.floats() | JUNK, max_size=2) | JUNK)
    if draw(st.booleans()):
        trace.calls = [ModelCall(node=draw(st.integers(-2, 3)), finish_reason="length")]
    trace.timing.agent.end = draw(st.just(0.0) | st.floats())
    return trace


def hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@settings(max_examples=50, deadline=None)
@given(traces())
def test_any_trace_trains_or_fails(tmp_path_factory, trace):
    """An error of ``results_of`` is the failure of the rollout, too (``Environment.run``)."""
    try:
        results = read(trace)
    except Exception:
        return
    for result in results:
        assert math.isfinite(result.reward) or not result.ok
        assert fault_of(result) is None
        assert result.num_sampled >= 0
        assert isinstance(result.messages, list)
        assert abs(result.reward) <= LARGEST_REWARD
        use(result, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("weight", [1.0, 0.5, 10.0])
@pytest.mark.parametrize(
    "parts",
    [(0.3,), (0.1, 0.2), (0.2, 0.1), (0.7, -0.4), (0.1, 0.1, 0.1), (1 / 3, -1 / 30)],
    ids=str,
)
def test_a_sum_of_terms_in_float32_ties_with_the_same_reward_of_one_term(
    parts: tuple[float, ...], weight: float
) -> None:
    """Each term is off by a half spacing of float32, their sum in float64 by more."""
    terms = {
        f"term {place}": Reward(score=float(np.float32(part)), weight=weight)
        for place, part in enumerate(parts)
    }
    (result,) = read(trace_of(rewards=terms))
    assert result.reward == pytest.approx(0.3 * weight, rel=1e-15)
    assert result.reward == float(f"{0.3 * weight:.12g}")
