"""A connection between a browser and a server that can be cut or blocked."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

__all__ = ["Wire", "wired"]


class Wire:
    """Forwards every connection to a port of this machine, except while it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = True
        self._flows = threading.Event()
        self._flows.set()
        self._ends: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End open connections, and close new ones immediately."""
        self._whole = False
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Keep connections open, but forward nothing."""
        self._flows.clear()

    def mend(self) -> None:
        self._whole = True
        self._flows.set()

    def close(self) -> None:
        self.cut()
        self._flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self._whole:
                    self._join(near, socket.create_connection(("127.0.0.1", self._target)))
                else:
                    near.close()

    def _join(self, near: socket.socket, far: socket.socket) -> None:
        self._ends |= {near, far}
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.discard(source)
        source.close()


@contextlib.contextmanager
def wired(target: int) -> Iterator[Wire]:
    wire = Wire(target)
    try:
        yield wire
    finally:
        wire.close()
