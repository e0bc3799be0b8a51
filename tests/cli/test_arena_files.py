"""What a stopped replica leaves in the arena folder."""

from __future__ import annotations

from pathlib import Path

from kvist_cli.local.agents import remove_arena


def test_all_files_of_an_arena_go_and_those_of_others_stay(tmp_path: Path) -> None:
    arena = tmp_path / "replica-1"
    for name in (
        "",
        ".journal",
        ".journal.partial",
        ".retired.json",
        ".retired.json.partial",
        ".deletions.partial",
        ".eviction",
        ".eviction.partial",
    ):
        (tmp_path / f"replica-1{name}").touch()
    (tmp_path / "replica-10").touch()
    remove_arena(arena)
    remove_arena(arena)  # nothing is left to do
    assert [path.name for path in tmp_path.iterdir()] == ["replica-10"]
