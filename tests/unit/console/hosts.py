"""A host without processes: its plan and its parts are what a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.console.seam import Change, CommandOutcome, LogLine, Part, PartState, Plan


class FixedHost:
    """See `Host`."""

    def __init__(self, plan: Plan | None = None, parts: Sequence[Part] = ()) -> None:
        self.now = plan or Plan()
        self.running = list(parts)
        self.lines: list[LogLine] = []
        self.listeners: list[Callable[[Change], None]] = []
        self.commands: list[list[str]] = []

    def parts(self) -> Sequence[Part]:
        return self.running

    def plan(self) -> Plan:
        return self.now

    def log(self) -> Sequence[LogLine]:
        return self.lines

    def subscribe(self, tell: Callable[[Change], None]) -> Callable[[], None]:
        self.listeners.append(tell)
        return lambda: self.listeners.remove(tell)

    async def run(self, arguments: Sequence[str], tell: Callable[[str], None]) -> CommandOutcome:
        self.commands.append(list(arguments))
        return CommandOutcome(exit_code=0, output="{}", errors="")

    def say(self, text: str) -> None:
        line = LogLine(at_ms=1, part="test", level="info", text=text)
        self.lines.append(line)
        for tell in self.listeners:
            tell(line)


def part(name: str, state: PartState = PartState.READY, error: str | None = None) -> Part:
    return Part(name=name, kind=name, state=state, since_ms=1, last_error=error)
