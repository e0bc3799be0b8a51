"""A file that a setting names may be replaced by anything while a program runs."""

import os

import pytest

from kvist_connector import setting_files
from kvist_connector.agent.token_file import TokenFile


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge", "gone"])
def test_what_is_put_in_place_of_a_file_of_secrets_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "token"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"."):
        setting_files.text_of(path)
    assert os.listdir("/proc/self/fd") == before


def test_a_token_is_kept_while_something_else_is_in_its_place(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    token = TokenFile(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert token() == "first"
    path.unlink()
    os.mkfifo(path)
    assert token() == "first"
    path.unlink()
    path.write_text("second")
    assert token() == "second"
