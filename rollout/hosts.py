"""Which hosts a request's URLs may name: `CLIENT_ALLOWED_HOSTS`, parsed once, asked at every init and connection.

A name passes by its name, or because every address that it has is inside a listed block. An address passes as what the
operating system would connect to, however it is spelled: `127.1`, `0x7f000001` and `::ffff:127.0.0.1` are 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from typing import TypeAlias

from msgspec import Struct
from yarl import URL

from rollout.errors import HostNotAllowed, SettingsError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

RESOLVE_TIMEOUT_SECONDS = 10.0

_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_LOOPBACK_4, _LOOPBACK_6 = ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")
_ODD_ADDRESS = re.compile(r"[0-9a-fx.]+", re.ASCII | re.IGNORECASE)
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}", re.ASCII)
_NUMERIC_END = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)", re.ASCII)
_BRACKETED = re.compile(r"\[([^\]]*)\](?::(.*))?", re.DOTALL)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


class _Block(Struct, frozen=True):
    network: Network
    port: int | None

    def holds(self, address: Address, port: int) -> bool:
        return (self.port is None or self.port == port) and address in self.network


class AllowedHosts(Struct, frozen=True, kw_only=True):
    """A parsed allow-list. An entry with a port allows that port only (80 and 443 count when a URL names none)."""

    allows_everything: bool = False
    """The list has the entry `*`: every question is answered with yes, and nothing is resolved."""
    names: dict[str, frozenset[int | None]]
    """Ports by host name, or by `.domain` for an entry `*.domain`; None among the ports is any port."""
    blocks: tuple[_Block, ...]

    @classmethod
    def parse(cls, text: str) -> AllowedHosts:
        """The list in the text; `SettingsError` with one line for each entry that is wrong."""
        entries = [entry for entry in (part.strip() for part in text.split(",")) if entry]
        names: dict[str, set[int | None]] = {}
        blocks: list[_Block] = []
        problems: list[str] = [] if entries else ["names no host; * allows every host"]
        for entry in entries:
            if entry == "*":
                continue
            try:
                parsed = _parse_entry(entry)
            except ValueError as exc:
                problems.append(f"{entry!r} {exc}")
                continue
            if isinstance(parsed, _Block):
                blocks.append(parsed)
            else:
                names.setdefault(parsed.name, set()).add(parsed.port)
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(
            allows_everything="*" in entries,
            names={name: frozenset(ports) for name, ports in names.items()},
            blocks=tuple(blocks),
        )

    def allows_name(self, host: str, port: int) -> bool:
        """Whether the host passes by its name alone. An address, however spelled, never does."""
        if self.allows_everything:
            return True
        name = _normal_name(host)
        if name is None:
            return False
        if self._lists(name, port):
            return True
        labels = name.split(".")
        return any(self._lists("." + ".".join(labels[at:]), port) for at in range(1, len(labels)))

    def allows_address(self, ip: str, port: int) -> bool:
        """Whether an address passes, judged as what the operating system would connect to."""
        if self.allows_everything:
            return True
        address = parse_address(ip)
        return address is not None and any(block.holds(address, port) for block in self.blocks)

    async def check(self, url: URL, field: str) -> None:
        """Return if the URL's host is allowed, else raise `HostNotAllowed` naming the field and the host.

        Resolves a name only when it does not pass as a name and there are blocks to compare with. What a name
        resolves to may change: ask `allows_name()` or `allows_address()` again when the connection is made.
        """
        if self.allows_everything:
            return
        host, port = url.raw_host, url.port
        if not host or port is None:
            raise HostNotAllowed(f"the URL names no host - at `$.{field}`")
        if parse_address(host) is not None:
            allowed = self.allows_address(host, port)
        else:
            allowed = self.allows_name(host, port) or await self._allows_resolved(host, port, field)
        if not allowed:
            raise HostNotAllowed(
                f"the host {host!r} with port {port} is not on the list of allowed hosts - at `$.{field}`"
            )

    def allows_resolved(self, host: str, ip: str, port: int) -> bool:
        """Whether a connection to this address of the host may be made: by the host's name, or by the address."""
        return self.allows_name(host, port) or self.allows_address(ip, port)

    def _lists(self, name: str, port: int) -> bool:
        ports = self.names.get(name)
        return ports is not None and (None in ports or port in ports)

    async def _allows_resolved(self, host: str, port: int, field: str) -> bool:
        if not any(block.port is None or block.port == port for block in self.blocks):
            return False
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as exc:  # TimeoutError is an OSError; an impossible label, a UnicodeError
            raise HostNotAllowed(f"the host {host!r} cannot be resolved: {_why(exc)} - at `$.{field}`") from None
        return bool(found) and all(self.allows_address(str(entry[4][0]), port) for entry in found)


