"""Bytes and CPU seconds of plain GRPO on the wire, for 262,144 tokens: 2,048 samples of 64 + 64."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from bench.records import record
from prime_rl.wire import MicroBatch, decode_batch, encode_batch

NUM_TOKENS = 262_144
SEQUENCE = 128
ROW = 8192
REPEATS = 15


def make_rows() -> list[MicroBatch]:
    """Packed samples of 64 prompt and 64 completion tokens, with advantages, without weights."""
    rng = np.random.default_rng(0)
    number = ROW // SEQUENCE
    return [
        MicroBatch(
            token_ids=rng.integers(0, 50_000, ROW, dtype=np.int32),
            loss_mask=np.tile(np.arange(SEQUENCE) >= SEQUENCE // 2, number),
            inference_logprobs=-rng.random(ROW, np.float32),
            sequence_lengths=np.full(number, SEQUENCE, np.int32),
            temperatures=np.ones(number, np.float32),
            env_ids=np.zeros(number, np.uint16),
            envs=("reverse-text",),
            advantages=rng.standard_normal(ROW, np.float32),
        )
        for _ in range(NUM_TOKENS // ROW)
    ]


def cpu_seconds(call: Callable[[], object]) -> float:
    """Median over the repeats."""
    call()
    seconds = []
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


def run() -> dict[str, float]:
    """Measure, print a table, return it."""
    rows = make_rows()
    frame = encode_batch(1, rows)
    results = {
        "bytes_per_token": len(frame) / NUM_TOKENS,
        "encode_cpu_seconds": cpu_seconds(lambda: encode_batch(1, rows)),
        "decode_cpu_seconds": cpu_seconds(lambda: decode_batch(frame)),
    }
    record("wire.bytes", results["bytes_per_token"], "bytes per token")
    record("wire.encode", 1000 * results["encode_cpu_seconds"], "CPU ms")
    record("wire.decode", 1000 * results["decode_cpu_seconds"], "CPU ms")
    print(f"wire, {NUM_TOKENS:,} tokens of plain GRPO, median of {REPEATS}")
    print(f"  bytes per token      {results['bytes_per_token']:10.2f}")
    print(f"  encode, CPU ms       {1000 * results['encode_cpu_seconds']:10.2f}")
    print(f"  decode, CPU ms       {1000 * results['decode_cpu_seconds']:10.2f}")
    return results


if __name__ == "__main__":
    run()
