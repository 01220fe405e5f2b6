"""Runs `penstock ARGUMENTS…` as a part of `penstock up`: the process ends when its parent does.

Whatever it was doing, the next start continues from what is durable.
"""

from __future__ import annotations

from penstock.child_process import end_with_parent


def main() -> None:
    """Run the command in `sys.argv`."""
    end_with_parent()
    from penstock.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
