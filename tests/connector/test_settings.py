"""Agent settings and the shared machinery: one name in file, environment and flag, strict in each."""

import argparse

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvist_connector import names, settings
from kvist_connector.agent.app import run
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.errors import ConfigError
from kvist_connector.quantity import format_quantity, parse_quantity

NEEDED = ["--replica", "r", "--socket", "s", "--arena", "a"]


def load(arguments, environment=None):
    parser = argparse.ArgumentParser()
    settings.add_flags(parser, AgentSettings)
    return settings.load(AgentSettings, parser.parse_args(arguments), environment or {}, names.ENV_AGENT)


def test_flag_over_environment_over_file(tmp_path):
    file = tmp_path / "agent.yaml"
    file.write_text("replica: r\nsocket: s\narena: a\nmemory: 1Gi\ndisk: {size: 1Gi}\nhttp: {port: 1}\n")
    found = load(
        ["--config", str(file), "--http.port", "3"],
        {"KVIST_AGENT_HTTP__PORT": "2", "KVIST_AGENT_DISK__SIZE": "2Gi", "OTHER": "x"},
    )
    assert (found.memory, found.disk.size, found.http.port) == (1 << 30, 2 << 30, 3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (NEEDED[2:], "replica: required"),
        ([*NEEDED, "--memory", "lots"], "memory: 'lots' is not valid"),
        ([*NEEDED, "--http.port", "70000"], "http.port: 70000 is not valid"),
        ([*NEEDED, "--http.host", "10.0.0.1"], "loopback"),
        ([*NEEDED, "--eviction", "random"], "eviction: 'random' is not valid"),
        ([*NEEDED, "--lookup-deadline", "0"], "lookup_deadline"),
        ([*NEEDED, "--config", "/does/not/exist"], "cannot be read"),
    ],
)
def test_wrong_settings_are_named(arguments, text):
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    assert text in str(caught.value)


def test_unknown_names_get_the_nearest_valid_one(tmp_path):
    file = tmp_path / "agent.yaml"
    file.write_text("replica: r\nsocket: s\narena: a\ndisk: {pth: /x}\n")
    with pytest.raises(ConfigError, match=r"disk\.pth: no such field; did you mean 'path'"):
        load(["--config", str(file)])
    with pytest.raises(ConfigError, match="KVIST_AGENT_MEMROY"):
        load(NEEDED, {"KVIST_AGENT_MEMROY": "1"})


def test_a_replica_named_by_a_number_is_a_name():
    assert load(["--replica", "0", *NEEDED[2:]]).replica == "0"


def test_printed_configuration_reads_back_equal(capsys, tmp_path):
    assert run([*NEEDED, "--memory", "3Gi", "--disk.path", "/d", "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert load(["--config", str(file)]) == load([*NEEDED, "--memory", "3Gi", "--disk.path", "/d"])
    assert yaml.safe_load(file.read_text())["memory"] == 3 << 30


def test_wrong_configuration_exits_with_2(capsys):
    assert run(["--replica", "r"]) == 2
    assert "socket: required" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(capsys, flag):
    with pytest.raises(SystemExit) as caught:
        run([flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out


@given(size=st.integers(0, 1 << 50))
def test_quantities_round_trip(size):
    assert parse_quantity(format_quantity(size)) == size
