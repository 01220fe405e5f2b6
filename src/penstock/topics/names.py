"""Names of topics and routers: what is allowed where something would be created."""

from __future__ import annotations

import re
from typing import Final

from penstock.topics.errors import InvalidRequest

__all__ = ["check_router_name", "check_topic_name", "is_topic_name"]


_TOPIC: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}", re.ASCII)
_ROUTER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:>-]{0,254}", re.ASCII)


def is_topic_name(name: str) -> bool:
    """Whether a topic may be called so."""
    return _TOPIC.fullmatch(name) is not None


def check_topic_name(name: str) -> str:
    """The name itself. Raises `InvalidRequest` when no topic may be called so."""
    if not is_topic_name(name):
        raise InvalidRequest(
            f"{name[:80]!r} is not a topic name: start with a letter or digit, then letters, digits, "
            "'.', '_', ':' or '-', 255 characters at most"
        )
    return name


def check_router_name(name: str) -> str:
    """The name itself. Raises `InvalidRequest` when no router may be called so."""
    if _ROUTER.fullmatch(name) is None:
        raise InvalidRequest(
            f"{name[:80]!r} is not a router name: start with a letter or digit, then letters, digits, "
            "'.', '_', ':', '>' or '-', 255 characters at most"
        )
    return name
