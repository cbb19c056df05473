"""A loss and a receiver for trainings of a few steps in this process."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl import Loss, LossInputs, LossOutputs
from prime_rl.wire import MicroBatch, encode_batch


class PolicyGradient(Loss):
    """-A t"""

    name = "pg"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        terms = -inputs.advantages * inputs.trainer_logprobs
        return LossOutputs(terms[inputs.loss_mask].sum(), {})


class Frames:
    """A receiver with one frame per step."""

    def __init__(self, first: int, steps: Sequence[Sequence[MicroBatch]]) -> None:
        numbered = enumerate(steps, first)
        self.frames = [memoryview(encode_batch(step, batch)) for step, batch in numbered]

    def receive(self, timeout: float) -> memoryview | None:
        return self.frames.pop(0)

    def announce(self, version: int) -> None: ...

    def close(self) -> None: ...
