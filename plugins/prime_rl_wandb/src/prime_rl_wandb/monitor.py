"""The monitor. It imports wandb and connects at the first metrics, in the monitor's own thread, so
that the run starts without waiting for it."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from prime_rl import Monitor, PluginConfig, Rollout
from prime_rl_wandb.table import COLUMNS, table_row

log = logging.getLogger(__name__)


class WandbConfig(PluginConfig):
    """``[monitors.wandb]``"""

    project: Annotated[str, Field(min_length=1)] = "prime-rl"
    """The W&B project."""
    entity: str | None = None
    """User or team of the project. None: W&B's default."""
    name: str | None = None
    """Name of the W&B run. None: the run directory's."""
    group: str | None = None
    """W&B shows the runs of a group together."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """``offline`` writes below ``<run>/wandb``, for ``wandb sync``; ``disabled`` writes nothing."""
    table_interval: NonNegativeInt = 10
    """Steps between two tables of rollouts. 0: none."""
    table_rows: PositiveInt = 32
    """Rollouts per table, from the start of the batch."""


class WandbMonitor(Monitor):
    """Logs every line as a row with ``step`` as its x axis."""

    name = "wandb"
    config_class = WandbConfig

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        assert isinstance(config, WandbConfig)
        self.settings = config
        self._run: Any = None
        self._failure: Exception | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of the history, without values that are not finite: charts cannot show them."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.run().log({"step": step, **finite})

    def wants_rollouts(self, step: int) -> bool:
        """Every ``table_interval`` steps, beginning with the first."""
        interval = self.settings.table_interval
        return interval > 0 and (step - 1) % interval == 0

    def log_rollouts(
        self, step: int, rollouts: Sequence[Rollout], dropped: Sequence[str | None]
    ) -> None:
        """A table of the batch's first rollouts, with their credit."""
        import wandb

        pairs = list(zip(rollouts, dropped, strict=True))[: self.settings.table_rows]
        rows = [table_row(step, rollout, reason) for rollout, reason in pairs]
        table = wandb.Table(columns=list(COLUMNS), data=rows)
        self.run().log({"step": step, "rollouts": table})

    def close(self) -> None:
        """Flush and end the W&B run."""
        if self._run is not None:
            import wandb

            self._run.finish()
            wandb.teardown()  # waits until W&B's own process has written everything

    def run(self) -> Any:
        """The W&B run, created at the first call. If that fails, every later call raises without
        another attempt."""
        if self._failure is not None:
            raise self._failure
        if self._run is None:
            try:
                self._run = self._begin()
            except Exception as error:
                self._failure = RuntimeError(f"W&B cannot be reached: {error}")
                raise

        return self._run

    def _begin(self) -> Any:
        import wandb

        settings = self.settings
        run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or self.run_dir.name,
            group=settings.group,
            tags=settings.tags,
            mode=settings.mode,
            id=self._run_id(),
            resume="allow" if settings.mode == "online" else None,
            dir=str(self.run_dir),
            config=self._run_config(),
            settings=wandb.Settings(console="off", silent=True),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return run

    def _run_id(self) -> str:
        """The same id after each resume, so that the charts continue."""
        path = self.run_dir / "wandb" / "run_id"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(secrets.token_hex(4), "utf-8")
        return path.read_text("utf-8").strip()

    def _run_config(self) -> dict[str, Any]:
        """The resolved config. It contains no secrets, only names of environment variables."""
        path = self.run_dir / "configs" / "run.json"
        try:
            config = json.loads(path.read_text("utf-8-sig"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s: expected JSON: %s. W&B gets no config", path, error)
            return {}

        if not isinstance(config, dict):
            actual = type(config).__name__
            log.warning("%s: expected a JSON object, found %s. W&B gets no config", path, actual)
            return {}
        return config
