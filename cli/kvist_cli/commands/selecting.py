"""What the controls have in common: which chunks, of which agents, and how answers are shown."""

from __future__ import annotations

import functools
import inspect
import json as jsonlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from kvist_cli import target
from kvist_cli.asking import AskError, Credentials, ask, ask_all
from kvist_cli.commands import credentials
from kvist_cli.commands.credentials import parameters
from kvist_cli.commands.options import Agents, AsJson, ClusterName, RouterAdmin, RunDir
from kvist_cli.output import console, print_json
from kvist_cli.progress import Waiting
from kvist_connector.errors import ConfigError
from kvist_connector.quantity import counted, format_bytes
from kvist_connector.settings import nearest

# A shared tier is listed and emptied meanwhile, or a long prefix read from it.
CONTROL_DEADLINE: Final = 120.0
_PANEL: Final = "Which chunks"
Answer = dict[str, Any]


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_PANEL)


Tokens = Annotated[Path | None, _option(text="File with token ids; - for standard input.")]
Text = Annotated[Path | None, _option(text="File with a prompt's text; the router tokenizes it.")]
Messages = Annotated[
    Path | None, _option(text="JSON file with chat messages, or a chat request; the router renders it.")
]
Key = Annotated[list[str], _option(text="Chunk key in hex; repeatable.")]
Tag = Annotated[str | None, _option(text="Tag that requests carried.")]
Everything = Annotated[bool, _option("--all", text="All chunks.")]
Salt = Annotated[str, _option(text="Cache salt of the request.")]
Lora = Annotated[str, _option(text="LoRA adapter of the request.")]
LoraRevision = Annotated[str, _option(text="Revision of the LoRA adapter, as the engine's log says it.")]
Tenant = Annotated[
    str | None, _option(text="Tenant of the request, in place of its salt; the router knows it.")
]
Replicas = Annotated[
    list[str],
    typer.Option("--replica", metavar="NAME", help="At this replica alone; repeatable. Default: all."),
]

_SELECTORS: Final[tuple[tuple[str, Any, Any], ...]] = (
    ("name", ClusterName, None),
    ("tokens", Tokens, None),
    ("text", Text, None),
    ("messages", Messages, None),
    ("key", Key, []),
    ("tag", Tag, None),
    ("all", Everything, False),
    ("salt", Salt, ""),
    ("lora", Lora, ""),
    ("lora_revision", LoraRevision, ""),
    ("tenant", Tenant, None),
)
_TARGETS: Final[tuple[tuple[str, Any, Any], ...]] = (
    ("replica", Replicas, []),
    ("run_dir", RunDir, None),
    ("agent", Agents, []),
    ("router", RouterAdmin, None),
    *credentials.OPTIONS,
    ("json", AsJson, False),
)


@dataclass(frozen=True)
class Chosen:
    """The options of _SELECTORS and _TARGETS; those of who asks as one."""

    name: str | None
    tokens: Path | None
    text: Path | None
    messages: Path | None
    key: list[str]
    tag: str | None
    all: bool
    salt: str
    lora: str
    lora_revision: str
    tenant: str | None
    replica: list[str]
    run_dir: Path | None
    agent: list[str]
    router: str | None
    credentials: Credentials
    json: bool

    @property
    def by_router(self) -> bool:
        """Whether only a router can tell which chunks are meant."""
        return any(given is not None for given in (self.text, self.messages, self.tenant))

    def body(self, command: str, required: bool = True) -> Answer:
        """The selection as the HTTP API takes it; raises ConfigError."""
        ways = {
            "--tokens": self.tokens and {"tokens": read_tokens(self.tokens)},
            "--text": self.text and {"text": _read(self.text, "--text")},
            "--messages": self.messages and _messages(self.messages),
            "--key": self.key and {"keys": self.key},
            "--tag": self.tag is not None and {"tag": self.tag},
            "--all": self.all and {"all": True},
        }
        used = [way for way in ways.values() if way]
        if len(used) > 1 or (required and not used):
            raise ConfigError(f"{command}: give one of {', '.join(ways)}")
        more = {
            "salt": self.salt,
            "lora": self.lora,
            "lora_revision": self.lora_revision,
            "tenant": self.tenant,
        }
        return (used[0] if used else {}) | {field: value for field, value in more.items() if value}


