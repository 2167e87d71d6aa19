"""Tests of documents given by address: allowed addresses, and a table of attempts to reach forbidden ones."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpcore
import pytest
from support.service import running_server

from teola_plugin.server.documents.documents import Fetched, Fetcher, is_named, is_public, name_of_host
from teola_plugin.server.errors import HttpError
from teola_plugin.server.settings import UrlSettings

PUBLIC, OTHER_PUBLIC = "93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"


class Pages(BaseHTTPRequestHandler):
    """Replies that a server on the internet may send."""

    seen: list[dict[str, str]] = []

    def do_GET(self) -> None:
        self.seen.append({"path": self.path, **{key.lower(): value for key, value in self.headers.items()}})
        path = self.path.partition("?")[0]
        if path.startswith("/to/"):
            self.answer(302, b"", Location=self.path.removeprefix("/to/"))
        elif path == "/loop":
            self.answer(301, b"", Location="/loop")
        elif path == "/packed":
            self.answer(200, gzip.compress(b"x" * 1000), **{"Content-Encoding": "gzip"})
        elif path == "/large":
            self.answer(200, b"x" * 5000)
        elif path == "/endless":
            self.endless()
        elif path == "/slow":
            threading.Event().wait(3)
        elif path == "/missing":
            self.answer(404, b"secret of another")
        elif path == "/cookie":
            self.answer(302, b"", Location="/page", **{"Set-Cookie": "a=b"})
        else:
            self.answer(200, b"<html><body>cows eat grass</body></html>", **{"Content-Type": "text/html"})

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def endless(self) -> None:
        """Send a reply without its length."""
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b"x" * 1000)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


class Net(httpcore.AsyncNetworkBackend):
    """A net in which every public address is the test's server. Keeps what was connected to."""

    def __init__(self, port: int) -> None:
        self.port, self.connections = port, list[tuple[str, int]]()
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(self, host: str, port: int, *rest: Any, **more: Any) -> httpcore.AsyncNetworkStream:
        self.connections.append((host, port))
        return await self._inner.connect_tcp("127.0.0.1", self.port, *rest, **more)

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class Names:
    """A resolver; a name with several answers gives them in turn."""

    def __init__(self, **names: Iterable[list[str]]) -> None:
        self.names = {name.replace("_", "."): iter(addresses) for name, addresses in names.items()}
        self.lookups: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        if (name_of_host(host) and host[-1].isdigit()) or ":" in host:
            return [host]
        addresses = next(self.names[host], None) if host in self.names else None
        if addresses is None:
            raise OSError("no such name")
        return addresses


def always(*addresses: str) -> Iterator[list[str]]:
    while True:
        yield list(addresses)


class Case:
    def __init__(self, port: int, **settings: Any) -> None:
        names = {
            "example_org": always(PUBLIC),
            "six_example_org": always(OTHER_PUBLIC),
            "inside_example_org": always("10.0.0.7"),
            "mixed_example_org": always(PUBLIC, "127.0.0.1"),
            "metadata_example_org": always("169.254.169.254"),
            "rebinding_example_org": iter([[PUBLIC], ["127.0.0.1"]]),
        }
        self.net, self.names = Net(port), Names(**names)
        options = {"hosts": ["*"], "schemes": ["http", "https"], "ports": [80, 443, 8080], "seconds": 2, **settings}
        self.fetcher = Fetcher(UrlSettings.model_validate(options), 2000, self.names, self.net)

    def fetch(self, url: str) -> Fetched:
        return asyncio.run(self.fetcher.fetch(url))

    def refused(self, url: str) -> HttpError:
        with pytest.raises(HttpError) as error_info:
            self.fetch(url)
        return error_info.value


# ------------------------------------------------------------ addresses


@pytest.mark.parametrize("address", [PUBLIC, OTHER_PUBLIC, "8.8.8.8", "2001:4860:4860::8888", "1.1.1.1"])
def test_internet_addresses_are_public(address: str) -> None:
    assert is_public(address)


INSIDE = (
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1"),
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "192.0.2.1"),
    *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "192.88.99.1", "203.0.113.5", "198.51.100.1"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
    *("2002:7f00:1::", "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2606::5efe:7f00:1", "100::1"),
    *("", "localhost", "2130706433", "0x7f.1", "127.1", "01.2.3.4"),
)


