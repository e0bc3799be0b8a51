"""The command as a whole: help with examples, version, completion, exit codes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvist_cli.app import app
from kvist_cli.commands.detach import flags
from kvist_cli.commands.hits import hits
from kvist_cli.local import Event, EventKind, Options, Ports
from kvist_cli.progress import Progress

COMMANDS = (
    *("up", "down", "status", "stats", "lookup", "clear", "pin", "unpin", "prefetch", "move", "retire"),
    *("compress", "decompress"),
    *("demo", "model path", "model fetch-demo", "explain", "size", "bench eviction"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--help"])
    assert done.exit_code == 0
    assert "Examples:" in done.output
    assert f"kvist {command}" in done.output


def test_the_version_is_printed() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output.split()[0]) == (0, "kvist")


def test_the_routers_help_is_the_routers_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvist_cli", "router", "--help"], capture_output=True, text=True, check=True
    )
    assert "--replica" in done.stdout
    assert "--model.path" in done.stdout


def test_an_unknown_command_is_bad_input() -> None:
    assert CliRunner().invoke(app, ["upp"]).exit_code == 2


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from kvist_cli.__main__ import main
sys.argv = ["kvist", "--version"]
main()
"""


@pytest.mark.parametrize(
    ("program", "module"),
    [
        *(("kvist_cli", module) for module in ("kvist_cli.app", "typer", "pydantic")),
        ("kvist_router", "fastapi"),
        ("kvist_connector", "msgspec"),
        ("kvist_operator", "kopf"),
    ],
)
def test_an_interrupt_while_it_is_imported_ends_it_without_a_trace(program: str, module: str) -> None:
    code = INTERRUPTED_IMPORT.replace("sys.argv[1]", repr(module)).replace("kvist_cli", program)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(
    ("program", "package"),
    [("router", "fastapi"), ("connector", "xxhash"), ("operator", "kopf"), ("cli", "typer")],
)
def test_a_program_without_its_extra_says_which_one(program: str, package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; "
        f"from kvist_{program}.__main__ import main; sys.argv = ['x', '--version']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: the Python package {package} is not installed here")
    assert f"pip install '.[{program}]'" in done.stderr


def test_help_needs_neither_torch_nor_vllm_nor_kubernetes() -> None:
    heavy = "('torch', 'vllm', 'transformers', 'huggingface_hub', 'kopf', 'kubernetes')"
    code = f"import sys, kvist_cli.app; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


