"""Runs `penstock ARGUMENTS…` as a part of `penstock up`: the process ends when its parent ends.

It may end at any point: the next start continues from the durable state.
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
