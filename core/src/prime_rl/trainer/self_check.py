"""At start-up: does a document of a packed row have the log π that it has alone?

The oracle is the model as transformers runs it, eager, one document per call, LM head included. A
row of three documents, two of which share a prompt, is computed by the trainer in each ``Packing``,
and the first one whose log π agrees is taken. So no list of model families is needed. A model that
fails in all of them is refused: its gradients would be wrong in silence.

The mean error of a document may be a share of what a full leak changes, which is measured by
reading the same documents as one. Thirty families were measured with random weights. Packings that
agree had a share of up to 1e-6 in float32 and 2e-2 in bfloat16; packings that leak had 0.3 and more
(RecurrentGemma: 0.07). A random model whose recurrent layers have almost no effect yet looks like
one that agrees.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_rl import ConfigError
from prime_rl.trainer import context, parallel
from prime_rl.trainer.model import Policy
from prime_rl.trainer.optim import clip_gradients
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl.trainer.packing import Packing, use_attention
from prime_rl.wire.micro_batch import MicroBatch

logger = logging.getLogger("prime_rl.trainer.self_check")
"""The trainer's logger: only rank 0 shows its lines."""

ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Share of the full leak's effect, by precision of compute."""
LEAST_EFFECT = 0.02
"""A smaller effect is replaced by this one: rounding does not shrink with it."""
ALLOWED_COMPILED = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 5e-2)}
"""By precision of compute: mean difference of log π, and share of the gradient norm. Compilers sum
in another order, and keep in float32 what is rounded between operations as they are."""
LENGTHS = (9, 8, 7)
PROMPT = 4
"""Tokens of the documents. The first and the last start with the same ``PROMPT`` tokens."""


def find_packing(
    policy: Policy, packings: Sequence[Packing], device: torch.device, half: bool = False
) -> Packing:
    """The first of ``packings`` that passes, set in ``policy``; every rank calls this.

    ``half``: compute in bfloat16, as the run will. Raises ``ConfigError`` if none passes.
    """
    dtype = torch.bfloat16 if half else torch.float32
    batch = _micro_batch(policy.model.config.vocab_size)
    failed = []

    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=half, cache_enabled=False):
        alone, joined = _oracle(policy, batch, device)
        allowed = ALLOWED[dtype] * max(_gap(joined, alone, batch), LEAST_EFFECT)
        for packing in packings:
            gap, reason = _measure(policy, packing, batch=batch, expected=alone)
            if gap <= allowed:
                break
            failed.append(f"{packing}: {reason}")

    parallel.reshard(policy)
    kind = f"{type(policy.model).__name__} ({policy.model.config.model_type})"
    if len(failed) == len(packings):
        raise ConfigError(
            f"model: in a row of the trainer, a document does not have the log-probabilities that "
            f"{kind} in transformers gives it alone, so gradients would be wrong. Found "
            f"{'; '.join(failed)}. Expected them off by at most {allowed:.1e} in the mean. "
            f"{_way_out()}"
        )

    if failed:
        logger.warning(
            "%s: the trainer computes rows %s. It is slower, but a faster way does not give a "
            "document the log-probabilities that it has alone (%s; allowed %.1e in the mean).",
            kind,
            packing,
            "; ".join(failed),
            allowed,
        )

    logger.info("rows go through the model %s", packing)
    return packing


def _way_out() -> str:
    if context.num_parts() > 1:
        return "Leave trainer.context_parallel out, or train a model of another family."
    return "Train a model of another family."


def find_compiled_fault(policy: Policy, device: torch.device, half: bool = False) -> str:
    """What compiled decoder blocks change in a row, in words; empty if they give its targets the
    log π, and its sum the gradient norm, that the blocks have as they are. Every rank calls this.

    With gradients: a graph without them would be another one, compiled for nothing.
    """
    dtype = torch.bfloat16 if half else torch.float32
    batch = _micro_batch(policy.model.config.vocab_size)

    columns = []
    norms = []
    fault = ""

    # Eager comes first: an error there is not the compiler's fault.
    for stance in ("force_eager", "default"):
        try:
            with (
                torch.compiler.set_stance(stance),
                torch.autocast(device.type, dtype, enabled=half, cache_enabled=False),
            ):
                row = make_row(batch, device, policy.packing)
                logprobs = policy(row)[0]
                logprobs[row.targets].sum().backward()

            columns.append(logprobs.detach())
            norms.append(_gradient_norm(policy))
        except torch.OutOfMemoryError:
            raise  # no verdict: the compiler has not failed
        except Exception as error:
            if stance == "force_eager":
                raise
            fault = _text(error)
        finally:
            policy.zero_grad(set_to_none=True)

    parallel.reshard(policy)
    if not fault:
        fault = _difference(columns, norms, row=row, allowed=ALLOWED_COMPILED[dtype])
    # All ranks must decide alike: their collectives would differ otherwise.
    faults = [each for each in parallel.gather(fault) if each]
    return faults[0] if faults else ""


