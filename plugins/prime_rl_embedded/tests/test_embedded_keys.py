"""The sampling key and the admin key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from prime_rl_embedded.testing import ADMIN_KEY, Served, serve

KEY = "open-sésame"


@pytest.fixture(scope="module")
def locked(model_folder: Path) -> Iterator[Served]:
    with serve(model_folder, num_slots=2, env={"PRIME_RL_ENGINE_API_KEY": KEY}) as served:
        yield served


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"Authorization": f"Bearer {key}".encode()}


def ask(server: Served, route: str, key: str | None) -> httpx.Response:
    headers = {} if key is None else bearer(key)
    if route == "/v1/models":
        return server.http.get(route, headers=headers)
    body: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    body |= {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    return server.http.post(route, json=body, headers=headers)


ROUTES = ("/v1/models", "/v1/chat/completions", "/inference/v1/generate")


@pytest.mark.parametrize("route", ROUTES)
def test_with_a_sampling_key_only_this_key_or_the_admin_key_is_accepted(
    locked: Served, route: str
) -> None:
    answers = [ask(locked, route, key) for key in (KEY, ADMIN_KEY, None, "wrong")]
    assert [answer.status_code for answer in answers] == [200, 200, 401, 401]
    assert "needs 'Authorization: Bearer <its API key>'" in answers[2].json()["error"]["message"]
    assert answers[3].json()["error"] == {
        "message": "this isn't the engine's API key",
        "type": "AuthenticationError",
        "code": 401,
    }


def test_health_and_metrics_stay_open_and_admin_needs_its_own_key(locked: Served) -> None:
    assert locked.http.get("/health").status_code == locked.http.get("/metrics").status_code == 200
    wrong = locked.http.post("/pause", headers=bearer(KEY))
    assert wrong.status_code == 403
    assert locked.post("/resume", admin=True).status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_without_a_sampling_key_requests_need_none(server: Served, route: str) -> None:
    assert ask(server, route, None).status_code == ask(server, route, "any").status_code == 200
