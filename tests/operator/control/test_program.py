"""`python -m kvist_operator`: configured like the other programs, and it says what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvist_operator.app import context, run, terms
from kvist_operator.settings import ImageSettings, OperatorSettings


def test_the_printed_configuration_is_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--watch-namespaces", "[a, b]", "--images.pull-policy", "Never", "--lease.name", "other"]
    assert run([*flags, "--print-config"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "operator.yaml"
    file.write_text(printed)
    assert run(["--config", str(file), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert yaml.safe_load(printed)["watch_namespaces"] == ["a", "b"]


def test_the_environment_is_read_and_flags_win(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVIST_OPERATOR_WORKERS", "3")
    monkeypatch.setenv("KVIST_OPERATOR_IMAGES__REDIS", "redis:9")
    assert run(["--workers", "5", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["workers"], printed["images"]["redis"]) == (5, "redis:9")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--workers", "0"], "workers: '0' is not valid"),
        (["--lease.renew-seconds", "9"], "at most half of duration_seconds"),
        (["--namespace", "Not A Name"], "namespace: 'Not A Name' is not valid"),
        (["--images.pull-policy", "Maybe"], "images.pull_policy"),
    ],
)
def test_a_wrong_setting_is_refused_in_words(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(flags) == 2
    assert words in capsys.readouterr().err


def test_without_an_api_server_it_says_what_to_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["--log-level", "error"]) == 2
    assert "set KUBECONFIG" in capsys.readouterr().err


def test_images_and_lease_are_taken_from_the_settings() -> None:
    settings = OperatorSettings(namespace="kvist", images=ImageSettings(engine="e:1", router="r:1"))
    assert context(settings).images.agent == "e:1"
    assert (terms(settings, "me").namespace, terms(settings, "me").duration) == ("kvist", 15.0)