def parse_address(text: str) -> Address | None:
    """The address that the operating system would connect to, or None if the text is not one in any spelling."""
    text = text.rstrip(".").strip("[]")
    try:
        address: Address = ipaddress.ip_address(text)
    except ValueError:
        if not _ODD_ADDRESS.fullmatch(text):
            return None
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(text))
        except OSError:
            return None
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_unspecified:  # connecting to 0.0.0.0 or :: reaches this very machine
        return _LOOPBACK_4 if address.version == 4 else _LOOPBACK_6
    return address


def _why(error: OSError | UnicodeError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {RESOLVE_TIMEOUT_SECONDS:g} seconds"
    return error.strerror or "no address" if isinstance(error, OSError) else "it is not a host name"


# ---------------------------------------------------------------- entries


class _Named(Struct, frozen=True):
    name: str
    port: int | None


def _parse_entry(entry: str) -> _Block | _Named:
    """One entry of the list; `ValueError` whose text goes on where the quoted entry ends."""
    if "://" in entry:
        raise ValueError("is a URL; list its host, or host:port")
    if "/" in entry:
        return _parse_block(entry)
    if bracketed := _BRACKETED.fullmatch(entry):
        return _parse_bracketed(bracketed[1], _parse_port(bracketed[2]))
    if entry.count(":") > 1:
        return _parse_bracketed(entry, None)
    host, colon, port_text = entry.partition(":")
    port = _parse_port(port_text if colon else None)
    try:
        return _single(ipaddress.IPv4Address(host), port)
    except ValueError:
        return _Named(_parse_name(host), port)


def _parse_block(entry: str) -> _Block:
    try:
        network = ipaddress.ip_network(entry)
    except ValueError:
        try:
            wider = ipaddress.ip_network(entry, strict=False)
        except ValueError:
            raise ValueError("is not a block such as 10.0.0.0/8 or fd00::/8; a block takes no port") from None
        raise ValueError(f"is not the start of its block: {wider}, or a single address, is meant") from None
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        mapped = int(network.network_address) & 0xFFFFFFFF
        return _Block(ipaddress.IPv4Network((mapped, network.prefixlen - 96)), None)
    return _Block(network, None)


def _parse_bracketed(text: str, port: int | None) -> _Block:
    try:
        return _single(ipaddress.IPv6Address(text), port)
    except ValueError:
        raise ValueError("is not an IPv6 address, such as ::1, [::1] or [::1]:9000") from None


def _single(address: Address, port: int | None) -> _Block:
    judged = parse_address(str(address)) or address
    return _Block(ipaddress.ip_network(judged), port)


def _parse_name(text: str) -> str:
    wildcard = text.startswith("*.")
    name = _normal_name(text[2:] if wildcard else text)
    if name is None:
        raise ValueError("is not a host name, *.domain, address, [IPv6 address] or block")
    return f".{name}" if wildcard else name


def _parse_port(text: str | None) -> int | None:
    if text is None:
        return None
    if not _PORT.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise ValueError(f"has the port {text!r}, which is not in 1..65535")
    return int(text)


def _normal_name(host: str) -> str | None:
    """The name in lower case, in IDNA form, without the trailing dot; None if it is none (an address, say)."""
    try:
        encoded = URL.build(scheme="http", host=host).raw_host or ""
    except ValueError:
        return None
    name = encoded.lower().removesuffix(".")
    if len(name) > 253 or not _NAME.fullmatch(name) or _NUMERIC_END.fullmatch(name):
        return None
    return name
