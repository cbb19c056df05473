"""The base class of everything a plugin offers, and of its settings.

A class is selected by its ``name`` from a table of the TOML and built with its own validated
settings. Instances compare by identity: two envs may run the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from prime_rl.config.base import Removed, refuse_truth


class PluginConfig(BaseModel):
    """Settings of a plugin class. Unknown keys are errors; the string under a field documents
    it. Defaults are validated like values of the TOML."""

    removed: ClassVar[Mapping[str, Removed]] = {}
    """Keys of earlier versions of the plugin, by name."""

    # The validator is built when a value is first validated: a list of plugins needs none.
    model_config = ConfigDict(
        defer_build=True, extra="forbid", frozen=True,
        use_attribute_docstrings=True, validate_default=True,
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth(cls, table: Any) -> Any:
        return refuse_truth(cls, table)


class Offer:
    """Anything a plugin registers: a name to select it by, and the settings it takes."""

    name: ClassVar[str]
    """The name by which a config selects it: ``algo.type = "<name>"``."""

    config_class: ClassVar[type[PluginConfig]] = PluginConfig
    """The pydantic model that validates its table of the TOML."""

    def __init__(self, config: PluginConfig) -> None:
        self.config = config
