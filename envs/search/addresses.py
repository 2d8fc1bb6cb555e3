"""Which network addresses a page may come from: public ones, and networks that are named."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from agentenv.errors import ConfigError


class RefusedAddress(OSError):
    """The address is private, loopback, or otherwise not of the public internet."""


class AddressRule:
    """Lets public addresses through, and those of `allow_networks` (e.g. "10.1.0.0/16")."""

    def __init__(self, allow_networks: Sequence[str] = ()) -> None:
        try:
            self._allowed = [ipaddress.ip_network(network) for network in allow_networks]
        except ValueError as error:
            raise ConfigError(
                f'pages.allow_networks: {error}; expected networks such as "10.1.0.0/16"'
            ) from error

    def check(self, address: str) -> None:
        """Raises RefusedAddress. IPv4 inside IPv6 (mapped, 6to4, NAT64, Teredo) counts as IPv4."""
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:  # an unusual spelling hides where it leads
            raise RefusedAddress(f"{address} is not in the usual form") from None
        if any(found in network for network in self._allowed):
            return
        inner = _embedded(found)
        if not found.is_global or found.is_multicast or (inner and not inner.is_global):
            raise RefusedAddress(f"{address} is not a public address")


def _embedded(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> ipaddress.IPv4Address | None:
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in ipaddress.ip_network("64:ff9b::/96"):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


class GuardedResolver(AbstractResolver):
    """Resolves names and refuses addresses; the connection is made to what was checked here.

    So a name that resolves differently the second time gains nothing.
    """

    def __init__(self, rule: AddressRule, inner: AbstractResolver | None = None) -> None:
        self._rule = rule
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of `host`; RefusedAddress if one of them must not be reached."""
        if self._inner is None:
            self._inner = ThreadedResolver()
        found = await self._inner.resolve(host, port, family)
        for result in found:
            self._rule.check(result["host"])
        return found

    async def close(self) -> None:
        """Close the resolver behind."""
        if self._inner is not None:
            await self._inner.close()
