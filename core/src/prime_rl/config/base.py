"""The bases of every settings class: frozen, documented under the field."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """One table of the TOML. Unknown keys are errors; the string under a field documents it."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class PluginTable(Settings):
    """A table that selects a plugin's class; keys it does not declare belong to that class."""

    model_config = ConfigDict(extra="allow")

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the plugin validates."""
        return dict(self.model_extra or {})
