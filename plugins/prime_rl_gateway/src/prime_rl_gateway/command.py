"""``prime-rl gateway``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from prime_rl_gateway.store import Address

ANSWER_SECONDS = 2.0
"""For ``/health``."""


def gateway(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name or path of a run; latest: the newest.")
    ] = "latest",
    output_dir: Annotated[
        str, typer.Option(help="Folder with run directories, as output_dir names it.")
    ] = "outputs",
    env: Annotated[
        str, typer.Option(help="The env of the gateway, if there are several gateways.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the address and the key of a run's gateway.

    Agents open sessions there, with the key (docs/gateway.md).

    ```
    prime-rl gateway
    ```
    """
    import json

    import prime_rl
    from prime_rl_gateway.source import FOLDER
    from prime_rl_gateway.store import read_address

    try:
        folder = prime_rl.Run(run, output_dir).path
    except prime_rl.PrimeRLError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error

    paths = sorted((folder / "algorithms").glob(f"*/{FOLDER}/address.json"))
    addresses = [address for address in map(read_address, paths) if address is not None]
    chosen = [address for address in addresses if env in ("", address.env)]
    if len(chosen) != 1:
        text = f"{folder} has no gateway (algo.sampling.source.type = 'gateway'), or it has not "
        text += "begun to listen"
        if addresses:
            text = (
                f"{folder} has gateways of {', '.join(each.env for each in addresses)}: name one "
            )
            text += "with --env"
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(2)

    (address,) = chosen
    answers = _answers(address.url)
    if as_json:
        table = {"env": address.env, "url": address.url, "answers": answers}
        typer.echo(json.dumps(table | {"keys": address.keys, "key_vars": address.key_vars}))
        return
    for line in _lines(address):
        typer.echo(line)
    if not answers:
        typer.echo("It does not answer at present.", err=True)


def _lines(address: Address) -> list[str]:
    lines = [f"export PRIME_RL_GATEWAY={address.url}"]
    lines += [f"export PRIME_RL_GATEWAY_KEY={key}" for key in address.keys.values()]
    lines += [f"# tenant {name}: its key is ${var}" for name, var in address.key_vars.items()]
    return lines


def _answers(url: str) -> bool:
    """Whether a gateway listens there."""
    import httpx

    try:
        with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client:
            return client.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False
