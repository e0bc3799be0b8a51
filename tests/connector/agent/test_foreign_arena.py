"""Files in a folder for all, put there by another user under the names of an agent's."""

import os

import pytest

from kvist_connector.agent.arena_file import ArenaFile
from kvist_connector.errors import ConfigError

SIZE = 1 << 16


@pytest.mark.parametrize("name", ["arena", "arena.journal", "arena.members"])
def test_an_arena_of_another_user_is_not_used(tmp_path, name, monkeypatch):
    theirs = tmp_path / name
    theirs.touch()
    (tmp_path / "arena-of-another-agent").touch()
    other = os.geteuid() + 4711
    lstat = type(theirs).lstat

    def found(path):
        real = lstat(path)
        changed = path in (theirs, tmp_path / "arena-of-another-agent")
        return os.stat_result((*real[:4], other, *real[5:10])) if changed else real

    monkeypatch.setattr(type(theirs), "lstat", found)
    with pytest.raises(ConfigError, match=f"/{name} belongs to another user .{other}.: remove it"):
        ArenaFile.reserve(tmp_path / "arena", SIZE)
    monkeypatch.undo()
    ArenaFile.reserve(tmp_path / "arena", SIZE).close()
