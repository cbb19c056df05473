# mypy: allow-subclassing-any
"""A verifiers harness that asks once: the prompt, then the reply."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf

__all__ = ["SmallConfig", "SmallHarness"]


class SmallConfig(vf.HarnessConfig):
    """``harness = {id = "small-harness"}``"""


class SmallHarness(vf.Harness[SmallConfig]):
    """Posts to the rollout's own endpoint, as a program would."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    SUPPORTS_MCP = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    RUNS_IN_PROCESS = True

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or []]
        async with httpx.AsyncClient(timeout=None) as client:
            reply = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        if reply.status_code != 200:
            return vf.ProgramResult(1, "", reply.text)
        return vf.ProgramResult(0, "", "")
