"""``POST /inference/v1/generate``: tokens in, tokens and logprobs out.

vLLM has a route of this name too, but its reply lacks ``token`` in the logprobs, which the
installed ``renderers`` requires. This route calls the same engine client.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from prime_rl_engine_kit.body import ClientGone, read_body, while_wanted
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import GenerateBody, Limits, decode
from prime_rl_vllm.reply import reply
from prime_rl_vllm.schema import SamplingPlan, plan
from prime_rl_vllm.state import State


@dataclass(frozen=True)
class Done:
    """A finished request."""

    plan: SamplingPlan
    request_id: str
    model: str
    output: Any
    """vLLM's ``RequestOutput``."""


async def generate(state: State, http: HTTPRequest) -> Response:
    """Answer the route. Raises ``RequestError``."""
    limits = Limits(state.model_name, state.max_model_len, state.vocab_size)
    body = decode(await read_body(http, limits.max_body_bytes), GenerateBody)
    wanted = plan(body, limits)
    name = body.request_id or f"generate-{uuid.uuid4().hex}"
    state.running += 1
    try:
        output = await while_wanted(http, _finish(state, body, wanted=wanted, name=name))
    except ClientGone:
        return Response(status_code=499)
    finally:
        state.running -= 1

    done = Done(wanted, name, model=state.model_name, output=output)
    # In a thread: the scores of a long prompt take seconds to write.
    content = await asyncio.to_thread(reply, done)
    return Response(content, media_type="application/json")


async def _finish(state: State, body: GenerateBody, wanted: SamplingPlan, name: str) -> Any:
    """Run the request to its end. Raises ``RequestError`` with vLLM's own reason."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineDeadError

    prompt = {"prompt_token_ids": wanted.token_ids, "cache_salt": state.salt(body.cache_salt)}
    try:
        params = SamplingParams(
            **wanted.params, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        # vLLM requires unique ids, and clients may repeat theirs.
        unique = f"{name}-{uuid.uuid4().hex[:8]}"
        last = None
        async for output in state.engine.generate(
            prompt, params, unique, priority=body.priority or 0
        ):
            last = output
    except (VLLMClientError, ValueError, TypeError) as error:
        raise RequestError(str(error)) from error
    except EngineDeadError as error:
        raise RequestError(f"the engine has ended: {error}", 503) from error
    except asyncio.CancelledError:
        raise
    except Exception as error:
        raise RequestError(f"{type(error).__name__}: {error}", 500) from error

    return _complete(state, last)


def _complete(state: State, output: Any) -> Any:
    """Raises ``RequestError`` if a choice did not end by a stop token or the length."""
    for choice in output.outputs if output else ():
        state.generated_tokens += len(choice.token_ids)
        if choice.finish_reason not in ("stop", "length"):
            raise RequestError(f"the request ended with {choice.finish_reason!r}", 503)
    if output is None:
        raise RequestError("the engine gave no output; it may be shutting down", 503)
    return output