def selecting(function: Callable[..., None], left_out: Collection[str] = ()) -> Callable[..., None]:
    """Give a command the options of selection and target; it gets them as its first argument."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    absent = {name: default for name, _, default in (*_SELECTORS, *_TARGETS) if name in left_out}
    front = parameters(option for option in _SELECTORS if option[0] not in absent)
    back = parameters(option for option in _TARGETS if option[0] not in absent)

    @functools.wraps(function)
    def command(**given: Any) -> None:
        rest = {parameter.name: given.pop(parameter.name) for parameter in own}
        who = credentials.taken(given)
        function(Chosen(**(given | absent), credentials=who), **rest)

    ordered = [*front, *(parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own), *back]
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    return command


@dataclass(frozen=True)
class Found:
    """Answers by replica, and the replicas that did not do it."""

    replicas: dict[str, Answer]
    incomplete: list[str]


def answers(chosen: Chosen, path: str, body: Answer, prefer_router: bool = False) -> Found:
    """What each replica says, through the router where it is needed; raises AskError."""
    who = chosen.credentials
    admin = None if chosen.agent else _admin(chosen, prefer_router)
    waiting = Waiting(Console(stderr=True), path.rpartition("/")[2])
    if admin is not None:
        body |= {"replicas": chosen.replica} if chosen.replica else {}
        with waiting:
            said = ask("POST", admin + path, body, CONTROL_DEADLINE, who)
        return Found(said["replicas"], said["incomplete"])
    if chosen.by_router:
        raise ConfigError(
            "--text, --messages and --tenant need a router, which has tokenizer and secret: give --router URL"
        )
    urls = _those(target.agent_urls(chosen.name, chosen.run_dir, chosen.agent, os.environ), chosen.replica)
    with waiting:
        found = ask_all(
            "POST", {name: url + path for name, url in urls.items()}, body, CONTROL_DEADLINE, who.for_agents()
        )
    for answer in found.values():
        refusal = refusal_of(answer)
        if refusal is not None:
            raise AskError(refusal)
    return Found(found, [name for name, answer in found.items() if answer.get("complete") is False])


def _those(urls: dict[str, str], names: list[str]) -> dict[str, str]:
    for name in names:
        if name not in urls:
            raise ConfigError(f"--replica {name}: no such replica{nearest(name, set(urls))}")
    return {name: url for name, url in urls.items() if not names or name in names}


def refusal_of(answer: Answer) -> str | None:
    """Why a replica did not do it; a router says the status beside it."""
    return str(answer["error"]) if "error" in answer else None


def show(chosen: Chosen, found: Found, line: Callable[[Answer], str]) -> None:
    """One line a replica, or JSON; exit code 1 when some did not do it."""
    if chosen.json:
        print_json(found.replicas | ({"incomplete": found.incomplete} if found.incomplete else {}))
    else:
        for replica, answer in found.replicas.items():
            console().print(f"{replica}: {refusal_of(answer) or line(answer)}", markup=False)
    if found.incomplete:
        if not chosen.json:
            console().print(f"incomplete: {', '.join(found.incomplete)}", markup=False)
        raise typer.Exit(1)


def read_tokens(path: Path) -> list[int]:
    """Token ids of a file; raises ConfigError for anything else."""
    try:
        text = _stdin() if str(path) == "-" else path.read_text()
        return [int(part) for part in text.replace(",", " ").strip("[] \n").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokens {path}: must hold token ids: {error}") from error


def changed(verb: str, answer: Answer) -> str:
    """What a replica did, or would do."""
    would = "would be " if answer.get("dry_run") else ""
    remarks = {
        "leased": "in use until their requests end" if verb == "retired" else "in use stay",
        "pinned": "pinned stay",
        "missing": "are not here: prefetch them" if verb == "pinned" else "could not be had",
        "refused": "found no room",
    }
    more = "".join(f", {answer[key]} {text}" for key, text in remarks.items() if answer.get(key))
    if would and answer.get("shared"):
        # The first replica to be asked removes them for all.
        more += f", {answer['shared']} of them in shared tiers, counted for each replica"
    if answer.get("unpublished"):
        more += f", not told yet: {', '.join(answer['unpublished'])}"
    size = format_bytes(answer["bytes"])
    if "bytes_after" in answer and not would:
        size = f"{size} to {format_bytes(answer['bytes_after'])}"
    what = f"{counted(answer['chunks'], 'chunk')}, {counted(answer['tokens'], 'token')}"
    return f"{what}, {size} {would}{verb}{more}"


def _admin(chosen: Chosen, prefer_router: bool) -> str | None:
    if chosen.router is not None:
        return chosen.router.rstrip("/")
    if not (chosen.by_router or prefer_router):
        return None
    return target.read(target.find(chosen.name, chosen.run_dir, os.environ)).admin_url or None


def _messages(path: Path) -> Answer:
    try:
        found = jsonlib.loads(_read(path, "--messages"))
    except ValueError as error:
        raise ConfigError(f"--messages {path}: is not JSON: {error}") from error
    if isinstance(found, dict) and isinstance(found.get("messages"), list):
        found = found["messages"]
    if not isinstance(found, list):
        raise ConfigError(f"--messages {path}: must hold a list of chat messages, or a request with one")
    return {"messages": found}


def _read(path: Path, option: str) -> str:
    try:
        return _stdin() if str(path) == "-" else path.read_text()
    except OSError as error:
        raise ConfigError(
            f"{option} {path}: cannot be read: {error.strerror}; give the path of a file, or - for stdin"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{option} {path}: cannot be read: {error}") from error


def _stdin() -> str:
    return typer.get_text_stream("stdin").read()
