"""Where the console listens and who may use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from penstock.errors import ConfigError
from penstock.http import allowed_hosts
from penstock.servers import Keyring, Scope, check_reach

__all__ = ["ACT", "DEFAULT_PORT", "KEYS_VARIABLE", "LOOK", "ConsoleSettings"]

DEFAULT_PORT: Final = 4600
KEYS_VARIABLE: Final = "PENSTOCK_CONSOLE_KEYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleSettings:
    """Raises `ConfigError` if other machines could reach it without a key, or a key covers a part alone."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    """0 takes a free one."""
    keys: Keyring = field(default_factory=Keyring)
    """`read` is enough to look; to redrive takes `write`."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in `Host` and `Origin` besides addresses, localhost and this machine's name; `*` for any."""
    sessions_file: str = ""
    """Where sessions are kept over a restart, as digests; without it they end with the process."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"the console's port is {self.port}: write one from 0 to 65535")
        _ = allowed_hosts(self.allowed_hosts, "allowed_hosts")
        if self.keys.has_prefixes:
            raise ConfigError(
                f"{KEYS_VARIABLE}: keys of the console take no prefixes, because it shows the whole machine"
            )
        check_reach(
            self.host,
            has_keys=len(self.keys) > 0,
            allowed=False,
            way_out=f"set {KEYS_VARIABLE}, or bind the console to 127.0.0.1",
        )

    def __repr__(self) -> str:
        return f"ConsoleSettings(host={self.host!r}, port={self.port}, keys={self.keys!r})"


LOOK: Final = Scope.READ
"""What a key needs to see anything."""
ACT: Final = Scope.READ | Scope.WRITE
"""What it needs to change something."""
