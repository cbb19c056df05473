"""Connections that make no progress are closed: clients that do not send, or do not read, or send
heads without an end."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

STALL_SECONDS = 30.0
"""For the head of a request to come, and for a client to read any part of its answer."""
HEAD_BYTES = 2**16
"""Most bytes of a request's head, and of its trailers."""
FRAMING = 8
"""Bytes that may come with each byte of a body: clients may send it in chunks of one byte."""


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol with three limits that it lacks. A body has its own (``read_body``), and
    an idle connection too (``timeout_keep_alive``)."""

    _head: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None
    _received = 0
    """Bytes of the current request."""
    _received_body = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = self.loop.call_later(STALL_SECONDS, transport.close)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._received = self._received_body = 0

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._received_body += len(body)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)
        if self._received > HEAD_BYTES + FRAMING * self._received_body:
            self.transport.abort()
            return

        if self.cycle is not None and not self.cycle.response_complete:  # its head was read
            _cancel(self._head)
            self._head = None
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(STALL_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head)
        _cancel(self._reader)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        _cancel(self._reader)
        super().resume_writing()

    def _watch(self, unread: int) -> None:
        """End the connection unless the client reads something meanwhile."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < unread:
                self._watch(left)
            else:
                self.transport.abort()

        self._reader = self.loop.call_later(STALL_SECONDS, look)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
