"""What ends a relay, beside the errors of the server and of the store.

PenstockError
├── Fenced    RelayTaken     somebody else relays under the same name
└── Corrupt   RelayGap       records were evicted or expired before they were relayed
              TopicChanged   the topic is not the one that was relayed so far
"""

from __future__ import annotations

from penstock.errors import Corrupt, Fenced

__all__ = ["RelayGap", "RelayTaken", "TopicChanged"]


class RelayTaken(Fenced):
    """Another process relays under the same name; nothing was appended. Stop one of the two."""


class RelayGap(Corrupt):
    """Records are gone from the topic before they were relayed, and `on_gap` is `fail`."""


class TopicChanged(Corrupt):
    """The topic was removed and made anew, or set back: its numbers mean other records now."""
