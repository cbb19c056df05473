"""Bearer keys: one for the admin routes, and one for sampling if the server has one.

They are passed by the environment (``PRIME_RL_ADMIN_KEY``, ``PRIME_RL_ENGINE_API_KEY``); argument
lists are public.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass

from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY
from prime_rl_engine_kit.errors import RequestError


@dataclass(frozen=True)
class Keys:
    """The keys of a server. Empty: sampling needs no key, the admin routes are off."""

    admin: str = ""
    sampling: str = ""

    @classmethod
    def of_environment(cls) -> Keys:
        """The keys in the environment of this process."""
        return cls(os.environ.get(ADMIN_KEY, ""), os.environ.get(ENGINE_KEY, ""))

    def check_admin(self, authorization: str) -> None:
        """Raises ``RequestError``: 401 without a key, 403 with a wrong one or if admin is off."""
        if not self.admin:
            raise RequestError(
                "the engine was started without PRIME_RL_ADMIN_KEY: admin is off", 403
            )

        bearer = _bearer(authorization)
        if not bearer:
            raise RequestError(
                "admin routes need 'Authorization: Bearer <the run's admin key>'", 401
            )

        if not _equal(bearer, self.admin):
            raise RequestError("this isn't the run's admin key", 403)

    def check_sampling(self, authorization: str) -> None:
        """The admin key opens these routes too. Raises ``RequestError`` (401)."""
        if not self.sampling:
            return
        bearer = _bearer(authorization)
        if not bearer:
            raise RequestError("this engine needs 'Authorization: Bearer <its API key>'", 401)
        if not (_equal(bearer, self.sampling) or (self.admin and _equal(bearer, self.admin))):
            raise RequestError("this isn't the engine's API key", 401)


def _bearer(authorization: str) -> str:
    scheme, _, given = authorization.partition(" ")
    return given if scheme.lower() == "bearer" else ""


def _equal(given: str, key: str) -> bool:
    # The server decodes headers as Latin-1.
    return hmac.compare_digest(given.encode("latin-1"), key.encode())
