"""``prime-rl`` for the bench. With ``PRIME_RL_BENCH_DIRECT`` set, episodes are plain requests to
the engine.

The supervisor then starts the orchestrator through this module, which replaces ``Environment`` by
one that calls the engine directly. Loop, dispatcher, scoring, packer and wire are the real ones.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

PROMPT_TOKENS = 64
NEW_TOKENS = 64
E = 12 + 68
"""A token id in place of the letter e. Which one does not matter for the cost."""


@dataclass(frozen=True)
class DirectExample:
    """A prompt, and the fields that the orchestrator reads."""

    token_ids: list[int]
    fields: dict[str, Any] = field(default_factory=dict)

    def with_prompt(self, prompt: Any) -> DirectExample:
        """Itself: nothing here sets another prompt."""
        return self


class DirectEnvironment:
    """Replaces ``prime_rl.env.environment.Environment``: one request per episode, no verifiers."""

    num_examples = 2048
    agents = ("agent",)

    def __init__(self) -> None:
        rng = random.Random(0)
        self.examples = [
            DirectExample([rng.randrange(12, 268) for _ in range(PROMPT_TOKENS)])
            for _ in range(self.num_examples)
        ]

    async def __aenter__(self) -> DirectEnvironment:
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()

    def take_metrics(self) -> dict[str, float]:
        return {}

    async def run(
        self, example: DirectExample, *, model: Any, sampling: Any, group_id: int, **request: Any
    ) -> list[Any]:
        from prime_rl.env.episode import BranchTokens, RolloutResult

        prompt = example.token_ids
        parameters = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_completion_tokens,
            "seed": request["seed"],
            "logprobs": 1,
            **sampling.extra_body,
        }
        body = {
            "model": model.name,
            "token_ids": prompt,
            "cache_salt": request["cache_salt"],
            "sampling_params": parameters,
        }
        url = model.base_url.removesuffix("/v1") + "/inference/v1/generate"
        async with self.http.post(url, data=msgspec.json.encode(body)) as answer:
            answer.raise_for_status()
            choice = msgspec.json.decode(await answer.read())["choices"][0]
        tokens = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        sampled = [False] * len(prompt) + [True] * len(tokens)
        branch = BranchTokens(
            token_ids=[*prompt, *tokens],
            sampled_mask=sampled,
            logprobs=[0.0] * len(prompt) + logprobs,
            roles=["user"] * len(prompt) + ["assistant"] * len(tokens),
            is_content=[None] * len(sampled),
            node_ids=[0] * len(prompt) + [1] * len(tokens),
            policy_versions=None,
        )
        reward = tokens.count(E) / len(tokens)
        return [RolloutResult(ok=True, reward=reward, num_turns=1, branches=[branch])]


def orchestrate() -> None:
    """Run the orchestrator's process with the replaced environment."""
    from prime_rl.orchestrator import __main__, build

    build._environment = lambda *_: DirectEnvironment()  # type: ignore[assignment]
    __main__.main()


def main() -> None:
    """With one argument (from the supervisor), the orchestrator; else ``prime-rl``."""
    if len(sys.argv) == 2:
        orchestrate()
    from prime_rl_app import commands
    from prime_rl_app.cli import main as prime_rl

    if os.environ.get("PRIME_RL_BENCH_DIRECT"):
        setattr(commands, "ORCHESTRATOR", "bench.direct")  # noqa: B010  # the name that it imports
    prime_rl()


if __name__ == "__main__":
    main()
