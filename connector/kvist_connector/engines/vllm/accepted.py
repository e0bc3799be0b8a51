"""The last request this engine took from each router. Torch-free.

A router names its requests `[<router id>-]<32 hex digits>`; a router without an id of its
own is "". The feed carries this, so that a router knows which of its requests a load report
already counts. Requests of others are not noted.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from kvist_connector.engines.vllm.requests import router_request_id

MAX_ROUTERS = 32
MAX_ID = 64  # characters of a router's id
_ROUTED = re.compile(rf"(?:(?P<router>.{{1,{MAX_ID}}})-)?[0-9a-f]{{32}}")


class LastAccepted:
    """Bounded: the router heard of longest ago goes first."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, str] = OrderedDict()

    def note(self, engine_id: str) -> None:
        """A request arrived under the engine's id."""
        request = router_request_id(engine_id)
        if (found := _ROUTED.fullmatch(request)) is None:
            return
        router = found["router"] or ""
        self._last[router] = request
        self._last.move_to_end(router)
        if len(self._last) > MAX_ROUTERS:
            self._last.popitem(last=False)

    def by_router(self) -> dict[str, str]:
        """Router id -> request id."""
        return dict(self._last)
