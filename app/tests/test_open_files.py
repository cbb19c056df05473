"""Few open files mean fewer rollouts in flight."""

import resource

import pytest

from prime_rl.config.run import RunConfig
from prime_rl_app.open_files import fit


@pytest.fixture
def limited(monkeypatch):
    def to(hard):
        monkeypatch.setattr(resource, "getrlimit", lambda which: (hard, hard))

    return to


def config(**orchestrator):
    return RunConfig(model={"name": "m"}, max_steps=1, orchestrator=orchestrator)


@pytest.mark.parametrize(
    ("hard", "batch", "inflight"),
    [
        (256, 1280, 32),  # (256 - 128) / 4
        (1024, 1280, 224),
        (1024, 224, None),  # fits
        (130, 64, 1),
        (resource.RLIM_INFINITY, 100_000, None),
    ],
)
def test_what_the_limit_allows_is_in_flight(limited, hard, batch, inflight):
    limited(hard)
    fitted, notices = fit(config(batch_size=batch, max_off_policy_steps=0))
    assert fitted.orchestrator.max_inflight_rollouts == inflight
    if inflight is None:
        assert notices == []
    else:
        assert notices == [
            f"orchestrator.max_inflight_rollouts = {inflight}: ulimit -Hn is {hard}, and {batch} "
            "rollouts in flight may need 4 files each. Raise the hard limit (LimitNOFILE=, "
            "/etc/security/limits.conf) for more at once"
        ]


def test_a_run_that_adapts_may_have_all_batches_in_flight_that_train_in_time(limited):
    limited(1024)
    fitted, (notice,) = fit(config(batch_size=100, max_off_policy_steps=8))
    assert fitted.orchestrator.max_inflight_rollouts == 224 and "900 rollouts" in notice


def test_a_number_that_is_set_stays_and_is_named(limited):
    limited(256)
    own = config(batch_size=1280, max_inflight_rollouts=500)
    fitted, (notice,) = fit(own)
    assert fitted == own
    assert notice.startswith("orchestrator.max_inflight_rollouts: ulimit -Hn is 256, and 500 ")
