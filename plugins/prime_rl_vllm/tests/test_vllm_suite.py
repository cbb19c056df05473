"""The real vLLM passes the engine suite.

The last file by name: the last check ends the server.
"""

import pytest

from prime_rl_devkit.engines import CHECKS, hold

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("check", CHECKS)
def test_vllm_passes_the_engine_suite(vllm, check):
    hold(vllm, check)
