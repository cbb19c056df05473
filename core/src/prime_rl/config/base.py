"""The bases of every settings class: frozen, documented under the field."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict


def _variable(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("expected the name of an environment variable, not empty and without '='")
    return name


def _host(name: str) -> str:
    # A scheme, a path or a space would fail only where the process binds it.
    if not name or not all(each.isalnum() or each in ".:_%[]-" for each in name):
        raise ValueError("expected an IP address or the name of a host, such as '127.0.0.1'")
    return name


VariableName = Annotated[str, AfterValidator(_variable)]
HostName = Annotated[str, AfterValidator(_host)]


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
