"""The commands that change caches, of one cluster or by address: clear, pin, move and others."""

from __future__ import annotations

import functools
import re
from enum import StrEnum
from typing import Annotated, Final

import typer

from kvist_cli.commands.selecting import Chosen, Found, answers, changed, selecting, show
from kvist_connector.errors import ConfigError
from kvist_connector.names import (
    PATH_CLEAR,
    PATH_COMPRESS,
    PATH_DECOMPRESS,
    PATH_MOVE,
    PATH_PIN,
    PATH_PREFETCH,
    PATH_RETIRE,
    PATH_UNPIN,
)

_PIN: Final = """
Examples:

  kvist pin --messages system.json --for 8h

  kvist pin --tag handbook --for 7d --router http://127.0.0.1:8081

Pinned chunks are not evicted from memory or disk until then; they may take half of the memory tier.
"""
_UNPIN: Final = """
Examples:

  kvist unpin --tag handbook

  kvist unpin --all
"""
_CLEAR: Final = """
Examples:

  kvist clear --tier memory

  kvist clear demo --tier all

  kvist clear --tag handbook --dry-run

A chunk counts once for each tier that it goes from. Chunks that a running request uses stay and are counted,
and so do pinned ones. What hangs on a cleared chunk goes with it. Redis and object store are cleared for
every agent that shares them, and --tier all includes them.
"""
_PREFETCH: Final = """
Examples:

  kvist prefetch --text handbook.txt

  kvist prefetch --tokens prompt.txt --dry-run
"""
_MOVE: Final = """
Examples:

  kvist move --tag night-batch --to disk

  kvist move --messages system.json --to object --copy

  kvist move --tag night-batch --to replica-1 --router http://127.0.0.1:8081

Without --copy one copy is left of what memory and disk of a replica held; shared tiers keep theirs. To a
replica, what hangs on the chunks goes too; their agents need peer.host.
"""
_COMPRESS: Final = """
Examples:

  kvist compress --all --tier disk

  kvist compress --tag night-batch --dry-run

Losslessly, byte planes and zstd: KV of 16 bits takes about two thirds. What is written later is compressed
as the tier's `compression` says.
"""
_DECOMPRESS: Final = """
Examples:

  kvist decompress --all --tier disk

  kvist decompress --messages system.json --tier object
"""
_RETIRE: Final = """
Examples:

  kvist retire --tag handbook-v1

  kvist retire --lora support --dry-run

  kvist retire --revision 2024-06 --router http://127.0.0.1:8081

What was computed before is not served any more, by no tier and no engine, also after restarts; what is
computed from now on is. An engine's own blocks go before its next request: until then `kvist lookup` names
gpu for them. `incomplete` names replicas that do not know it yet, to which routers send nothing
until they do, or whose Redis or object store did not take the rule yet: `not told yet` names those.
"""
_TIERS: Final = ("memory", "disk", "redis", "object")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be changed.")]


class LowerName(StrEnum):
    """Where chunks can be compressed."""

    DISK = "disk"
    REDIS = "redis"
    OBJECT = "object"
    ALL = "all"


Where = Annotated[LowerName, typer.Option(help="Where.")]


class TierName(StrEnum):
    """What can be cleared."""

    MEMORY = "memory"
    DISK = "disk"
    REDIS = "redis"
    OBJECT = "object"
    ALL = "all"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("clear", epilog=_CLEAR)(selecting(clear))
    app.command("pin", epilog=_PIN)(selecting(pin))
    app.command("unpin", epilog=_UNPIN)(selecting(unpin))
    app.command("prefetch", epilog=_PREFETCH)(selecting(prefetch))
    app.command("move", epilog=_MOVE)(selecting(move))
    app.command("compress", epilog=_COMPRESS)(selecting(compress))
    app.command("decompress", epilog=_DECOMPRESS)(selecting(decompress))
    app.command("retire", epilog=_RETIRE)(selecting(retire, left_out=("all", "replica")))


