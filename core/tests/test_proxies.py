"""Which endpoints are asked through a proxy, and that no setting of one ends a client."""

import asyncio
import ipaddress
import ssl

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.errors import EngineError
from prime_rl.inference.client import EngineClient
from prime_rl.proxies import NO_PROXY, PROXIES, is_loopback, settle

BOTH = [*PROXIES, *map(str.lower, PROXIES), NO_PROXY, NO_PROXY.lower()]
CERTIFICATES = ssl.create_default_context()
"""Of all clients: httpx reads them anew for each one and each proxy, 20 ms."""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in BOTH:
        monkeypatch.delenv(name, raising=False)


def client_of(environ, monkeypatch):
    """A client of httpx that reads ``environ``; it raises for what it does not know."""
    with monkeypatch.context() as patch:
        for name in BOTH:
            patch.delenv(name, raising=False)
            if name in environ:
                patch.setenv(name, environ[name])
        with httpx.Client(verify=CERTIFICATES) as client:
            return client


def test_without_a_proxy_nothing_changes():
    environ = {"HOME": "here"}
    assert settle(environ) == [] and environ == {"HOME": "here"}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ALL_PROXY", "socks5://proxy:1080", "SOCKS needs a package: pip install 'httpx[socks]'"),
        ("all_proxy", "socks5h://proxy:1080", "SOCKS needs a package: pip install 'httpx[socks]'"),
        ("https_proxy", "socks4://proxy:1080", "expected a proxy of http, https or socks5"),
        ("HTTP_PROXY", "ftp://proxy", "expected a proxy of http, https or socks5, got ftp"),
        ("HTTP_PROXY", "http://proxy:port", "expected http://HOST:PORT"),
        ("HTTPS_PROXY", "http://", "expected http://HOST:PORT"),
        ("HTTPS_PROXY", "http://[::1", "expected http://HOST:PORT"),
        ("All_Proxy", "socks4a://proxy:1080", "expected a proxy of http, https or socks5"),
        ("WS_PROXY", "http://proxy:99999", "expected http://HOST:PORT"),
    ],
)
def test_a_proxy_that_no_client_can_use_is_left_out_with_its_reason(name, value, why, monkeypatch):
    monkeypatch.setattr("prime_rl.proxies.find_spec", lambda package: None)
    environ = {name: value}
    (notice,) = settle(environ)
    assert notice.startswith(f"{name} is not used: {why}")
    assert environ == {}


def test_a_proxy_that_can_be_used_stays(monkeypatch):
    environ = {"HTTP_PROXY": "http://user:secret@proxy:3128", "https_proxy": "proxy:3128"}
    before = {**environ}
    assert settle(environ) == []
    assert environ.items() >= before.items()
    assert environ["no_proxy"] == environ["NO_PROXY"] == "localhost,127.0.0.1,::1"
    client_of(environ, monkeypatch)


def test_a_proxy_in_any_case_is_not_asked_for_this_machine():
    environ = {"Http_Proxy": "http://proxy:3128"}
    assert settle(environ) == []
    assert environ["no_proxy"] == "localhost,127.0.0.1,::1"


def test_a_range_is_kept_and_its_hosts_are_excepted(monkeypatch):
    urls = ["http://10.1.2.3:8000/v1", "http://11.0.0.1", "http://[fe80::7]:80", "http://name"]
    environ = {"NO_PROXY": "10.0.0.0/8, fe80::/10 ,[::1],.corp", "HTTP_PROXY": "http://proxy:1"}
    (notice,) = settle(environ, urls)
    assert "'fe80::/10' is not used" in notice
    hosts = "10.0.0.0/8,::1,.corp,localhost,127.0.0.1,10.1.2.3,fe80::7"
    assert environ["NO_PROXY"] == environ["no_proxy"] == hosts
    client_of(environ, monkeypatch)


ADDRESSES = st.ip_addresses().map(str)
NETWORKS = st.ip_addresses().flatmap(
    lambda address: st.integers(0, address.max_prefixlen).map(lambda n: f"{address}/{n}")
)
ENTRIES = st.one_of(
    ADDRESSES,
    NETWORKS,
    ADDRESSES.map("[{}]".format),
    ADDRESSES.map("[{}]:80".format),
    st.text("ab.*:[]/-%@ \\0189<>", max_size=12),
    st.text(max_size=8).filter(lambda text: "\0" not in text),
    st.sampled_from(["*", ".corp", "host:80", "host:port", "http://a", "<local>", "::1%eth0"]),
)


@given(st.lists(ENTRIES, max_size=5))
def test_no_list_of_exceptions_ends_a_client(entries):
    environ = {"NO_PROXY": ",".join(entries), "HTTP_PROXY": "http://proxy:1"}
    settle(environ)
    with pytest.MonkeyPatch.context() as patch:
        client_of(environ, patch)
    assert {"localhost", "127.0.0.1", "::1"} <= {*environ["NO_PROXY"].split(",")}
    again = {**environ}
    assert settle(again) == [] and again == environ


@given(st.text(max_size=20) | st.from_regex(r"\A(https?|socks5h?|ftp|x)?(://)?[a-z\[\]:0-9@.]*\Z"))
def test_no_proxy_ends_a_client(value):
    if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        return  # no environment has these
    environ = {"ALL_PROXY": value}
    settle(environ)
    with pytest.MonkeyPatch.context() as patch:
        client_of(environ, patch)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.8.9.1", True),
        ("http://[::1]:80", True),
        ("http://localhost:1", True),
        ("http://LOCALHOST", True),
        ("http://10.0.0.1", False),
        ("https://127.0.0.1.example.com/v1", False),
        ("http://localhost.example.com", False),
        ("http://[::1", False),
    ],
)
def test_what_is_this_machine(url, expected):
    assert is_loopback(url) is expected


@given(st.ip_addresses())
def test_addresses_of_this_machine_are_those_of_the_standard(address):
    host = f"[{address}]" if address.version == 6 else str(address)
    assert is_loopback(f"http://{host}:1") == ipaddress.ip_address(address).is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost"])
async def test_an_engine_of_this_machine_is_not_asked_through_a_proxy(host, monkeypatch):
    asked = []

    async def answer(reader, writer):
        asked.append(await reader.readline())
        writer.close()

    proxy = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    for name in PROXIES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    client = EngineClient(f"http://{host}:9", None)
    elsewhere = EngineClient("http://engine.invalid:9", None)
    async with proxy:
        for each in (client, elsewhere):
            with pytest.raises(EngineError):
                await each.request("GET", "/health", 5.0)
            await each.close()
    assert asked == [b"GET http://engine.invalid:9/health HTTP/1.1\r\n"]
