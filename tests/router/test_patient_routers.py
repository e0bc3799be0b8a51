"""What routers of tests are given in place of the short limits of production."""

from __future__ import annotations

from kvist_router.testing.patience import SECONDS, patient, patient_flags


def test_limits_are_long_but_those_that_a_test_names() -> None:
    given = patient({"port": 0, "limits": {"connect_seconds": 0.5}, "health": {"failures": 2}})
    assert given["limits"]["connect_seconds"] == 0.5
    assert given["limits"]["decide_seconds"] == given["tokens"]["remote_seconds"] == SECONDS
    assert given["health"] == {"interval_seconds": 0.05, "timeout_seconds": SECONDS, "failures": 2}


def test_as_flags_too() -> None:
    flags = patient_flags(["--limits.connect-seconds", "0.5", "--replica", "x"])
    assert flags.count("--limits.connect-seconds") == 1
    assert flags[flags.index("--limits.connect-seconds") + 1] == "0.5"
    assert flags[flags.index("--health.timeout-seconds") + 1] == str(SECONDS)
