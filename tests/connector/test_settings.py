"""Agent settings and the shared machinery: one name in file, environment and flag, strict in each."""

import argparse

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import model_validator

from kvist_connector import names, settings
from kvist_connector.agent.app import run
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.errors import ConfigError
from kvist_connector.quantity import format_quantity, parse_quantity

LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [%b]\n" % (name, name, b", ".join([b"*%c" % (name - 1)] * 9)) for name in b"bcdefghi"
)
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
        ([*NEEDED, "--http.port", "70000"], "http.port: '70000' is not valid"),
        ([*NEEDED, "--http.host", "10.0.0.1"], "loopback"),
        ([*NEEDED, "--eviction", "random"], "eviction: 'random' is not valid"),
        ([*NEEDED, "--lookup-deadline", "0"], "lookup_deadline"),
        ([*NEEDED, "--config", "/does/not/exist"], "cannot be read"),
        ([*NEEDED, "--idle-exit", "inf"], "idle_exit: 'inf' is not valid"),
        ([*NEEDED, "--memory", "9" * 5000], "memory: '999"),
        ([*NEEDED, "--memory", "9" * 25], "a size is less than 8192Pi"),
        ([*NEEDED, "--disk.size", "0"], "disk.size: 0 is not valid"),
        ([*NEEDED, "--socket", ""], "socket"),
        ([*NEEDED, "--arena", "/"], "give the path of a file"),
        ([*NEEDED, "--kv-events", "nonsense"], "kv_events: 'nonsense' is not valid"),
        ([*NEEDED, "--kv-events", "tcp://*:x"], "kv_events"),
    ],
)
def test_wrong_settings_are_named(arguments, text):
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff\xfe: 1", "not UTF-8 text"),
        (b"a: [", "not YAML"),
        (b"[" * 5000, "nested too deeply"),
        (LAUGHS, "more than 200000 values"),
        (b"memory: &a [*a]", "more than 200000 values"),
        (b"memory: " + b"9" * 5000, "not YAML: Exceeds the limit"),
        (b"replica: 2020-99-99", "not YAML: month must be in 1..12"),
        (b"memory: 1Gi\nmemory: 2Gi", "key 'memory' is given twice"),
        (b"- a", "must hold a mapping"),
        (b"a: 1\n---\nb: 2", "holds 2 YAML documents"),
        (b"disk: 5", "disk: 5 is not valid: a mapping is expected"),
        (b'socket: "a\\0b"', "zero byte"),
        (b"x: &x [1]\nmemory: {" + b", ".join(b"%d: *x" % i for i in range(5000)) + b"}", "memory: {"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_few_words(tmp_path, content, text):
    file = tmp_path / "agent.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(["--config", str(file), *([] if b"socket" in content else NEEDED)])
    assert text in str(caught.value)
    assert max(len(line) for line in str(caught.value).splitlines()) < 400


def test_a_flag_under_what_is_no_section_is_refused(tmp_path):
    file = tmp_path / "agent.yaml"
    file.write_text("disk: 5\n")
    with pytest.raises(ConfigError, match=r"disk: 5 is not valid: a mapping is expected, for disk\.path"):
        load([*NEEDED, "--config", str(file), "--disk.path", "/x"])


@pytest.mark.parametrize("name", ["no", "010", "@x", "*x", "#1", "a: b", "[", "2020-01-01"])
def test_text_is_taken_as_it_is_written(name):
    assert load([*NEEDED, "--replica", name]).replica == name
    assert load(NEEDED[2:], {"KVIST_AGENT_REPLICA": name}).replica == name


def test_an_optional_setting_can_be_taken_back():
    assert load([*NEEDED, "--disk.path", ""], {"KVIST_AGENT_DISK__PATH": "/x"}).disk.path is None


def test_a_fault_of_the_whole_is_told_without_an_empty_name():
    class Pair(settings.Settings):
        low: int
        high: int

        @model_validator(mode="after")
        def _ordered(self):
            if self.low > self.high:
                raise ValueError("low is above high")
            return self

    with pytest.raises(ConfigError, match=r"^low is above high$"):
        settings.validate(Pair, {"low": 2, "high": 1})


def test_flags_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit):
        load([*NEEDED, "--mem", "1Gi"])
    assert "--mem" in capsys.readouterr().err


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


def test_an_unknown_flag_gets_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as caught:
        run(["--replica", "r", "--disk.pth=/d"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --disk.pth=/d; did you mean --disk.path?" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(capsys, flag):
    with pytest.raises(SystemExit) as caught:
        run([flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out


@given(size=st.integers(0, 1 << 50))
def test_quantities_round_trip(size):
    assert parse_quantity(format_quantity(size)) == size
