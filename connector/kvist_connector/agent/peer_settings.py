"""Settings of reading other agents' memory, and of letting them read ours."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from kvist_connector import names
from kvist_connector.agent.server_settings import concurrency, deadline, lookup_deadline, pause
from kvist_connector.settings import WITHHELD, Settings


def peer_url(url: str) -> str:
    """An address of a peer port, in one form; raises ValueError."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise PydanticCustomError(
            WITHHELD, "peers are asked with http.token_file: leave out user and password"
        )
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("give http://host:port of a peer port, without a path")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{parts.port or names.PORT_PEER}"


def own_url(text: str) -> str:
    """The same; of an address alone with the default port, as a pod knows its own. Raises ValueError."""
    try:
        host = ip_address(text)
    except ValueError:
        return peer_url(text)
    return peer_url(f"http://[{host}]" if host.version == 6 else f"http://{host}")


def _split(value: Any) -> Any:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


PeerUrls = Annotated[tuple[Annotated[str, AfterValidator(peer_url)], ...], BeforeValidator(_split)]


class PeerSettings(Settings):
    """Memory of other agents, read directly, and ours for them; absent unless host or urls are given."""

    host: str | None = Field(
        None,
        description="address on which other agents read from this arena; default none: nothing is served",
    )
    port: int = Field(
        names.PORT_PEER, ge=0, le=65535, description="port for that; 0 takes a free one; default 8300"
    )
    urls: PeerUrls = Field(
        (),
        max_length=64,
        description="peer ports of other agents, with commas between: http://host:port; a name may stand for "
        "many and is looked up again; default none",
    )
    address: Annotated[str, AfterValidator(own_url)] | None = Field(
        None,
        description="own peer port as the others' peer.urls have it, or what their names stand for; an IP "
        "address alone means port 8300; default none: nothing is left to peers in a drain",
    )
    lookup_deadline: float = lookup_deadline(0.1, "what peers have")
    deadline: float = deadline(2.0, "reading or sending")
    pause: float = pause(5.0, "failing or lying peer")
    concurrency: int = concurrency(4, "read at a time, each peer")
    reads: int = Field(16, ge=1, le=1024, description="chunks sent to others at a time; default 16")

    @property
    def used(self) -> bool:
        """Whether there is such a tier: who serves can also be asked to read from somebody."""
        return self.host is not None or bool(self.urls)
