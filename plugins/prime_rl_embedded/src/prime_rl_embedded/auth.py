"""Bearer keys: one for the admin routes, and one for sampling if the server was given one.

Keys come by the environment (``PRIME_RL_ADMIN_KEY``, ``PRIME_RL_ENGINE_API_KEY``); argument lists
are public.
"""

from __future__ import annotations

import hmac

from starlette.requests import Request as HTTPRequest

from prime_rl_embedded.errors import RequestError


class Keys:
    """Who may do what. An empty key: sampling needs none, administration is off."""

    def __init__(self, admin: str = "", sampling: str = "") -> None:
        self._admin, self._sampling = admin, sampling

    def check_admin(self, http: HTTPRequest) -> None:
        """Raises ``RequestError`` (401 without a key, 403 with a wrong one or if admin is off)."""
        if not self._admin:
            raise RequestError(
                "the engine was started without PRIME_RL_ADMIN_KEY: admin is off", 403
            )
        given = _bearer(http)
        if not given:
            raise RequestError(
                "admin routes need 'Authorization: Bearer <the run's admin key>'", 401
            )
        if not _equal(given, self._admin):
            raise RequestError("this isn't the run's admin key", 403)

    def check_sampling(self, http: HTTPRequest) -> None:
        """The admin key opens these routes too. Raises ``RequestError`` (401)."""
        if not self._sampling:
            return
        given = _bearer(http)
        if not given:
            raise RequestError("this engine needs 'Authorization: Bearer <its API key>'", 401)
        if not (_equal(given, self._sampling) or (self._admin and _equal(given, self._admin))):
            raise RequestError("this isn't the engine's API key", 401)


def _bearer(http: HTTPRequest) -> str:
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    return given if scheme.lower() == "bearer" else ""


def _equal(given: str, key: str) -> bool:
    # Headers arrive decoded as Latin-1, whatever their bytes meant.
    return hmac.compare_digest(given.encode("latin-1"), key.encode())
