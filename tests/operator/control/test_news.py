"""Which events a change of conditions brings: trouble once, with what to do; its end; being ready or not."""

from __future__ import annotations

import pytest

from kvist_operator.control import reasons
from kvist_operator.control.conditions import Condition, Type
from kvist_operator.control.news import News, news

WELL = (Condition(Type.READY, True, reasons.SERVING), Condition(Type.DEGRADED, False, reasons.AS_EXPECTED))
NO_ENGINE = Condition(Type.READY, False, reasons.NONE_READY, "no engine is ready")
LOST = Condition(Type.DEGRADED, True, reasons.BACKEND_LOST, "redis: down")
INVALID = (
    Condition(Type.READY, False, reasons.INVALID_SPEC, "spec.model: no"),
    Condition(Type.DEGRADED, True, reasons.INVALID_SPEC, "spec.model: no"),
)


def told(before: tuple[Condition, ...], after: tuple[Condition, ...]) -> list[News]:
    raw = {"status": {"conditions": [item.as_object(1, None, "then") for item in before]}}
    return list(news(raw, after))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((), WELL, ["Serving: requests are served"]),
        (WELL, WELL, []),
        (WELL, (NO_ENGINE, WELL[1]), ["NoneReady: no longer Ready: no engine is ready"]),
        ((NO_ENGINE, WELL[1]), (NO_ENGINE, WELL[1]), []),
        ((NO_ENGINE, WELL[1]), WELL, ["Serving: requests are served"]),
        (WELL, (WELL[0], LOST), [f"BackendLost: redis: down; {reasons.REMEDY[reasons.BACKEND_LOST]}"]),
        ((WELL[0], LOST), (WELL[0], LOST), []),
        ((WELL[0], LOST), WELL, ["AsExpected: no longer BackendLost"]),
        (WELL, INVALID, [f"InvalidSpec: spec.model: no; {reasons.REMEDY[reasons.INVALID_SPEC]}"]),
    ],
)
def test_a_change_is_told_once(
    before: tuple[Condition, ...], after: tuple[Condition, ...], expected: list[str]
) -> None:
    found = told(before, after)
    assert [f"{item.reason}: {item.message}" for item in found] == expected
    assert all(item.warning == (item.reason in ("BackendLost", "InvalidSpec")) for item in found)
