"""What goes into the step's one message to the agent. Torch-free."""

from __future__ import annotations

from typing import Any

from kvist_connector.protocol.engine import AnswerRecord, Commit, EngineLoad, RequestRecord, SlotRef, Step


class Outbox:
    """Collects during a step; emptied when the message is taken or the agent is gone."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.discards: list[SlotRef] = []
        self.releases: list[str] = []
        self.bad_keys: list[bytes] = []
        self.records: list[RequestRecord] = []
        self.answers: list[AnswerRecord] = []

    def take(self, load: EngineLoad | None) -> Step | None:
        """The message, or None when nothing is in it."""
        if load is None and not any(self._parts):
            return None
        step = Step(
            commits=tuple(self.commits),
            discards=tuple(self.discards),
            releases=tuple(self.releases),
            bad_keys=b"".join(self.bad_keys),
            records=tuple(self.records),
            load=load,
            answers=tuple(self.answers),
        )
        self.clear()
        return step

    def withdraw_release(self, request: str) -> bool:
        """Take a release back; False when none was waiting."""
        if request not in self.releases:
            return False
        self.releases.remove(request)
        return True

    def clear(self) -> None:
        """Nothing of this concerns the next connection."""
        for part in self._parts:
            part.clear()

    @property
    def _parts(self) -> tuple[list[Any], ...]:
        return (self.commits, self.discards, self.releases, self.bad_keys, self.records, self.answers)