def _gradient_norm(policy: Policy) -> float:
    """The norm of the gradients of all weights on all ranks."""
    norm = clip_gradients(policy.parameters(), None)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _difference(
    columns: Sequence[Tensor], norms: Sequence[float], row: PackedRow, allowed: tuple[float, float]
) -> str:
    """In words; empty if both are small."""
    plain, compiled = columns
    gap = float((compiled - plain)[row.targets].abs().mean())
    norm, compiled_norm = norms
    most, share = allowed
    if not gap <= most:  # so that NaN is a fault
        return f"log π is off by {gap:.1e} in the mean, expected at most {most:.1e}"
    if not abs(compiled_norm - norm) <= share * norm:
        return f"the gradient norm is {compiled_norm:.4g}, expected {norm:.4g}"
    return ""


def _micro_batch(vocab_size: int) -> MicroBatch:
    """Random documents of tokens from the middle of the vocabulary, where few are special."""
    lengths = np.array(LENGTHS, np.int32)
    rng = np.random.default_rng(0)
    tokens = rng.integers(vocab_size // 4, vocab_size - vocab_size // 4, lengths.sum())

    last = lengths[:-1].sum()
    tokens[last : last + PROMPT] = tokens[:PROMPT]

    # Targets follow the shared prompt. The second document has a prompt of one token.
    sampled = [np.arange(length) >= first for length, first in zip(lengths, (4, 1, 4), strict=True)]
    mask = np.concatenate(sampled)

    return MicroBatch(
        token_ids=tokens.astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32),
        sequence_lengths=lengths,
        temperatures=np.ones(len(lengths), np.float32),
        env_ids=np.zeros(len(lengths), np.uint16),
        envs=("self-check",),
    )


def _oracle(policy: Policy, batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """[T], [T] log π of every token: of each document alone, and of all read as one."""
    whole = torch.from_numpy(batch.token_ids.astype(np.int64)).to(device)
    try:
        use_attention(policy.model, "eager")
        alone = torch.cat(
            [policy.plain_logprobs(each) for each in torch.split(whole, list(LENGTHS))]
        )
        return alone, policy.plain_logprobs(whole)
    except Exception as error:
        raise ConfigError(
            f"model: transformers cannot run {type(policy.model).__name__} on a document alone, "
            f"which the trainer's self-check needs ({_text(error)}). Train a model of another "
            "family."
        ) from error


def _measure(
    policy: Policy, packing: Packing, batch: MicroBatch, expected: Tensor
) -> tuple[float, str]:
    """The largest error of log π over all ranks, and the same, or an exception, in words."""
    gap = math.inf
    reason = ""
    try:
        policy.use(packing)
        row = make_row(batch, expected.device, packing)
        gap = _gap(policy(row)[0], expected, batch)
    except torch.OutOfMemoryError:
        raise  # no verdict on the packing
    except Exception as error:  # the model's code does not fit; that of the next packing may
        reason = _text(error)

    # All ranks get the same number, so they take the same packing.
    worst = max(each if math.isfinite(each) else math.inf for each in parallel.gather(gap))
    return worst, reason or f"off by {worst:.1e}"


def _gap(found: Tensor, expected: Tensor, batch: MicroBatch) -> float:
    """Mean difference over a document's targets; the largest of all documents."""
    targets = torch.from_numpy(batch.loss_mask).to(found.device)
    columns = (torch.split(column, list(LENGTHS)) for column in (found - expected, targets))
    return max(float(gap[mask].abs().mean()) for gap, mask in zip(*columns, strict=True))


def _text(error: Exception) -> str:
    """Its first sentence: some errors of transformers are long."""
    return f"{type(error).__name__}: {error}".partition(". ")[0]
