"""The worker half and arenas: prepared off the step, taken over between steps, unmapped once."""

from __future__ import annotations

import threading

import pytest
import torch

from kvist_connector.engines.vllm.config import EngineConfig, ExtraConfig
from kvist_connector.engines.vllm.connector import engine_layout
from kvist_connector.engines.vllm.layout import layer_index, read_pages
from kvist_connector.engines.vllm.worker import WorkerHalf
from kvist_connector.errors import UnsupportedError
from kvist_connector.transfer.cpu import CpuCopier

CONFIG = EngineConfig(
    extra=ExtraConfig(),
    engine="e",
    model="m",
    block_tokens=32,
    chunk_tokens=256,
    num_blocks=20,
    ranks=1,
    overlapping_steps=False,
)


class Copier(CpuCopier):
    """Notes what is done to arenas, and on which thread."""

    def __init__(self, table, refuse=False):
        super().__init__(table)
        self.refuse = refuse
        self.calls = []
        self.may_prepare = threading.Event()
        self.may_prepare.set()

    def prepare(self, arena):
        self.calls.append(("prepare", arena.path.name, threading.current_thread().name))
        assert self.may_prepare.wait(30)
        if self.refuse:
            raise UnsupportedError("the arena cannot be pinned for the device")

    def attach(self, arena):
        self.calls.append(("attach", arena and arena.path.name))
        super().attach(arena)

    def forget(self, arena):
        self.calls.append(("forget", arena.path.name))


@pytest.fixture
def make(fake_agent):
    made = []

    def build(**options):
        caches = {"layer.0": torch.zeros(20, 32, 16, dtype=torch.uint8)}
        table = read_pages(caches, 20, 32, 256)
        copier = Copier(table, **options)
        worker = WorkerHalf(CONFIG, 0, fake_agent.socket_path)
        worker.register(copier, layer_index(caches, table), engine_layout(CONFIG, table, {"model": "tiny"}))
        made.append(worker)
        return worker, copier

    yield build
    for worker in made:
        worker.close()


def until(condition):
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("not reached")


def test_an_arena_is_prepared_off_the_step_and_attached_in_one(make):
    worker, copier = make()
    until(lambda: worker.ready)
    assert copier.calls == [("prepare", "agent.arena", "kvist-arena-0")]
    worker.begin_step()
    worker.begin_step()
    assert copier.calls[1:] == [("attach", "agent.arena")]
    worker.close()
    assert copier.calls[2:] == [("attach", None), ("forget", "agent.arena")]


def test_quiesce_is_answered_while_a_new_arena_is_pinned(make, fake_agent):
    worker, copier = make()
    until(lambda: worker.ready)
    worker.begin_step()
    copier.may_prepare.clear()
    fake_agent.restart(keep=False)
    until(lambda: len(copier.calls) == 3)
    fake_agent.quiesce(9)
    fake_agent.wait_for(lambda: 9 in fake_agent.quiesced())
    worker.begin_step()
    assert len(copier.calls) == 3  # steps go on with what they have
    copier.may_prepare.set()


def test_an_arena_that_cannot_be_pinned_is_said_and_not_used(make, caplog):
    worker, copier = make(refuse=True)
    until(lambda: "cannot be used, serving uncached" in caplog.text)
    assert "cannot be pinned" in caplog.text
    worker.begin_step()
    assert not worker.ready
    assert [call[0] for call in copier.calls] == ["prepare"]


def test_a_new_arena_replaces_the_old_one_between_steps(make, fake_agent):
    worker, copier = make()
    until(lambda: worker.ready)
    worker.begin_step()
    fake_agent.restart(keep=False)
    until(lambda: len(copier.calls) == 3)
    assert copier.calls[2][0] == "prepare"
    until(lambda: worker.begin_step() or len(copier.calls) > 3)
    assert copier.calls[3:] == [("attach", "agent.arena"), ("forget", "agent.arena")]


def test_an_arena_that_the_agent_kept_is_not_mapped_again(make, fake_agent):
    worker, copier = make()
    until(lambda: worker.ready)
    worker.begin_step()
    fake_agent.restart(keep=True)
    fake_agent.wait_for(lambda: fake_agent.roles == ["worker"])
    fake_agent.quiesce(5)
    fake_agent.wait_for(lambda: 5 in fake_agent.quiesced())  # the Arena message came before
    worker.begin_step()
    assert [call[0] for call in copier.calls] == ["prepare", "attach"]


def test_an_arena_never_attached_is_unmapped_at_close(make):
    worker, copier = make()
    until(lambda: worker.ready)
    worker.close()
    assert [call[0] for call in copier.calls] == ["prepare", "attach", "forget"]
