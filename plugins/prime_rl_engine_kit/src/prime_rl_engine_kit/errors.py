"""Errors that a client sees as JSON."""

from __future__ import annotations

from prime_rl.errors import EngineError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class RequestError(EngineError):
    """A refused request, with its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

    @property
    def body(self) -> dict[str, object]:
        """The JSON in OpenAI's format."""
        kind = _TYPES.get(self.status, "BadRequestError")
        return {"error": {"message": str(self), "type": kind, "code": self.status}}