@pytest.mark.parametrize("address", INSIDE)
def test_internal_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_host_names_are_normalized_and_matched() -> None:
    assert name_of_host("Example.ORG.") == "example.org"
    assert name_of_host("[::1]") == "::1"
    for wrong in (
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "a.0x7f",
        "",
        "a..b",
        "-a.b",
        "a b",
        "fe80::1%eth0",
    ):
        assert name_of_host(wrong) == "", wrong
    assert is_named("a.example.org", ["*.example.org"]) and is_named("example.org", ["example.org"])
    assert not is_named("example.org", ["*.example.org"]) and not is_named("badexample.org", ["*.example.org"])
    assert not is_named("example.org.evil", ["example.org", "*.example.org"])


# ------------------------------------------------------------ what is fetched


def test_document_at_a_public_address_is_fetched(port: int) -> None:
    case = Case(port)
    fetched = case.fetch("http://example.org/a/page.html?q=1#part")
    assert (fetched.type, fetched.name) == ("text/html", "page.html")
    assert case.net.connections == [(PUBLIC, 80)]
    seen = Pages.seen[-1]
    assert (seen["path"], seen["host"]) == ("/a/page.html?q=1", "example.org")
    assert not {"cookie", "authorization", "referer"} & set(seen)
    assert case.fetch("http://six.example.org:8080/") and case.net.connections[-1] == (OTHER_PUBLIC, 8080)
    assert case.fetch(f"http://{PUBLIC}/") and case.net.connections[-1] == (PUBLIC, 80)


def test_redirects_are_followed_each_checked(port: int) -> None:
    case = Case(port)
    assert b"cows" in case.fetch("http://example.org/to//page").data
    assert b"cows" in case.fetch("http://example.org/to/http://six.example.org/page").data
    assert case.net.connections[-2:] == [(PUBLIC, 80), (OTHER_PUBLIC, 80)]
    case.fetch("http://example.org/cookie")
    assert "cookie" not in Pages.seen[-1]


ATTACKS = (
    # by address, in all its spellings
    *("http://127.0.0.1/", "http://127.0.0.1:8080/", "http://localhost/", "http://LOCALHOST./", "http://[::1]/"),
    *("http://2130706433/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0177.0.0.1/", "http://127.1/"),
    *("http://017700000001/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://[0:0:0:0:0:ffff:a00:1]/"),
    *("http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://[fe80::1%25eth0]/", "http://[::]/", "http://0/"),
    *("http://0.0.0.0/", "http://10.0.0.1/", "http://192.168.0.1/", "http://172.16.0.1/", "http://224.0.0.1/"),
    *("http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/", "http://100.100.100.200/", "http://①②⑦.⓪.⓪.①/"),
    *("http://168.63.129.16/", "http://metadata.google.internal/", "http://127。0。0。1/", "http://%31%32%37.0.0.1/"),
    # by name
    *("http://inside.example.org/", "http://mixed.example.org/", "http://metadata.example.org/", "http://nowhere.example/"),
    # by what else an address may hold
    *("ftp://example.org/", "file:///etc/passwd", "gopher://example.org/", "data:text/plain,x", "//example.org/", ""),
    *("http://user:pass@example.org/", "http://example.org@127.0.0.1/", "http://127.0.0.1#@example.org/"),
    *("http://example.org:22/", "http://example.org:0/", "http://example.org:99999/", "http://example.org\\@127.0.0.1/"),
    *("http://example.org\r\nHost: x/", "http://example.org /", "http://", "http:///x", "http://ex\tample.org/"),
    # behind a redirect
    *("http://example.org/to/http://127.0.0.1/", "http://example.org/to/http://169.254.169.254/"),
    *("http://example.org/to/http://2130706433/", "http://example.org/to/http://[::ffff:127.0.0.1]/"),
    *("http://example.org/to/file:///etc/passwd", "http://example.org/to/http://inside.example.org/"),
    *("http://example.org/to/http://example.org:22/", "http://example.org/to//to/http://127.0.0.1/"),
    *("http://example.org/to///127.0.0.1/", "http://example.org/to/http://a:b@example.org/"),
)  # fmt: skip


