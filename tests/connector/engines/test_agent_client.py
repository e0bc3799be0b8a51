"""The client against agents that stall, refuse, talk nonsense, vanish and come back."""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
from dataclasses import dataclass

import pytest

from kvist_connector.engines.agent_client import AgentClient, ClientTimes
from kvist_connector.engines.inbox import Closed, Inbox
from kvist_connector.errors import AgentGone
from kvist_connector.protocol.engine import (
    PROTOCOL_VERSION,
    Grant,
    Hello,
    Lookup,
    Refused,
    SlotRef,
    ToAgent,
    Welcome,
)
from kvist_connector.protocol.framing import FrameDecoder, encode

HELLO = Hello(protocol=PROTOCOL_VERSION, role="scheduler", engine="e", member="m", rank=0, pid=1)
WELCOME = Welcome(protocol=PROTOCOL_VERSION, epoch=1, agent="test")
DEADLINE = 30.0


class Seen:
    """A handler that keeps what it was told."""

    def __init__(self):
        self.events = queue.Queue()

    def opened(self, welcome):
        self.events.put(("opened", welcome))

    def received(self, message):
        self.events.put(("received", message))

    def closed(self, reason):
        self.events.put(("closed", reason))

    def next(self):
        return self.events.get(timeout=DEADLINE)


class Pauses:
    """A fake clock: pauses are noted and end when the test lets them."""

    def __init__(self):
        self.asked = queue.Queue()
        self.go = queue.Queue()

    def __call__(self, stopping, seconds):
        self.asked.put(seconds)
        while not stopping.is_set():
            try:
                self.go.get(timeout=0.02)
            except queue.Empty:
                continue
            return

    def next(self):
        """The pause that the client is in; it ends."""
        seconds = self.asked.get(timeout=DEADLINE)
        self.go.put(None)
        return seconds


@dataclass
class Rig:
    path: object
    client: AgentClient
    seen: Seen
    pauses: Pauses
    revived: list
    server: socket.socket | None = None

    def listen(self):
        self.path.unlink(missing_ok=True)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.settimeout(DEADLINE)
        self.server.bind(str(self.path))
        self.server.listen()
        return self

    def accept(self, *messages):
        """A connection whose Hello was read, with these messages sent."""
        connection, _ = self.server.accept()
        connection.settimeout(DEADLINE)
        decoder = FrameDecoder(ToAgent)
        greeting = []
        while not greeting:
            greeting = list(decoder.feed(connection.recv(65536)))
        assert greeting == [HELLO]
        for message in messages:
            connection.sendall(encode(message))
        return connection


@pytest.fixture
def make(tmp_path):
    made = []

    def build(**times):
        seen, pauses, revived = Seen(), Pauses(), []
        path = tmp_path / "a.sock"
        client = AgentClient(
            path,
            lambda: (HELLO,),
            seen,
            "test",
            ClientTimes(**times),
            revive=lambda: revived.append(1),
            wait=pauses,
        )
        made.append(Rig(path, client, seen, pauses, revived))
        return made[-1]

    yield build
    for rig in made:
        rig.client.close()
        if rig.server is not None:
            rig.server.close()


def test_messages_go_both_ways_once_welcomed(make):
    rig = make().listen()
    assert not rig.client.send(HELLO)  # not started
    rig.client.start()
    grant = Grant(refs=(SlotRef(1, 2),))
    with rig.accept(WELCOME, grant) as connection:
        assert rig.seen.next() == ("opened", WELCOME)
        assert rig.seen.next() == ("received", grant)
        lookup = Lookup(request="r", keys=b"", tokens=1)
        assert rig.client.send(lookup)
        assert list(FrameDecoder(ToAgent).feed(connection.recv(65536))) == [lookup]


def test_nothing_is_sent_before_the_welcome(make):
    rig = make().listen()
    rig.client.start()
    with rig.accept():
        assert not rig.client.send(Lookup(request="r", keys=b"", tokens=1))


