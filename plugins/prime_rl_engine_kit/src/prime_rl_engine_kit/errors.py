"""Errors that a client sees as JSON."""

from __future__ import annotations

from prime_rl.errors import EngineError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class RequestError(EngineError):
    """A refused request, with its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    @property
    def headers(self) -> dict[str, str]:
        """When to come again; and after a body that was not read to its end, a new connection."""
        unread = {"Connection": "close"} if self.status in (408, 413) else {}
        return unread | ({"Retry-After": "1"} if self.status == 429 else {})

    @property
    def body(self) -> dict[str, object]:
        """The JSON in OpenAI's format."""
        kind = _TYPES.get(self.status, "BadRequestError")
        return {"error": {"message": str(self), "type": kind, "code": self.status}}