@pytest.mark.parametrize("url", ATTACKS)
def test_internal_addresses_are_never_contacted(port: int, url: str) -> None:
    case = Case(port)
    error = case.refused(url)
    assert (error.status, error.code) == (400, "url_not_allowed"), str(error)
    assert all(is_public(address) for address, _ in case.net.connections)


def test_dns_rebinding_does_not_reach_internal_addresses(port: int) -> None:
    """DNS rebinding: a name is resolved once for a connection, and anew, with all checks, for the next."""
    case = Case(port)
    assert case.fetch("http://rebinding.example.org/page")
    assert (case.names.lookups, case.net.connections) == (["rebinding.example.org"], [(PUBLIC, 80)])
    assert case.refused("http://rebinding.example.org/page").code == "url_not_allowed"
    assert len(case.net.connections) == 1
    case = Case(port)
    assert case.refused("http://rebinding.example.org/to//page").code == "url_not_allowed"
    assert case.net.connections == [(PUBLIC, 80)]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/loop", 400, "url_redirects"),
        ("/packed", 400, "url_compressed"),
        ("/large", 413, None),
        ("/endless", 413, None),
        ("/slow", 400, "url_timeout"),
        ("/missing", 400, "url_refused"),
    ],
)
def test_faults_of_the_fetched_server_are_reported(port: int, path: str, status: int, code: str | None) -> None:
    error = Case(port).refused(f"http://example.org{path}")
    assert (error.status, error.code) == (status, code)
    assert "secret" not in str(error)


def test_https_requires_a_valid_certificate(port: int) -> None:
    assert Case(port).refused("https://example.org/").code == "url_unreachable"  # it speaks no TLS


def test_only_configured_hosts_schemes_and_ports_are_fetched(port: int) -> None:
    case = Case(port, hosts=["example.org"], schemes=["http"], ports=[80])
    assert case.fetch("http://example.org/")
    for url in ("http://six.example.org/", "https://example.org/", "http://example.org:8080/", f"http://{PUBLIC}/"):
        assert case.refused(url).code == "url_not_allowed"
    assert case.refused("http://example.org/to/http://six.example.org/").code == "url_not_allowed"
    assert case.names.lookups == ["example.org"] * 2
    for wrong in ({"hosts": []}, {"hosts": ["http://x"]}, {"hosts": ["a.*"]}, {"hosts": ["x"], "schemes": ["file"]}):
        with pytest.raises(ValueError):
            UrlSettings.model_validate(wrong)


def test_fetching_is_off_by_default() -> None:
    with pytest.raises(HttpError, match="fetches no documents"):
        asyncio.run(Fetcher(None, 1).fetch("http://example.org/"))


def test_server_fetches_allowed_documents_only(port: int) -> None:
    """A submitted query, and OpenAI's `file_url`; this machine is not reached by them."""
    urls = {"hosts": ["*"], "schemes": ["http"], "ports": [80, port]}
    with running_server(documents={"urls": urls}) as server, server.client() as http:
        case = Case(port)
        server.server.config.app.state.documents._fetcher = case.fetcher
        accepted = http.post(
            "/v1/queries", json={"model": "llm", "input": "x", "documents": [{"url": "http://example.org/a.html"}]}
        )
        assert accepted.status_code == 202, accepted.text
        part = {"type": "input_file", "file_url": "http://example.org/a.html"}
        body = {"model": "llm", "input": [{"role": "user", "content": [part]}]}
        assert http.post("/v1/responses", json=body).status_code == 200
        assert case.net.connections == [(PUBLIC, 80)] * 2
    with running_server(documents={"urls": urls}) as server, server.client() as http:
        before = len(Pages.seen)
        for url in (f"http://127.0.0.1:{port}/", f"http://localhost:{port}/", f"http://[::ffff:127.0.0.1]:{port}/"):
            reply = http.post("/v1/queries", json={"model": "llm", "input": "x", "documents": [{"url": url}]})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "url_not_allowed")
        assert len(Pages.seen) == before
