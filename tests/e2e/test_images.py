"""Archives that containerd can import: every blob lies under its own digest."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from testbed.images import FileImage


@pytest.fixture
def image(tmp_path: Path) -> FileImage:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF and so on")
    return FileImage("kvist.dev/thing:1", "/thing", {"/thing": program})


def blobs(archive: Path) -> dict[str, bytes]:
    """Name in the archive -> content."""
    with tarfile.open(archive) as opened:
        return {entry.name: opened.extractfile(entry).read() for entry in opened if entry.isfile()}


def follow(found: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    """The blob of a descriptor, which must have the digest and size it says."""
    content = found["blobs/" + descriptor["digest"].replace(":", "/")]
    assert descriptor["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert descriptor["size"] == len(content)
    return content


def test_an_archive_leads_from_its_name_to_the_program(image: FileImage, tmp_path: Path) -> None:
    image.write(tmp_path / "image.tar")
    found = blobs(tmp_path / "image.tar")
    [entry] = json.loads(found["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "kvist.dev/thing:1"
    manifest = json.loads(follow(found, entry))
    config = json.loads(follow(found, manifest["config"]))
    [layer] = [follow(found, described) for described in manifest["layers"]]
    assert config["config"]["Entrypoint"] == ["/thing"]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as opened:
        [program] = opened.getmembers()
        assert (program.name, program.mode) == ("thing", 0o755)
        assert opened.extractfile(program).read() == b"\x7fELF and so on"


def test_the_same_files_make_the_same_archive(image: FileImage, tmp_path: Path) -> None:
    image.write(tmp_path / "one.tar")
    image.write(tmp_path / "two.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
