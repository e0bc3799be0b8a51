"""What the bed has running, on disk: `state.json`, replaced whole at every change."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace

from testbed.bed import Bed
from testbed.namespaces import Process, alive, inside


@dataclass(frozen=True)
class Record:
    """The first process and the programs under it. Their pids are those inside."""

    first: Process
    programs: dict[str, Process] = field(default_factory=dict)

    def running(self, name: str) -> bool:
        """Whether a program runs."""
        return name in self.programs and alive(self.programs[name], inside(self.first))

    def dead(self) -> list[str]:
        """Programs that should run and do not."""
        if not alive(self.first):
            return ["first process", *self.programs]
        return [name for name in self.programs if not self.running(name)]

    def having(self, name: str, process: Process) -> Record:
        """The record with one more program."""
        return replace(self, programs={**self.programs, name: process})


def load(bed: Bed) -> Record | None:
    """The record, or None when there is none or it is not readable."""
    try:
        read = json.loads((bed.state / "state.json").read_text())
        programs = {name: Process(**process) for name, process in read["programs"].items()}
        return Record(Process(**read["first"]), programs)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(bed: Bed, record: Record) -> None:
    """Write it whole or not at all."""
    half = bed.state / "state.json.partial"
    half.write_text(json.dumps(asdict(record), indent=1))
    os.replace(half, bed.state / "state.json")
