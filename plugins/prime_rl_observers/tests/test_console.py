"""The line of a step in the trainer's log."""

from __future__ import annotations

from prime_rl_observers.console import console_line


def test_the_console_line() -> None:
    metrics = {
        "time/step": 9.512, "loss/mean": -0.0123, "entropy/all/mean": 0.5,
        "mismatch_kl/all/mean": 1.2e-4, "optim/grad_norm": 0.25, "optim/lr": 1e-6,
        "perf/throughput": 1234.4, "perf/peak_memory": 3.21,
    }  # fmt: skip
    line = (
        "Step 3/20 | 9.51s | Loss -0.0123 | Entropy 0.5000 | Mismatch KL 1.20e-04 | Grad. Norm "
        "0.2500 | LR 1.00e-06 | Throughput 1234 tokens/s | "
    )
    assert console_line(3, 20, metrics) == line + "Peak Mem. 3.2 GiB"
    known = {name: value for name, value in metrics.items() if name != "perf/peak_memory"}
    assert f"{console_line(3, 20, known)} | " == line
    assert console_line(3, 20, metrics | {"perf/mfu": 41.5}) == (
        line + "MFU 41.5% | Peak Mem. 3.2 GiB"
    )
