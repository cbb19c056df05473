"""vLLM's ``NixlConnector`` on a port that no other process uses.

vLLM reads the port from the environment when an engine starts, and binds it when the model is
loaded. If another process has it by then, the thread that binds it ends, and the engine waits for
that thread for ever. The port is told to other engines with each prompt, so it may be chosen late.

vLLM compares the connector's name in several places, so this class has the same name.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlConnector as VllmNixlConnector,
)

from prime_rl.rundir.machine import free_ports


class NixlConnector(VllmNixlConnector):  # type: ignore[misc]  # mypy does not see vLLM
    """Named in ``kv_transfer_config`` (``prefill.engine_settings``)."""

    def set_xfer_handshake_metadata_pp_aware(self: Any, metadata: Any) -> None:
        """Choose the port, and listen there."""
        scheduler = self.connector_scheduler
        scheduler.side_channel_port = free_ports(1, scheduler.side_channel_host)[0]
        super().set_xfer_handshake_metadata_pp_aware(metadata)
