"""model.name: a folder, the demo's model, or a Hugging Face name; and what is said when it is none."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvist_cli import models
from kvist_cli.app import app
from kvist_cli.models.worker import run_worker
from kvist_connector.errors import ConfigError


def offline(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
    }


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert models.resolve(str(folder), None, os.environ) == folder


def test_a_hugging_face_name_is_found_in_the_cache_without_network(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    base = tmp_path / "hf" / "hub" / "models--owner--tiny"
    snapshot = model_folder(base / "snapshots" / commit)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(commit)
    assert models.resolve("owner/tiny", None, offline(tmp_path)) == snapshot
    assert models.resolve("owner/tiny", commit, offline(tmp_path)) == snapshot


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/nope/model", "there is no such folder; give an existing one"),
        (".", "the folder has no config.json, so it is not in Hugging Face form"),
        ("owner/missing", "not in the Hugging Face cache and the hub cannot be reached"),
        ("not a name!", "neither a folder nor a Hugging Face name"),
    ],
)
def test_what_is_not_there_is_named_with_a_remedy(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        models.resolve(name, None, offline(tmp_path))
    assert str(refused.value).startswith(f"spec.model.name: {name!r}: ")
    assert message in str(refused.value)


def test_without_the_demos_package_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="install the extra demo"):
        models.demo_model(offline(tmp_path))


def test_the_demos_model_is_not_converted_twice(smollm2: Path, tmp_path: Path) -> None:
    said: list[str] = []
    models.resolve(str(smollm2), None, offline(tmp_path), said.append)
    assert said == []
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config


@pytest.mark.engine
def test_two_at_once_convert_the_demos_model_once_and_leave_no_part(tmp_path: Path) -> None:
    said: list[str] = []
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(models.demo_model(offline(tmp_path), said.append)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len([text for text in said if "once" in text]) == 1
    assert found[0] == found[1]
    names = {path.name for path in found[0].iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert [path.name for path in found[0].parent.iterdir() if path.is_dir()] == [found[0].name]


def test_the_command_prints_the_folder_for_scripts(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    done = CliRunner().invoke(app, ["model", "path", str(folder), "--json"])
    assert json.loads(done.output) == {"path": str(folder)}


def test_what_the_command_does_meanwhile_is_not_in_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(
        name: str, revision: str | None, environment: Mapping[str, str], remark: Callable[[str], None]
    ) -> Path:
        remark("converting")
        return tmp_path

    monkeypatch.setattr(models, "resolve", slow)
    done = CliRunner().invoke(app, ["model", "path", "demo/x"])
    assert (done.stdout, done.stderr) == (f"{tmp_path}\n", "converting\n")


def test_a_worker_that_takes_long_is_told_of_until_it_has_ended(tmp_path: Path) -> None:
    door = tmp_path / "door"
    os.mkfifo(door)
    (tmp_path / "slow_worker.py").write_text(
        "import json, pathlib, sys; print(json.dumps({'path': pathlib.Path(sys.argv[1]).read_text()}))"
    )
    waits: list[float] = []

    def open_the_door(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            door.write_text("/folder")

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert run_worker("slow_worker", [str(door)], environment, 60, open_the_door, 0.01) == "/folder"
    assert len(waits) >= 2


def test_a_worker_that_does_not_end_is_ended_at_its_deadline(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "door")
    (tmp_path / "stuck_worker.py").write_text(f"open({str(tmp_path / 'door')!r})")
    with pytest.raises(ConfigError, match=r"stuck_worker did not end within 0 s"):
        run_worker("stuck_worker", [], {**os.environ, "PYTHONPATH": str(tmp_path)}, 0.1)


def test_an_adapter_is_a_folder_or_named_with_its_field(tmp_path: Path) -> None:
    adapter = tmp_path / "sql"
    adapter.mkdir()
    field = "spec.model.loraAdapters.0.path"
    with pytest.raises(ConfigError, match=rf"{field}: '{adapter}': the folder has no adapter_config\.json"):
        models.resolve_adapter(str(adapter), field, os.environ)
    (adapter / "adapter_config.json").write_text("{}")
    assert models.resolve_adapter(str(adapter), field, os.environ) == adapter


def test_a_cache_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"cache folder \(XDG_CACHE_HOME\).*give another one"):
        models.demo_model({"XDG_CACHE_HOME": str(file)})
