"""``python -m prime_rl_env_workers.trust RUN_DIR``: prints which envs of a run are to have workers
where ``env_workers`` is ``auto``, as a JSON list of ``train/LABEL`` and ``eval/LABEL``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prime_rl.config.orchestrator import SourceConfig
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings
from prime_rl.rundir.directory import read_config
from prime_rl_env_workers.environment import is_trusted
from prime_rl_env_workers.placed import key_of


def not_trusted(config: RunConfig) -> list[str]:
    """Raises ``ConfigError`` if an env cannot be made."""
    train = config.orchestrator.train
    evaluation = config.orchestrator.eval
    tables: list[tuple[SourceConfig, dict[str, Any] | None]] = []
    tables += [(env, train.harness) for env in train.env]
    tables += [(env, evaluation.harness) for env in evaluation.env]
    return [
        key_of(env)
        for env, harness in tables
        if not is_trusted(Environment(EnvSettings.of(env, default_harness=harness)))
    ]


if __name__ == "__main__":
    config = read_config(Path(sys.argv[1]))
    print(json.dumps(not_trusted(config)))  # the last line: imports may print