def test_an_agent_that_does_not_answer_is_named(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    done = CliRunner().invoke(app, ["stats", "--agent", url])
    assert done.exit_code == 1
    assert f"{url}/v1/kvist/stats does not answer" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lookup", "--agent", "http://x"], "lookup: give one of --tokens, --text, --messages, --key,"),
        (["retire", "--agent", "http://x", "--salt", "x"], "retire: give one of --tag, --tokens"),
        (["pin", "--agent", "http://x", "--all", "--tag", "x"], "pin: give one of --tokens"),
        (["pin", "--agent", "http://x", "--all", "--for", "soon"], "--for soon: must be a number of seconds"),
        (["pin", "--agent", "http://x", "--messages", "/nope"], "--messages /nope: cannot be read"),
        (["prefetch", "--agent", "http://x", "--text", __file__], "need a router, which has tokenizer"),
        (["prefetch", "--agent", "http://x", "--all", "--tenant", "y"], "need a router, which has tokenizer"),
        (
            ["clear", "--agent", "http://x:1", "--replica", "y:1"],
            "--replica y:1: no such replica; did you mean 'x:1'?",
        ),
        (["lookup", "--agent", "http://x", "--tokens", "/nope"], "--tokens /nope: must hold token ids"),
        (
            ["lookup", "--agent", "http://x", "--text", "what is a KV cache?"],
            "--text what is a KV cache?: cannot be read: No such file or directory; give the path of a file",
        ),
        (["up", "-f", "/nope.yaml"], "/nope.yaml: cannot be read"),
        (["up", "-f", "/nope.yaml", "--port-engine", "70000"], "ports.engine: 70000 is not valid"),
        (["up", "-f", "/nope.yaml", "--backoff", "inf"], "backoff: inf is not valid"),
        (["up", "-f", "/nope.yaml", "--stop-deadline", "1e300"], "stop_deadline: 1e+300 is not valid"),
        (["down", "--stop-deadline", "nan"], "stop_deadline: nan is not valid"),
        (["status", "--run-dir", "~nobody-of-that-name/x"], "--run-dir: '~nobody-of-that-name/x'"),
        (["model", "path", "~nobody-of-that-name/x"], "home of an unknown user"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("url", ["http://[::", "http://a b/\x01", "nope", ""])
def test_an_address_that_is_none_is_one_message(url: str) -> None:
    done = CliRunner().invoke(app, ["stats", "--agent", url])
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (1, True)
    shown = url.replace("\x01", "\\x01")  # what an address holds does not steer the terminal
    assert f"{shown}/v1/kvist/stats does not answer" in done.output


def test_a_variable_that_names_no_option_is_refused() -> None:
    done = CliRunner().invoke(app, ["status"], env={"KVIST_STATUS_JSN": "1"})
    assert done.exit_code == 2
    assert "KVIST_STATUS_JSN: no such option; did you mean 'JSON'?" in done.output


def test_kvist_version_in_the_environment_means_nothing() -> None:
    done = CliRunner().invoke(app, ["model", "--help"], env={"KVIST_VERSION": "1.2"})
    assert done.exit_code == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b'{"version": 1, "name": "x', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "a mapping is expected"),
        (b'{"version": 2}', "format 2 is not the supported 1: use the kvist that wrote it"),
    ],
)
@pytest.mark.parametrize("command", ["status", "down", "stats"])
def test_a_state_that_is_damaged_or_newer_is_named(
    command: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "state.json").write_bytes(content)
    done = CliRunner().invoke(app, [command, "--run-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert f"{tmp_path}/state.json: " in done.output
    assert message in done.output


def test_the_demo_finds_out_first_that_its_figures_cannot_be_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["demo", "--json", str(tmp_path)], env={"XDG_STATE_HOME": str(tmp_path)})
    assert done.exit_code == 2
    assert f"--json {tmp_path}: cannot be written" in done.output


def test_options_survive_the_way_to_the_detached_supervisor() -> None:
    given = flags(Options(ports=Ports(router=9000), restarts=3))
    assert given[given.index("--port-router") + 1] == "9000"
    assert given[given.index("--restarts") + 1] == "3"
    assert "--run-dir" not in given
    known = CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "300"}).output
    assert [flag for flag in given if flag.startswith("--") and flag not in known] == []


METRICS = """
# TYPE kvist_router_recorded_requests counter
kvist_router_recorded_requests_total 8.0
# TYPE kvist_router_hit_requests counter
kvist_router_hit_requests_total 6.0
# TYPE kvist_router_recorded_prompt_tokens counter
kvist_router_recorded_prompt_tokens_total 1000.0
# TYPE kvist_router_hit_tokens counter
kvist_router_hit_tokens_total{tier="memory"} 512.0
kvist_router_hit_tokens_total{tier="gpu"} 128.0
# TYPE kvist_router_saved_seconds counter
kvist_router_saved_seconds_total 2.5
"""


def test_hits_are_three_figures() -> None:
    found = hits(METRICS)
    assert (found["requests"], found["tokens"], found["seconds_saved"]) == (0.75, 0.64, 2.5)
    assert found["tokens_by_tier"] == {"memory": 512, "gpu": 128}
    assert hits("")["requests"] is None


def test_progress_is_a_line_an_event_where_there_is_no_terminal() -> None:
    console = Console(width=100, force_terminal=False)
    with console.capture() as shown, Progress(console) as progress:
        progress.on_event(Event(EventKind.NOTE, "", "a remark"))
        progress.on_event(Event(EventKind.READY, "engine-0", "", 1.25))
    assert shown.get() == "a remark\nengine-0 ready (1.2 s)\n"


def test_progress_on_a_terminal_keeps_the_last_state_of_every_program() -> None:
    console = Console(width=100, force_terminal=True, color_system=None)
    with console.capture() as shown, Progress(console) as progress:
        progress.on_event(Event(EventKind.STARTING, "engine-0", "pid 1"))
        progress.on_event(Event(EventKind.READY, "engine-0", "", 1.25))
    last = [line for line in shown.get().splitlines() if "engine-0" in line][-1]
    assert "ready" in last
    assert "1.2 s" in last
