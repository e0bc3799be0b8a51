"""What agents of tests are given in place of the short limits of production."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from kvist_connector.agent.settings import AgentSettings
from kvist_connector.testing.patience import SECONDS, patient, patient_flags

NAMED = {"replica": "r", "socket": Path("s"), "arena": Path("a")}
SECTIONS = ("disk", "redis", "object_store", "peer")


def test_no_limit_of_a_tier_is_left_short() -> None:
    settings = AgentSettings(**patient(NAMED | {section: {} for section in SECTIONS}))
    limits = {
        f"{name}.{limit}": getattr(section, limit)
        for name, section in settings
        if isinstance(section, BaseModel)
        for limit in type(section).model_fields
        if limit.endswith("deadline")
    }
    assert set(limits.values()) == {SECONDS}
    assert {name.split(".")[0] for name in limits} == set(SECTIONS)
    assert settings.lookup_deadline == 2 * SECONDS


def test_a_limit_that_a_test_names_is_its_own() -> None:
    given = patient(NAMED | {"redis": {"deadline": 0.5}, "lookup_deadline": 1})
    assert (given["lookup_deadline"], given["redis"]) == (1, {"deadline": 0.5, "lookup_deadline": SECONDS})
    flags = patient_flags({"redis__deadline": 0.5, "lookup_deadline": 1})
    assert flags == {"lookup_deadline": 1, "redis__deadline": 0.5, "redis__lookup_deadline": SECONDS}
