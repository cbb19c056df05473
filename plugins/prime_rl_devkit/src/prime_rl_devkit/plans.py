"""The check of ``prepare_rollout``, of an algorithm and of a module."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from prime_rl import RolloutPlan
from prime_rl.orchestrator.sources import train_sampling
from prime_rl.registry.manager import Hooks
from prime_rl_devkit.verdicts import Broken

PROMPTS: tuple[Any, ...] = (
    "2 + 2?",
    [{"role": "user", "content": "2 + 2?"}],
    [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}],
    None,
)
"""Each form that an example's prompt may have."""


async def check_plans(
    hooks: Hooks, temperature: float | None = None, *, every_form: bool = True
) -> None:
    """Prepare two rollouts of an example, for each form of its prompt. Raises ``Broken`` unless a
    run could sample them. ``temperature``: the only one that the algorithm learns at. Without
    ``every_form`` one that works is enough: an algorithm chooses its envs."""
    faults = []
    for prompt in PROMPTS:
        try:
            await _check_form(hooks, prompt, temperature)
        except Broken:
            raise
        except Exception as error:
            faults.append((prompt, error))

    if faults and (every_form or len(faults) == len(PROMPTS)):
        prompt, fault = faults[0]
        said = f"with plan.prompt = {prompt!r}: {type(fault).__name__}: {fault}"
        raise Broken(said) from fault


async def _check_form(hooks: Hooks, prompt: Any, temperature: float | None) -> None:
    copied = deepcopy(prompt)
    for member in range(2):
        place = {"env": "kit", "group_id": 1, "example_id": 2, "member": member}
        plan = RolloutPlan.model_validate(
            {**place, "prompt": copied, "temperature": temperature or 1.0}
        )
        await hooks.prepare_rollout(plan)
        train_sampling(plan)  # raises for what was changed in place
        changed = [key for key, value in place.items() if getattr(plan, key) != value]
        if changed:
            raise Broken(f"it set plan.{changed[0]}, which says which rollout this is. Leave it.")
        if copied != prompt:
            raise Broken(
                "it changed the example's own messages, so the change stays for later rollouts. "
                "Assign new ones: plan.prompt = [...]."
            )

        if temperature not in (None, plan.temperature):
            raise Broken(
                f"it set temperature = {plan.temperature}, and needs_temperature is {temperature}"
            )

        if not isinstance(prompt, str) and str(prompt) in str(plan.prompt) != str(prompt):
            raise TypeError(f"it wrote {type(prompt).__name__} into a text: {plan.prompt!r}")
