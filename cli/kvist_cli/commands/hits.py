"""The router's hit figures, out of its metrics: requests, tokens, seconds."""

from __future__ import annotations

from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvist_cli.asking import DEADLINE, NOBODY, Credentials, request
from kvist_connector.names import LABEL_TIER, PATH_METRICS

_PREFIX: Final = "kvist_router_"


def read_hits(admin_url: str, who: Credentials = NOBODY) -> dict[str, Any]:
    """Figures since the router started; {"error": text} when it does not answer."""
    try:
        answer = request("GET", admin_url + PATH_METRICS, None, DEADLINE, who)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        return {"error": f"{admin_url}{PATH_METRICS} does not answer: {str(error) or type(error).__name__}"}
    return hits(answer.text)


def hits(metrics: str) -> dict[str, Any]:
    """Rates are None until a request was recorded; `seconds_saved` is the router's estimate."""
    totals: dict[str, float] = {}
    tiers: dict[str, int] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX)
            totals[name] = totals.get(name, 0.0) + sample.value
            if name == "hit_tokens_total":
                tier = sample.labels[LABEL_TIER]
                tiers[tier] = tiers.get(tier, 0) + int(sample.value)
    return {
        "requests": _rate(totals, "hit_requests_total", "recorded_requests_total"),
        "tokens": _rate(totals, "hit_tokens_total", "recorded_prompt_tokens_total"),
        "seconds_saved": round(totals.get("saved_seconds_total", 0.0), 3),
        "tokens_by_tier": tiers,
        "recorded_requests": int(totals.get("recorded_requests_total", 0)),
    }


def _rate(totals: dict[str, float], part: str, whole: str) -> float | None:
    base = totals.get(whole, 0.0)
    return round(totals.get(part, 0.0) / base, 4) if base else None
