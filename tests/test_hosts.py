"""`CLIENT_ALLOWED_HOSTS`: what an entry means, and which URLs pass."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from rollout.errors import HostNotAllowed, SettingsError
from rollout.hosts import AllowedHosts, parse_address

LOOPBACK_SPELLINGS = [
    "127.0.0.1",
    "127.1",
    "127.0.1",
    "0x7f000001",
    "0X7F.1",
    "2130706433",
    "0177.0.0.1",
    "[::ffff:127.0.0.1]",
    "[::FFFF:7f00:1]",
    "127.0.0.1.",
    "0.0.0.0",
]


@pytest.mark.parametrize("host", ["anything.example", "10.1.2.3", "[::1]"])
async def test_a_star_allows_every_host_without_looking_it_up(host: str) -> None:
    hosts = AllowedHosts.parse("*")

    await hosts.check(URL(f"http://{host}:81/"), "server_url")

    assert hosts.allows_everything
    assert hosts.allows_name(host, 1)
    assert hosts.allows_address("10.0.0.1", 1)


def test_a_star_among_other_entries_allows_everything() -> None:
    assert AllowedHosts.parse("trainer, *").allows_everything


@pytest.mark.parametrize(
    ("entry", "host", "port", "allowed"),
    [
        ("trainer", "trainer", 80, True),
        ("trainer", "TRAINER.", 80, True),
        ("Trainer.Example.", "trainer.example", 443, True),
        ("trainer", "trainer2", 80, False),
        ("trainer", "my.trainer", 80, False),
        ("trainer:8080", "trainer", 8080, True),
        ("trainer:8080", "trainer", 80, False),
        ("trainer:8080,trainer:80", "trainer", 80, True),
        ("trainer:8080,trainer", "trainer", 1, True),
        ("*.example.com", "a.example.com", 80, True),
        ("*.example.com", "a.b.Example.com", 80, True),
        ("*.example.com", "example.com", 80, False),
        ("*.example.com", "badexample.com", 80, False),
        ("*.example.com:443", "a.example.com", 80, False),
        ("*.example.com:443", "a.example.com", 443, True),
        ("bücher.example", "xn--bcher-kva.example", 80, True),
        ("xn--bcher-kva.example", "BÜCHER.example", 80, True),
        ("my_host", "my_host", 80, True),
        ("trainer", "127.0.0.1", 80, False),
        ("trainer", "no host", 80, False),
        ("trainer", "x" * 300, 80, False),
        ("127.0.0.0/8", "127.0.0.1", 80, False),
    ],
)
def test_a_name_passes_by_name_and_port(entry: str, host: str, port: int, allowed: bool) -> None:
    assert AllowedHosts.parse(entry).allows_name(host, port) is allowed


@pytest.mark.parametrize(
    ("entry", "ip", "port", "allowed"),
    [
        ("10.0.0.0/8", "10.255.0.1", 80, True),
        ("10.0.0.0/8", "11.0.0.1", 80, False),
        ("10.0.0.0/8", "::ffff:10.0.0.1", 80, True),
        ("::ffff:10.0.0.0/104", "10.0.0.1", 80, True),
        ("10.0.0.1", "10.0.0.1", 80, True),
        ("10.0.0.1:81", "10.0.0.1", 80, False),
        ("10.0.0.1:81", "10.0.0.1", 81, True),
        ("fd00::/8", "fd12::1", 80, True),
        ("fd00::/8", "10.0.0.1", 80, False),
        ("::1", "::1", 80, True),
        ("[::1]", "[::1]", 80, True),
        ("[::1]:9000", "::1", 9000, True),
        ("[::1]:9000", "::1", 80, False),
        ("[::ffff:10.0.0.1]", "10.0.0.1", 80, True),
        ("::1", "::", 80, True),
        ("10.0.0.0/8", "trainer", 80, False),
        ("10.0.0.0/8", "0x", 80, False),
    ],
)
def test_an_address_passes_by_block_and_port(entry: str, ip: str, port: int, allowed: bool) -> None:
    assert AllowedHosts.parse(entry).allows_address(ip, port) is allowed


@pytest.mark.parametrize("host", LOOPBACK_SPELLINGS)
async def test_every_spelling_of_an_address_is_judged_as_what_would_be_connected_to(host: str) -> None:
    url = URL(f"http://{host}:8080/v1")

    await AllowedHosts.parse("127.0.0.0/8").check(url, "server_url")
    with pytest.raises(HostNotAllowed):
        await AllowedHosts.parse("10.0.0.0/8,127-0-0-1.example,*.test").check(url, "server_url")


async def test_ports_that_a_url_leaves_out_count() -> None:
    hosts = AllowedHosts.parse("trainer:443")

    await hosts.check(URL("https://trainer/"), "server_url")
    with pytest.raises(HostNotAllowed):
        await hosts.check(URL("http://trainer/"), "server_url")


async def test_a_name_passes_when_all_its_addresses_are_inside_the_blocks() -> None:
    await AllowedHosts.parse("127.0.0.0/8,::1").check(URL("http://localhost:1/"), "server_url")
    with pytest.raises(HostNotAllowed, match=r"'localhost' with port 1 is not on the list"):
        await AllowedHosts.parse("10.0.0.0/8,::2").check(URL("http://localhost:1/"), "server_url")


async def test_a_name_is_not_looked_up_when_no_block_has_its_port() -> None:
    with pytest.raises(HostNotAllowed, match="not on the list"):
        await AllowedHosts.parse("127.0.0.1:2,trainer").check(URL("http://no-such-host.invalid:1/"), "server_url")


@pytest.mark.parametrize(
    ("host", "reason"),
    [("no-such-host.invalid", "cannot be resolved: [A-Z]"), ("a..b", "it is not a host name")],
)
async def test_a_name_that_cannot_be_resolved_is_refused_with_the_reason(host: str, reason: str) -> None:
    with pytest.raises(HostNotAllowed, match=reason):
        await AllowedHosts.parse("10.0.0.0/8").check(URL(f"http://{host}/"), "server_url")


async def test_a_name_server_that_does_not_answer_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    monkeypatch.setattr("rollout.hosts.RESOLVE_TIMEOUT_SECONDS", 0)

    with pytest.raises(HostNotAllowed, match="no answer within"):
        await AllowedHosts.parse("10.0.0.0/8").check(URL("http://trainer/"), "server_url")


async def test_a_refusal_names_the_field_and_the_host_but_nothing_else_of_the_url() -> None:
    url = URL("http://user:PASSWORD@evil.example:81/path?key=SECRET")

    with pytest.raises(HostNotAllowed) as caught:
        await AllowedHosts.parse("trainer").check(url, "completion_callback_url")

    assert (caught.value.status, caught.value.code) == (422, "host_not_allowed")
    assert "`$.completion_callback_url`" in caught.value.detail
    assert "'evil.example'" in caught.value.detail
    assert not any(word in caught.value.detail for word in ("PASSWORD", "SECRET", "path"))


async def test_a_url_without_a_host_is_refused() -> None:
    with pytest.raises(HostNotAllowed, match="names no host"):
        await AllowedHosts.parse("trainer").check(URL("/v1"), "server_url")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no host"),
        (" , ,", "names no host"),
        ("http://trainer:80", "is a URL"),
        ("trainer:", "port ''"),
        ("trainer:0", "1..65535"),
        ("trainer:65536", "1..65535"),
        ("trainer:٨٠", "1..65535"),
        ("trainer:http", "1..65535"),
        ("10.0.0.5/8", "10.0.0.0/8"),
        ("10.0.0.0/33", "is not a block"),
        ("10.0.0.0/8:80", "a block takes no port"),
        ("trainer/24", "is not a block"),
        ("[trainer]", "is not an IPv6 address"),
        ("[10.0.0.1]", "is not an IPv6 address"),
        ("[::1]:x", "1..65535"),
        ("1:2:3", "is not an IPv6 address"),
        ("256.0.0.1", "is not a host name"),
        ("127.1", "is not a host name"),
        ("0x7f000001", "is not a host name"),
        ("a.*.b", "is not a host name"),
        ("*trainer", "is not a host name"),
        ("*.", "is not a host name"),
        ("-a.b", "is not a host name"),
        ("a..b", "is not a host name"),
        ("a b", "is not a host name"),
        ("user@trainer", "is not a host name"),
    ],
)
def test_a_wrong_entry_is_named_with_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        AllowedHosts.parse(text)

    assert problem in str(caught.value)


def test_all_wrong_entries_are_reported_together() -> None:
    with pytest.raises(SettingsError) as caught:
        AllowedHosts.parse("good, bad:0, 10.0.0.5/8")

    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["'bad:0'", "'10.0.0.5/8'"]


@given(st.ip_addresses())
def test_an_address_in_its_own_spelling_is_itself_unless_mapped_or_unspecified(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    judged = parse_address(str(ip))
    meant = getattr(ip, "ipv4_mapped", None) or ip

    assert judged == meant or (meant.is_unspecified and judged is not None and judged.is_loopback)


@given(st.integers(1, 2**32 - 1))
def test_a_number_is_the_address_with_that_number(number: int) -> None:
    assert parse_address(str(number)) == parse_address(hex(number)) == ipaddress.IPv4Address(number)


@settings(max_examples=50)
@given(st.text(max_size=20) | st.from_regex(r"[*.\[\]:/0-9a-fx-]{0,12}", fullmatch=True))
def test_no_text_breaks_the_parser_or_the_questions(text: str) -> None:
    hosts = AllowedHosts.parse("trainer,10.0.0.0/8")

    assert hosts.allows_name(text, 80) in (True, False)
    assert hosts.allows_address(text, 80) in (True, False)
    with contextlib.suppress(SettingsError):
        AllowedHosts.parse(text)
