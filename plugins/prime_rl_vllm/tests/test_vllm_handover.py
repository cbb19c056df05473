"""Which prompts a prefill engine computes, and what happens when it fails, without vLLM."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prime_rl.rundir.status import Status
from prime_rl_engine_kit.keys import Keys
from prime_rl_vllm.prefill import engine_settings, hand_over_prompts, hold_prefill
from prime_rl_vllm.state import State

WHERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


@dataclass
class SamplingParams:
    """The fields of vLLM's that are read."""

    max_tokens: int = 16
    temperature: float = 1.0
    n: int = 1
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: object = None
    extra_args: dict[str, Any] | None = None

    def clone(self) -> SamplingParams:
        return replace(self)


class VLLMClientError(Exception):
    pass


class VLLMValidationError(VLLMClientError):
    """As in vLLM, no ``ValueError``."""


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, dict[str, object]] = {
        "vllm": {"SamplingParams": SamplingParams},
        "vllm.exceptions": {"VLLMClientError": VLLMClientError},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


@dataclass
class Engine:
    """A fake ``AsyncLLM``. ``fault`` is raised instead of an answer."""

    fault: Exception | None = None
    errored: bool = False
    gate: asyncio.Event | None = None
    entrance: asyncio.Event | None = None
    """Before it, no request is added."""
    calls: list[tuple[Any, SamplingParams, dict[str, Any]]] = field(default_factory=list)
    aborted: int = 0
    released: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    paused_after: int = 0
    """Looks until the scheduler is paused."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        await self.add_request(request_id, prompt, sampling_params, **kwargs)
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        yield SimpleNamespace(kv_transfer_params=dict(WHERE))

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, **kwargs: Any
    ) -> None:
        if self.fault is not None:
            raise self.fault
        if self.entrance is not None:
            await self.entrance.wait()
        self.calls.append((prompt, params, {"request_id": request_id} | kwargs))

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: dict[str, Any]
    ) -> None:
        self.released.append((request_id, kv_transfer_params))

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        await asyncio.Event().wait()  # KV waits to be taken over: vLLM does not come back

    async def is_paused(self) -> bool:
        self.paused_after -= 1
        return self.paused_after < 0


def server(*prefill: Engine) -> State:
    state = State("m", "m", 64, Keys("admin"), Status(None), engine=Engine(), prefill=prefill)
    hand_over_prompts(state)
    return state


def sampling_engine(state: State) -> Engine:
    engine: Engine = state.engine
    return engine


async def ask(state: State, prompt: Any, params: SamplingParams, **kwargs: Any) -> SamplingParams:
    """The parameters that reach the engine that samples."""
    async for _ in state.engine.generate(prompt, params, "name", **kwargs):
        pass
    return sampling_engine(state).calls[-1][1]


PROMPT = {"prompt_token_ids": [5, 6], "cache_salt": "3:x"}


async def test_the_prompt_is_computed_elsewhere_and_its_kv_taken_over() -> None:
    prefill = Engine()
    state = server(prefill)
    params = SamplingParams(max_tokens=9, extra_args={"mine": 1})

    reached = await ask(state, PROMPT | {"prompt": "ab"}, params, priority=2)

    assert reached.extra_args == {"mine": 1, "kv_transfer_params": WHERE}
    assert (reached.max_tokens, params.extra_args) == (9, {"mine": 1})
    ((prompt, asked, rest),) = prefill.calls
    assert prompt == PROMPT  # the salt too: the prefill engine has a prefix cache
    assert (asked.max_tokens, asked.temperature, asked.detokenize) == (1, 0.0, False)
    assert asked.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}
    assert rest.pop("request_id").isalnum()
    assert rest == {"priority": 2}


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (PROMPT, SamplingParams(n=2)),
        (PROMPT, SamplingParams(prompt_logprobs=0)),
        (PROMPT | {"type": "multimodal"}, SamplingParams()),
        (PROMPT | {"multi_modal_data": {"image": object()}}, SamplingParams()),
        ({"prompt_embeds": object()}, SamplingParams()),
        ("text", SamplingParams()),
    ],
)
async def test_other_prompts_are_computed_where_they_are_sampled(
    prompt: Any, params: SamplingParams
) -> None:
    prefill = Engine()
    reached = await ask(server(prefill), prompt, params)
    assert reached.extra_args is None and not prefill.calls


async def test_a_client_cannot_say_where_kv_is() -> None:
    params = SamplingParams(n=2, extra_args={"kv_transfer_params": {"remote_host": "10.0.0.1"}})
    assert (await ask(server(Engine()), PROMPT, params)).extra_args is None


async def test_a_request_is_not_given_to_an_engine_that_ends_with_a_dead_prefill_engine() -> None:
    state = server(Engine(fault=RuntimeError("dead"), errored=True))
    with pytest.raises(RuntimeError, match="dead"):
        await ask(state, PROMPT, SamplingParams())
    assert not state.engine.calls


async def test_a_prompt_whose_prefill_fails_is_computed_where_it_is_sampled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = server(Engine(fault=RuntimeError("out of memory")))
    assert (await ask(state, PROMPT, SamplingParams())).extra_args is None
    assert state.prefill_failures == 1
    assert "prefill engine 0 failed, so the engine that samples" in caplog.text
    assert "RuntimeError: out of memory" in caplog.text


@pytest.mark.parametrize("error", [ValueError("too long"), VLLMClientError("too long")])
async def test_a_wrong_request_is_no_failure_of_the_engine(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that samples refuses it with the same reason."""
    state = server(Engine(fault=error))
    await ask(state, PROMPT, SamplingParams())
    assert state.prefill_failures == 0 and not caplog.records


async def test_prompts_go_to_the_prefill_engine_with_the_fewest() -> None:
    gate = asyncio.Event()
    prefill = [Engine(gate=gate), Engine(gate=gate)]
    state = server(*prefill)
    asking = [asyncio.create_task(ask(state, PROMPT, SamplingParams())) for _ in range(5)]
    while sum(len(engine.calls) for engine in prefill) < 5:
        await asyncio.sleep(0)
    assert [len(engine.calls) for engine in prefill] == [3, 2]
    gate.set()
    await asyncio.gather(*asking)


async def test_a_clients_name_is_no_part_of_what_engines_say_to_each_other() -> None:
    """vLLM reads a name that begins with HB: as a sign of life."""
    prefill = Engine()
    state = server(prefill)
    async for _ in state.engine.generate(PROMPT, SamplingParams(), "HB:x,y"):
        pass
    ((_, _, rest),) = prefill.calls
    assert rest["request_id"].isalnum()


async def test_the_kv_of_a_client_that_leaves_while_its_prompt_is_computed_is_released() -> None:
    gate = asyncio.Event()
    prefill = Engine(gate=gate)
    state = server(prefill)
    asking = asyncio.create_task(ask(state, PROMPT, SamplingParams()))
    while not prefill.calls:
        await asyncio.sleep(0)
    await leave(asking)
    assert prefill.aborted == 0 and not sampling_engine(state).calls
    gate.set()
    await assert_released(state)


async def test_the_kv_of_a_client_that_leaves_before_its_request_is_added_is_released() -> None:
    prefill = Engine()
    state = server(prefill)
    sampling_engine(state).entrance = asyncio.Event()
    asking = asyncio.create_task(ask(state, PROMPT, SamplingParams()))
    while not prefill.calls:
        await asyncio.sleep(0)
    for _ in range(5):  # the hand-over
        await asyncio.sleep(0)
    await leave(asking)
    await assert_released(state)


async def test_the_kv_of_a_request_that_was_added_is_left_to_the_engine() -> None:
    """It takes the KV over, or releases it at the abort. Twice would be an error in its log."""
    state = server(Engine())
    engine = sampling_engine(state)
    engine.gate = asyncio.Event()
    asking = asyncio.create_task(ask(state, PROMPT, SamplingParams()))
    while not engine.calls:
        await asyncio.sleep(0)
    await leave(asking)
    assert engine.aborted == 1 and not state.pending and not engine.released


@pytest.mark.parametrize(
    "error", [ValueError("temperature"), VLLMValidationError("temperature"), RuntimeError("odd")]
)
async def test_the_kv_of_a_request_that_is_refused_is_released(error: Exception) -> None:
    state = server(Engine())
    sampling_engine(state).fault = error
    with pytest.raises(type(error), match=str(error)):
        await ask(state, PROMPT, SamplingParams())
    await assert_released(state)


async def test_a_refused_request_whose_prompt_was_not_handed_over_has_nothing_to_release() -> None:
    state = server(Engine(fault=VLLMValidationError("too long")))
    sampling_engine(state).fault = VLLMValidationError("too long")
    with pytest.raises(VLLMValidationError):
        await ask(state, PROMPT, SamplingParams())
    await asyncio.gather(*state.pending)
    assert not sampling_engine(state).released


async def leave(asking: asyncio.Task[SamplingParams]) -> None:
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def assert_released(state: State) -> None:
    await asyncio.gather(*state.pending)
    ((_, where),) = sampling_engine(state).released
    assert where == WHERE
    assert not sampling_engine(state).calls  # nothing is computed for it


async def test_a_prefill_engine_is_held_although_kv_waits_to_be_taken_over() -> None:
    prefill = Engine(paused_after=2)
    state = server(prefill)
    await hold_prefill(state, prefill)
    assert prefill.paused_after == -1
    (pausing,) = state.pending
    pausing.cancel()


def test_the_port_of_an_engine_is_chosen_when_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM binds a port that it read before the model was loaded. By then another process has it:
    here this test."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector"
    host = "127.0.0.1"
    with socket.create_server((host, 0)) as other, ExitStack() as bound:

        class Connector:
            def __init__(self) -> None:
                taken = other.getsockname()[1]
                self.connector_scheduler = SimpleNamespace(
                    side_channel_host=host, side_channel_port=taken
                )

            def set_xfer_handshake_metadata_pp_aware(self, metadata: object) -> None:
                at = (host, self.connector_scheduler.side_channel_port)
                bound.enter_context(socket.create_server(at))

        module = ModuleType(name)
        module.NixlConnector = Connector  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        made = importlib.import_module("prime_rl_vllm.nixl")

        first, second = made.NixlConnector(), made.NixlConnector()
        for each in (first, second):  # raises if the port is taken
            each.set_xfer_handshake_metadata_pp_aware({})
        ports = [each.connector_scheduler.side_channel_port for each in (first, second)]
        assert len({*ports, other.getsockname()[1]}) == 3
    del sys.modules["prime_rl_vllm.nixl"]  # it stands on the fake


def test_each_engine_has_its_role_and_its_gpus() -> None:
    settings = {"tensor_parallel_size": 2, "dtype": "bfloat16"}
    made = [engine_settings(settings, number, on_gpu=True) for number in range(3)]
    roles = [each["kv_transfer_config"]["kv_role"] for each in made]
    assert roles == ["kv_consumer", "kv_producer", "kv_producer"]
    assert [each["device_ids"] for each in made] == ["0,1", "2,3", "4,5"]
    assert [each.get("disable_log_stats") for each in made] == [None, True, True]
    assert all(each["dtype"] == "bfloat16" for each in made)
    assert "device_ids" not in engine_settings(settings, 1, on_gpu=False)
