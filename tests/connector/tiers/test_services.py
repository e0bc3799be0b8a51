"""Where tests look for the servers is where `tools/services.sh` puts them."""

import subprocess
import sys
from pathlib import Path

from kvist_connector.testing import services

ROOT = Path(__file__).resolve().parents[3]


def test_the_s3_server_is_looked_for_where_it_is_built(tmp_path, monkeypatch):
    monkeypatch.setenv("KVIST_TOOLS", str(tmp_path))
    command = [sys.executable, ROOT / "e2e" / "build", "--path", "versitygw"]
    path = Path(
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    )
    assert services.s3_binary() is None
    path.parent.mkdir(parents=True)
    path.touch()
    assert services.s3_binary() == path


def test_what_is_missing_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("KVIST_TOOLS", str(tmp_path))
    assert "versitygw" in services.missing()
    assert "make services" in services.missing()