def clear(
    chosen: Chosen,
    tier: Annotated[TierName, typer.Option(help="What to empty.")] = TierName.ALL,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned chunks, too.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove cached chunks: the selected ones, or all."""
    body = chosen.body("clear", required=False) | {"tier": tier.value, "pinned": pinned, "dry_run": dry_run}
    _show(chosen, answers(chosen, PATH_CLEAR, body), "removed")


def pin(
    chosen: Chosen,
    duration: Annotated[
        str,
        typer.Option(
            "--for", envvar="KVIST_PIN_FOR", help="How long: seconds, or a number with s, m, h or d."
        ),
    ] = "1h",
    dry_run: DryRun = False,
) -> None:
    """Keep chunks from eviction for a time."""
    body = chosen.body("pin") | {"seconds": seconds_of(duration), "dry_run": dry_run}
    _show(chosen, answers(chosen, PATH_PIN, body), "pinned")


def unpin(chosen: Chosen, dry_run: DryRun = False) -> None:
    """End pins before their time."""
    _show(chosen, answers(chosen, PATH_UNPIN, chosen.body("unpin") | {"dry_run": dry_run}), "unpinned")


def prefetch(chosen: Chosen, dry_run: DryRun = False) -> None:
    """Bring chunks from lower tiers into memory."""
    body = chosen.body("prefetch") | {"dry_run": dry_run}
    _show(chosen, answers(chosen, PATH_PREFETCH, body), "brought into memory")


def move(
    chosen: Chosen,
    to: Annotated[
        str, typer.Option(help="Who has them then: memory, disk, redis, object, or the name of a replica.")
    ],
    copy: Annotated[bool, typer.Option("--copy", help="Leave them where they are, too.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Put chunks into another tier, or into the memory of another replica."""
    body = chosen.body("move") | {"to": to, "copy": copy, "dry_run": dry_run}
    found = answers(chosen, PATH_MOVE, body, prefer_router=to not in _TIERS)
    _show(chosen, found, "copied" if copy else "moved")


def compress(chosen: Chosen, tier: Where = LowerName.ALL, dry_run: DryRun = False) -> None:
    """Store chunks compressed where they lie as they are."""
    _recode(chosen, "compress", PATH_COMPRESS, tier, dry_run)


def decompress(chosen: Chosen, tier: Where = LowerName.ALL, dry_run: DryRun = False) -> None:
    """Store chunks as they are where they lie compressed."""
    _recode(chosen, "decompress", PATH_DECOMPRESS, tier, dry_run)


def _recode(chosen: Chosen, command: str, path: str, tier: LowerName, dry_run: bool) -> None:
    body = chosen.body(command) | {"tier": tier.value, "dry_run": dry_run}
    _show(chosen, answers(chosen, path, body), f"{command}ed")


def retire(
    chosen: Chosen,
    revision: Annotated[
        str | None, typer.Option(help="Revision of the model, as kv_connector_extra_config gives it.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Take authority from cached state: by tag, token prefix, LoRA adapter or model revision."""
    body = chosen.body("retire", required=False)
    body |= {} if revision is None else {"revision": revision}
    if not body.keys() - {"salt", "lora_revision", "tenant"}:
        raise ConfigError(
            "retire: give one of --tag, --tokens, --text, --messages, --key, --lora, --revision"
        )
    body |= {"dry_run": dry_run}
    _show(chosen, answers(chosen, PATH_RETIRE, body, prefer_router=True), "retired")


def _show(chosen: Chosen, found: Found, verb: str) -> None:
    show(chosen, found, functools.partial(changed, verb))


def seconds_of(text: str) -> float:
    """Seconds of a duration such as 90, 30m or 8h; raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(f"--for {text}: must be a number of seconds, or a number with s, m, h or d")
    return float(found[1]) * _UNITS[found[2]]
