"""Hits and bytes since the agent's start, from what engines report about finished prefills."""

from __future__ import annotations

from collections import Counter

from kvist_connector.protocol.engine import RequestRecord
from kvist_connector.protocol.tiers import Tier


class Totals:
    """Sums of request records."""

    def __init__(self) -> None:
        self.requests = 0
        self.requests_hit = 0
        self.prompt_tokens = 0
        self.hit_tokens: Counter[Tier] = Counter()

    def add(self, record: RequestRecord) -> None:
        """One finished prefill; tiers this version does not know are left out."""
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.requests_hit += any(record.hit_tokens.values())
        for number, tokens in record.hit_tokens.items():
            if number in Tier._value2member_map_:
                self.hit_tokens[Tier(number)] += tokens
