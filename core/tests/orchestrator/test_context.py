"""What core lends to an env's algorithm."""

from types import SimpleNamespace

import pytest

from prime_rl import ConfigError
from prime_rl.config.run import RunConfig
from prime_rl.env.rendering import Rendering
from prime_rl.inference.scorer import PromptScorer
from prime_rl.orchestrator.context import EnvHost


@pytest.mark.parametrize(("takes", "fits"), [(8, False), (16, True), (None, True)])
async def test_a_reference_model_with_a_context_shorter_than_a_rollout_is_refused(
    takes, fits, tmp_path
):
    class Pool:
        label, max_model_len = "env 'a': reference 'big'", takes

        async def wait_ready(self, timeout):
            pass

    config = RunConfig(model={"name": "m"}, max_steps=1, inference={"max_model_len": 16})
    run, rendering = SimpleNamespace(config=config), Rendering(tmp_path, None)
    shared = SimpleNamespace(scores=PromptScorer(None, "m"), run=run, rendering=rendering)
    host = EnvHost("a", None, shared)
    host._connected.append(Pool())
    if fits:
        return await host.wait_ready(1.0)
    with pytest.raises(ConfigError, match=r"'big' takes 8 tokens .* a rollout may have 16"):
        await host.wait_ready(1.0)
