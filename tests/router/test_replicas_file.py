"""What a replicas file may hold; everything else is refused in words that name the file."""

import os
from pathlib import Path

import pytest

from kvist_connector.errors import ConfigError
from kvist_router.discovery.file import read_file


def test_a_list_is_read_and_an_empty_file_is_no_replica(tmp_path: Path) -> None:
    file = tmp_path / "replicas.yaml"
    file.write_text("- {name: a, url: 'http://127.0.0.1:1'}\n- {name: b, url: 'http://127.0.0.1:2'}\n")
    assert [replica.name for replica in read_file(file)] == ["a", "b"]
    file.write_text("")
    assert read_file(file) == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "UTF-8"),
        (b"- [", "not YAML"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: 1", "must hold a list"),
        (b"- {name: a, url: 'http://h:1', url: 'http://h:2'}", "given twice"),
        (b"- {name: a, url: 'http://h:1'}\n---\n- {name: b, url: 'http://h:2'}", "2 documents"),
        (b"- {name: a, url: 'http://h:1'}\n- {name: a, url: 'http://h:2'}", "'a'"),
        (b"- {name: a, urls: 'http://h:1'}", "urls"),
        (b"- {name: a, url: 'http://h:1?x=/'}", "is not an http:// or https:// URL"),
        (b"- {name: a, url: 'http://h:1/#'}", "is not an http:// or https:// URL"),
        (b'- {name: a, url: "http://h\\n:1"}', "is not an http:// or https:// URL"),
        (b"- {name: a, url: 'http://h:1/a b'}", "is not an http:// or https:// URL"),
        (b"- {name: a, agent: 'http://me:hush@h:1', url: 'http://h:1'}", "leave them out of the URL"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "replicas.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"replicas_file .*replicas\.yaml") as refused:
        read_file(file)
    assert words in str(refused.value)
    assert "hush" not in str(refused.value)


def test_a_folder_or_a_missing_file_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_file(path)
