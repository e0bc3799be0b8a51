"""Who the peers are: names looked up again, ourselves left out, failures without effect."""

import asyncio
import logging

import pytest

from kvist_connector.agent.peer_settings import PeerSettings
from kvist_connector.agent.roster import FIRST_SECONDS, MOST, REFRESH_SECONDS, Roster, resolve
from kvist_connector.errors import TierError


class Names:
    """A resolver whose answers the test chooses, and the pauses between its questions."""

    def __init__(self, **settings):
        self.hosts: list[str] | None = []
        self.told: list[tuple[str, ...]] = []
        self.pauses: list[float] = []
        self.roster = Roster(PeerSettings(**settings), self.look_up, self.pause)
        self.roster.changed = self.changed

    async def look_up(self, host):
        if self.hosts is None:
            raise TierError(f"{host} cannot be looked up")
        return self.hosts

    async def changed(self, found):
        self.told.append(found)

    async def pause(self, seconds):
        self.pauses.append(seconds)
        if len(self.pauses) == 2:
            raise InterruptedError
        self.hosts = ["10.0.0.1"]


async def test_a_name_stands_for_those_that_are_there_without_ourselves():
    names = Names(urls=["http://pool.svc:8300"], address="http://10.0.0.2:8300")
    names.hosts = ["10.0.0.2", "10.0.0.3", "10.0.0.1", "10.0.0.3", "fd00::1"]
    await names.roster.refresh()
    expected = ("http://10.0.0.1:8300", "http://10.0.0.3:8300", "http://[fd00::1]:8300")
    assert names.roster.addresses == expected
    await names.roster.refresh()
    names.hosts = ["10.0.0.3"]
    await names.roster.refresh()
    assert names.told == [expected, ("http://10.0.0.3:8300",)]


async def test_a_name_that_cannot_be_looked_up_leaves_the_last_addresses_and_is_logged_once(caplog):
    names = Names(urls=["http://pool.svc:8300"])
    names.hosts = ["10.0.0.1"]
    await names.roster.refresh()
    names.hosts = None
    with caplog.at_level(logging.WARNING):
        await names.roster.refresh()
        await names.roster.refresh()
    assert names.roster.addresses == ("http://10.0.0.1:8300",)
    assert caplog.text.count("pool.svc cannot be looked up") == 1


async def test_while_nobody_is_there_it_is_asked_more_often():
    names = Names(urls=["http://pool.svc"])
    with pytest.raises(InterruptedError):
        await names.roster.run()
    assert names.pauses == [FIRST_SECONDS, REFRESH_SECONDS]


def test_numeric_addresses_are_known_at_once():
    names = Names(urls=["http://10.0.0.1", "http://10.0.0.2", "http://x"], address="http://10.0.0.2")
    assert names.roster.addresses == ("http://10.0.0.1:8300",)


async def test_there_is_a_bound(caplog):
    names = Names(urls=["http://pool.svc"])
    names.hosts = [f"10.0.0.{number}" for number in range(100)]
    with caplog.at_level(logging.WARNING):
        await names.roster.refresh()
    assert len(names.roster.addresses) == MOST
    assert "100 addresses" in caplog.text


async def test_the_systems_resolver_is_asked():
    assert "127.0.0.1" in await resolve("localhost")
    with pytest.raises(TierError, match=r"peer\.urls: x+ cannot be looked up"):
        await resolve("x" * 64)


async def test_a_resolver_that_says_nothing_is_named(monkeypatch):
    async def silent(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent)
    with pytest.raises(TierError, match=r"pool\.svc cannot be looked up: no answer"):
        await resolve("pool.svc")