def test_back_off_doubles_to_its_limit_and_starts_again_after_a_welcome(make):
    rig = make(first_retry=0.05, last_retry=0.3)
    rig.client.start()
    assert [rig.pauses.next() for _ in range(5)] == [0.05, 0.1, 0.2, 0.3, 0.3]
    assert len(rig.revived) >= 5
    rig.listen()
    rig.pauses.go.put(None)
    rig.accept(WELCOME).close()
    assert rig.seen.next()[0] == "opened"
    assert rig.seen.next()[0] == "closed"
    while (pause := rig.pauses.next()) == 0.3:
        continue  # pauses of attempts before the agent listened
    assert pause == 0.05
    rig.accept(WELCOME).close()  # connected again without a restart
    assert rig.seen.next()[0] == "opened"


def test_an_agent_that_accepts_and_says_nothing_is_left(make):
    rig = make(welcome=0.05).listen()
    rig.client.start()
    with rig.accept() as connection:
        assert connection.recv(1) == b""  # the client hung up
    assert rig.pauses.next() > 0
    assert rig.seen.events.empty()  # never opened, so never closed
    assert not rig.revived  # somebody listens: nobody else is started


def test_a_refusal_is_said_once_and_tried_again_later(make, caplog):
    rig = make().listen()
    rig.client.start()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with rig.accept(Refused(reason="layouts disagree: 8 heads, 4 heads")) as connection:
                assert connection.recv(1) == b""
            rig.pauses.next()
    assert caplog.text.count("refuses this engine: layouts disagree") == 1
    assert not rig.client.send(HELLO)


@pytest.mark.parametrize(
    "sent",
    [
        encode(Welcome(protocol=PROTOCOL_VERSION + 1, epoch=1, agent="newer")),
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        b"\xff" * 64,
    ],
    ids=["other-protocol", "no-message", "no-frame"],
)
def test_an_agent_that_is_not_understood_is_left(make, sent):
    rig = make().listen()
    rig.client.start()
    with rig.accept() as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""
    assert rig.seen.events.empty()


def test_an_agent_that_stops_reading_costs_a_bounded_buffer_and_never_blocks(make):
    rig = make(unsent_bytes=1 << 20).listen()
    rig.client.start()
    with rig.accept(WELCOME):
        assert rig.seen.next()[0] == "opened"
        message = Lookup(request="r", keys=b"k" * 65536, tokens=1)
        taken = 0
        while rig.client.send(message):
            taken += 65536
            assert taken < 64 << 20  # socket buffers and the bound, not more
        assert rig.seen.next() == ("closed", "the agent does not read its socket")
        assert not rig.client.send(message)
    rig.pauses.next()
    with rig.accept(WELCOME):  # another connection, without the rest of the old one
        assert rig.seen.next()[0] == "opened"
        assert rig.client.send(HELLO)


def test_an_agent_that_reads_slowly_gets_every_byte_in_order(make):
    rig = make().listen()
    rig.client.start()
    with rig.accept(WELCOME) as connection:
        rig.seen.next()
        wanted = [Lookup(request=str(n), keys=b"k" * 60000, tokens=n) for n in range(60)]
        assert all(rig.client.send(message) for message in wanted)
        decoder, found = FrameDecoder(ToAgent), []
        while len(found) < len(wanted):
            found += decoder.feed(connection.recv(65536))
        assert found == wanted


def test_close_ends_the_thread_and_the_connection(make):
    rig = make().listen()
    before = threading.active_count()
    rig.client.start()
    with rig.accept(WELCOME) as connection:
        rig.seen.next()
        rig.client.close()
        assert connection.recv(1) == b""
    assert rig.seen.next()[0] == "closed"
    assert threading.active_count() == before


def test_an_inbox_that_nobody_drains_drops_the_connection():
    now = iter(range(100))
    inbox = Inbox(clock=lambda: next(now), limit=3)
    inbox.opened(WELCOME)
    for _ in range(2):
        inbox.received(Grant(refs=()))
    with pytest.raises(AgentGone, match="were not read"):
        inbox.received(Grant(refs=()))
    inbox.closed("full")
    assert [arrival.message for arrival in inbox.take()] == [Closed("full")]
