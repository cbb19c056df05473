"""The rule for proxies: this machine and a run's own engines are asked directly, whatever the
environment says. Other endpoints are asked through the proxy that the environment names for them
(``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY``; not the hosts in ``NO_PROXY``).

Many libraries read these variables themselves, also for requests to this machine, and httpx fails
at a value that it does not know. So ``settle`` puts the environment in a form that all can read.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, MutableMapping
from importlib.util import find_spec
from urllib.parse import urlsplit

LOCAL = ("localhost", "127.0.0.1", "::1")
"""Loopback names of this machine."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_READ = {*PROXIES, "WS_PROXY", "WSS_PROXY"}
"""Variables that clients read, in upper or lower case: ``All_Proxy`` counts too."""
NO_PROXY = "NO_PROXY"
_PROXY = re.compile(
    r"((?P<scheme>[a-z][a-z0-9]*)://)?([!-.0-?A-Z^-~]*@)?"  # user and password
    r"(?P<host>[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:(?P<port>[0-9]{1,5}))?/?"
)


def settle(environ: MutableMapping[str, str], urls: Iterable[str] = ()) -> list[str]:
    """Remove from ``environ`` what HTTP clients fail at, and except this machine from its proxies;
    also those of ``urls`` that a range in ``NO_PROXY`` has, because clients ignore ranges. Returns
    a line about each part that is not used."""
    notices = []
    names = [name for name in environ if name.upper() in _READ]
    for name in names:
        proxy = environ[name]
        fault = _fault(proxy) if proxy else ""
        if fault:
            del environ[name]
            notices.append(f"{name} is not used: {fault}")

    exceptions = environ.get("no_proxy") or environ.get(NO_PROXY) or ""
    has_proxy = any(environ.get(name) for name in names)
    if not exceptions and not has_proxy:
        return notices

    entries = [entry.strip() for entry in exceptions.split(",") if entry.strip()]
    readable = [_readable(entry) for entry in entries]
    for entry, host in zip(entries, readable, strict=True):
        if host is None:
            notices.append(
                f"{NO_PROXY}: {entry!r} is not used: expected a host, or a range of IPv4"
            )

    covered = [host for host in map(_host, urls) if _is_in_range(host, entries)]
    hosts = [*filter(None, readable), *LOCAL, *covered]
    # Clients read either spelling, so both variables are set.
    for name in (NO_PROXY, "no_proxy"):
        environ[name] = ",".join(dict.fromkeys(hosts))
    return notices


def is_loopback(url: str) -> bool:
    """Whether a URL is of this machine."""
    host = _host(url)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _fault(proxy: str) -> str:
    """Why no client here can use a proxy; empty: one can."""
    parts = _PROXY.fullmatch(proxy)
    if parts is None or int(parts["port"] or 1) not in range(1, 1 << 16):
        return "expected http://HOST:PORT"

    try:
        if re.fullmatch(r"[\d.]+|\[.*", parts["host"]):
            ipaddress.ip_address(parts["host"].strip("[]"))
    except ValueError:
        return "expected http://HOST:PORT"

    scheme = parts["scheme"] or "http"
    if scheme in ("socks5", "socks5h"):
        return "" if find_spec("socksio") else "SOCKS needs a package: pip install 'httpx[socks]'"
    if scheme not in ("http", "https"):
        return f"expected a proxy of http, https or socks5, got {scheme}"

    return ""


def _readable(entry: str) -> str | None:
    """An entry of ``NO_PROXY`` as clients read it: IPv6 without brackets. None: none reads it."""
    bare = re.sub(r"^\[([^\]]*)\](:\d+)?$", r"\1", entry)
    try:
        address = ipaddress.ip_network(bare, strict=False)
    except ValueError:
        is_host = re.fullmatch(r"(\w+://)?[\w.*<>-]+(:\d{1,5})?", bare, re.ASCII)
        return bare if is_host else None
    # Clients do not read a range of IPv6.
    is_range = "/" in bare
    return None if is_range and address.version == 6 else bare


def _is_in_range(host: str, entries: Iterable[str]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in _ranges(entries))


def _ranges(
    entries: Iterable[str],
) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    for entry in entries:
        try:
            yield ipaddress.ip_network(entry, strict=False)
        except ValueError:
            continue


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""
