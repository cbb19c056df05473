"""Property tests are the same in every run, and a busy machine fails none of them."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")
