"""The id ``reverse-text``, which is ``text-reversal`` now. A package of upstream prime-rl has a
module of the earlier name, and the two can be installed together."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings
from prime_rl.env.loading import check_taskset, current_id, import_tasksets
from prime_rl.errors import ConfigError


def loaded(env_id: str) -> Environment:
    return Environment(EnvSettings(id=env_id, args={"num_examples": 3}))


def test_the_earlier_id_loads_the_same_rows_under_its_label_with_a_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = loaded("text-reversal")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        earlier = loaded("reverse-text")
    (note,) = caplog.messages
    assert "'reverse-text' is now called 'text-reversal'" in note
    assert 'id = "text-reversal", and name = "reverse-text"' in note
    assert [earlier.examples[row].fields for row in range(3)] == [
        now.examples[row].fields for row in range(3)
    ]


@pytest.mark.parametrize("env_id", ["reverse-text", "reverse_text", "Reverse-Text"])
def test_every_spelling_that_verifiers_took_is_an_alias(env_id: str) -> None:
    assert current_id(env_id) == "text-reversal"
    check_taskset(env_id, "orchestrator.train.env.0.id", {"split": "held_out"})
    import_tasksets([("a", env_id)])


def test_a_package_with_a_module_of_the_earlier_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "reverse_text"
    (folder / "__pycache__").mkdir(parents=True)
    assert current_id("reverse-text") == "text-reversal"  # a removed package has left the folder
    (folder / "__init__.py").write_text("")
    assert find_spec("reverse_text") is not None
    assert current_id("reverse-text") == "reverse-text"


def test_a_misspelt_earlier_id_is_near_it() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'reverse-text'\?"):
        check_taskset("reverse-txt", "orchestrator.train.env.0.id")
