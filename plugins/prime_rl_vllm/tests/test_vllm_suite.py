"""The real vLLM keeps every promise of the engine contract.

The last file by name: the last promise is that the server ends.
"""

import pytest

from prime_rl_devkit.engines import CHECKS, hold

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("check", CHECKS)
def test_vllm_keeps_the_promises_of_an_engine(vllm, check):
    hold(vllm, check)
