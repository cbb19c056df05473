"""The bench of publishing measures what it says it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))


def test_all_ways_of_publishing_write_the_same_weights(tmp_path: Path) -> None:
    from bench import publish

    model = publish.make_model("tiny")
    for name, write in publish.writers(model).items():
        assert publish.measure(write, tmp_path / "out")["MB"] > 0.04
        write(tmp_path / "kept")
        dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
        found = load_file(tmp_path / "kept")
        assert all(found[n].equal(p.to(dtype)) for n, p in model.named_parameters()), name


def test_a_delta_has_the_changed_values_and_where_they_go(tmp_path: Path) -> None:
    from bench import publish

    old = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16(), "b": torch.ones(2).bfloat16()}
    new = {"a": torch.tensor([[1.0, 2.5], [3.0, -4.0]]).bfloat16(), "b": old["b"].clone()}
    delta = publish.make_delta(old, new)
    assert delta["a at"].tolist() == [1, 3] and delta["b at"].tolist() == []
    assert delta["a is"].view(torch.bfloat16).tolist() == [2.5, -4.0]
    publish.write_delta(old, new, tmp_path / "delta")
    publish.apply_delta(old, tmp_path / "delta")
    assert all(old[name].equal(tensor) for name, tensor in new.items())


def test_the_share_that_changes_falls_as_adam_settles(tmp_path: Path) -> None:
    """At the default learning rate."""
    from bench import publish

    found = publish.measure_delta(publish.make_model("tiny"), tmp_path)
    assert len(found["shares"]) == 5 and 0.1 > found["shares"][0] > found["shares"][-1] > 0
    assert found["ways"]["all"]["MB"] > 2 * found["ways"]["delta"]["MB"]
    found["ways"] = {"all": {"MB": 250.0, "make": 0.5, "load": 0.25}}
    assert publish.report_delta(found)[-1].split() == [
        *("all", "250", "0.50", "0.25"),
        *("2.75", "0.95", "0.77"),  # 2 Gbit over 1, 10 and 100 Gbit/s
    ]
