"""docs/operations.md and docs/runbooks.md say what the code says, and messages what to do."""

from __future__ import annotations

import re
from pathlib import Path

from kvist_operator.control import reasons
from kvist_operator.control.conditions import Condition, Type
from kvist_operator.render.kube.alerts import ALERTS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "operations.md").read_text()
RUNBOOKS = (ROOT / "docs" / "runbooks.md").read_text()
CHART = (ROOT / "charts" / "kvist" / "templates" / "metrics.yaml").read_text()


def rows(heading: str) -> dict[str, str]:
    """First cell without quotes -> the rest, of the table below a heading."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))


def test_every_reason_is_documented_once_in_code_and_page() -> None:
    constants = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert constants == set(reasons.MEANING)
    assert rows("Reasons") == dict(reasons.MEANING)


def test_every_condition_is_documented() -> None:
    assert set(rows("Conditions")) == {str(item) for item in Type}


def test_every_alert_and_every_reason_with_a_remedy_has_one_runbook() -> None:
    alerts, _, sections = RUNBOOKS.partition("\n# Reasons\n")
    of_the_chart = re.findall(r"^ +- alert: (\w+)$", CHART, re.M)
    assert re.findall(r"^## (\w+)$", alerts, re.M) == [alert.name for alert in ALERTS] + of_the_chart
    assert re.findall(r"^## (\w+)$", sections, re.M) == list(reasons.REMEDY)
    assert set(reasons.REMEDY) <= set(reasons.MEANING)


def test_a_message_says_what_to_do_however_long_it_is() -> None:
    for reason, remedy in reasons.REMEDY.items():
        condition = Condition(Type.DEGRADED, True, reason, "x" * 5000)
        assert condition.as_object(1, None, "now")["message"].endswith("x; " + remedy)
