"""Runs `penstock ARGUMENTS…` as a part of a fleet: it ends when the fleet does, however that ends.

Standard input is a pipe whose other end the fleet holds and never writes to. When that is closed, by a kill
as well, this process and everything in its group is killed: whatever it was doing, the next start continues
from what is durable.
"""

from __future__ import annotations

import os
import signal
import threading


def main() -> None:
    """Run the command in `sys.argv`."""
    threading.Thread(target=_end_with_fleet, name="penstock-lifeline", daemon=True).start()
    from penstock.cli.main import main as run

    run()


def _end_with_fleet() -> None:
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass  # a pipe that cannot be read says as much as one that has ended
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
