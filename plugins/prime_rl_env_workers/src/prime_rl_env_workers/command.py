"""``prime-rl serve-env``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from prime_rl.config.orchestrator import SourceConfig
    from prime_rl_env_workers.environment import WorkerEnvironment


def serve_env(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG.toml...", help="The run's TOML files, as for prime-rl run."),
    ],
    env: Annotated[
        str,
        typer.Option(
            help="Name of the environment, or eval/NAME for the evaluation's of a name that both "
            "have. Default: the first one to train on."
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port of the first worker; the others follow. 0: free ones.")
    ] = 5000,
    workers: Annotated[int, typer.Option(help="Number of workers.", min=1)] = 1,
    announce: Annotated[
        Path | None, typer.Option(help="File that gets the addresses when a worker is ready.")
    ] = None,
) -> None:
    """Serve an environment of a run's config to runs on other machines, until Ctrl-C.

    A worker that ends, hangs or grows is replaced. Runs set the env's address to what is printed.
    Who connects can run episodes, so both machines need the same key: a secret text in the
    environment variable PRIME_RL_ENV_SERVER_KEY. Connections are then encrypted, and the key does
    not travel. Without a key it serves this machine only.

    ```
    prime-rl serve-env my.toml --host 10.0.0.5 --workers 8
    ```
    """
    import asyncio

    from prime_rl.errors import ConfigError, RunError
    from prime_rl.proxies import is_loopback
    from prime_rl.rundir.launch import ENV_SERVER_KEY, PARENT_PID
    from prime_rl.rundir.machine import free_ports
    from prime_rl.rundir.processes import exit_with_parent
    from prime_rl_env_workers.placed import MAKE_KEY

    if PARENT_PID in os.environ:
        exit_with_parent()
    if not os.environ.get(ENV_SERVER_KEY) and not is_loopback(f"http://{host}"):
        typer.echo(
            f"error: --host {host}: a server that other machines reach needs a key, the same here "
            f"and where the run starts. Make one, and set the variable {ENV_SERVER_KEY} to it: "
            f"{MAKE_KEY}",
            err=True,
        )
        raise typer.Exit(2)
    ports = free_ports(workers, host) if port == 0 else range(port, port + workers)
    addresses = [f"tcp://{host}:{each}" for each in ports]
    try:
        asyncio.run(_serve(_environment(configs, env, addresses), addresses, announce))
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
    except (ConfigError, RunError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


def _environment(configs: list[Path], label: str, addresses: list[str]) -> WorkerEnvironment:
    from prime_rl.config.orchestrator import EnvConfig
    from prime_rl.env.episode import EnvSettings
    from prime_rl.errors import ConfigError
    from prime_rl_app.config import load_config
    from prime_rl_env_workers.environment import WorkerEnvironment, WorkerParts
    from prime_rl_env_workers.placed import key_of

    config = load_config(configs)
    train = config.orchestrator.train
    evaluation = config.orchestrator.eval
    every: list[tuple[SourceConfig, dict[str, Any] | None]] = []
    every += [(env, train.harness) for env in train.env]
    every += [(env, evaluation.harness) for env in evaluation.env]
    chosen = label or every[0][0].label
    known = {
        name: found for found in reversed(every) for name in (found[0].label, key_of(found[0]))
    }
    if chosen not in known:
        names = ", ".join(env.label for env, _ in every)
        raise ConfigError(f"no env {chosen!r} in the config; expected one of: {names}")

    table, harness = known[chosen]
    if isinstance(table, EnvConfig) and table.past_agents:
        raise ConfigError(
            f"env {chosen!r}: an earlier version plays agent {min(table.past_agents)!r}, and only "
            "the run knows its engine. Let the run start the env's workers (env_workers)."
        )
    made = WorkerEnvironment(EnvSettings.of(table, default_harness=harness))
    without_address = table.model_copy(update={"address": ()})
    shared = WorkerParts(None, config.plugins.disabled, typer.echo)
    made.add_workers(len(addresses), without_address, config, shared, addresses)
    return made


async def _serve(env: WorkerEnvironment, addresses: list[str], announced: Path | None) -> None:
    from prime_rl_env_workers.placed import announce

    assert env.pool is not None
    async with env:
        typer.echo(f"address = {addresses}".replace("'", '"'))
        if announced is not None:
            await env.pool.ready()
            announce(announced, addresses)
        await env.pool.ended()
