"""What a person sees: starts, the table of turns as it grows, the figures at the end.

Called by the demo. On a terminal the table is live; elsewhere each turn is one plain line and the
table comes once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvist_cli.demo.figures import TurnResult
from kvist_cli.demo.manifests import MODES, TITLES
from kvist_cli.demo.trace import Trace
from kvist_cli.local import Event, EventKind

GOOD_SHARE, SOME_SHARE = 0.75, 0.25
PLAIN_WIDTH = 132
TABLE_TITLE = "Tokens reused and time to first token, turn by turn (replica: tokens from tier)"
LEGEND = "replica: tokens reused, from g the engine's own KV, m memory, d disk"
SHORT_TITLES = {"round_robin": "vLLM", "routing": "routing", "kvist": "Kvist"}
QUIET = {EventKind.STARTING, EventKind.STOPPING, EventKind.STOPPED}

Results = Mapping[str, Mapping[str, TurnResult]]


class Screen:
    """Owns the console. Use as a context manager: leaving it ends the live table."""

    def __init__(self, trace: Trace, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console = Console(file=self.console.file, width=PLAIN_WIDTH, no_color=True, highlight=False)
        self._trace = trace
        self._results: dict[str, dict[str, TurnResult]] = {mode: {} for mode in MODES}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_table()

    def note(self, text: str) -> None:
        """One line above the table."""
        self.console.print(text, markup=False, soft_wrap=True)

    def kept(self, folder: Path) -> None:
        """Something failed, and there are logs of it."""
        self.end_table()
        self.note(f"logs of what failed: {folder}")

    def event(self, event: Event) -> None:
        """A program of the cluster started, came up, ended. Called from the supervisor's thread."""
        if event.kind not in QUIET:
            self.note(event_line(event))

    def turn(self, mode: str, result: TurnResult) -> None:
        """A turn was answered."""
        self._results[mode][result.turn] = result
        if self.console.is_terminal:
            self._refresh()
        else:
            self.note(turn_line(mode, result))

    def end_table(self) -> None:
        """Leave the table where it is; what follows comes below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show_turns(self) -> None:
        """The whole table, where it was not live."""
        if not self.console.is_terminal:
            self.console.print(turns_table(self._trace, self._results, self.console.width))

    def show_summary(self, document: Mapping[str, Any]) -> None:
        """The figures at the end."""
        self.console.print(summary_table(document))

    def _refresh(self) -> None:
        table = turns_table(self._trace, self._results, self.console.width)
        if self._live is None:
            self._live = Live(table, console=self.console, auto_refresh=False, vertical_overflow="visible")
            self._live.start()
        self._live.update(table, refresh=True)


def event_line(event: Event) -> str:
    """An event as one line; what a program said last only where it is given up."""
    took = f" ({event.seconds:.0f} s)" if event.kind is EventKind.READY else ""
    message = event.message if event.kind is EventKind.FAILED else event.message.partition("; last lines")[0]
    kind = "" if event.kind is EventKind.NOTE else f" {event.kind.value}{took}"
    return f"  {event.program}{kind}: {message}".rstrip(": ")


def turn_line(mode: str, turn: TurnResult) -> str:
    """A turn as plain text."""
    return (
        f"  {mode:<12} {turn.turn:<12} {turn.replica:<10} prompt {turn.prompt_tokens:>5,}"
        f"  reused {reused_text(turn):<24} TTFT {seconds_text(turn.ttft):<7} {predicted_text(turn)}"
    ).rstrip()


def predicted_text(turn: TurnResult) -> str:
    """What the router had expected, where that differs from what came."""
    same = turn.predicted_tokens is None or turn.predicted_tokens == turn.hit_tokens
    return "" if same else f"(predicted {turn.predicted_tokens:,})"


def turns_table(trace: Trace, results: Results, width: int = PLAIN_WIDTH) -> Table:
    """Turn by turn what each mode reused, from where, and how long the first token took."""
    narrow = width < PLAIN_WIDTH
    table = Table(title=TABLE_TITLE, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.caption = LEGEND if narrow else None
    table.add_column("turn", no_wrap=True)
    table.add_column("prompt", justify="right", no_wrap=True)
    for mode in MODES:
        table.add_column(SHORT_TITLES[mode] if narrow else TITLES[mode], no_wrap=True)
        table.add_column("TTFT", justify="right", no_wrap=True)
    for turn in trace.turns:
        found = {mode: results[mode].get(turn.name) for mode in MODES}
        prompt = next((f"{result.prompt_tokens:,}" for result in found.values() if result), "")
        cells = [cell for mode in MODES for cell in _cells(found[mode], narrow=narrow)]
        table.add_row(turn.name, prompt, *cells)
    return table


def _cells(turn: TurnResult | None, *, narrow: bool) -> tuple[Text, Text]:
    if turn is None:
        return Text(""), Text("")
    style = _style(turn.hit_tokens / max(1, turn.prompt_tokens))
    where = turn.replica.rsplit("-", 1)[-1]
    letters = "".join(tier[0] for tier, tokens in turn.hits.items() if tokens)
    reused = f"{where}: {turn.hit_tokens:,} {letters}" if narrow else f"{where}: {reused_text(turn)}"
    return Text(reused, style=style), Text(seconds_text(turn.ttft), style=style)


def _style(share: float) -> str:
    return "green" if share >= GOOD_SHARE else "yellow" if share >= SOME_SHARE else "red"


def reused_text(turn: TurnResult) -> str:
    """Reused tokens by tier, such as "1,824 gpu + 256 memory"."""
    parts = [f"{tokens:,} {tier}" for tier, tokens in turn.hits.items() if tokens]
    return " + ".join(parts) or "nothing"


def seconds_text(seconds: float) -> str:
    """A short time in the unit that suits it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def summary_table(document: Mapping[str, Any]) -> Table:
    """The same figures as the JSON file, one column a mode."""
    table = Table(title="Figures", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for mode in MODES:
        table.add_column(TITLES[mode], justify="right", no_wrap=True)
    for label, texts in summary_rows([document[mode] for mode in MODES]):
        table.add_row(label, *texts)
    return table


def summary_rows(modes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Label and one text a mode for every figure."""
    rows = [
        ("requests hit", [f"{m['hit_rate']['requests']:.0%}" for m in modes]),
        ("tokens reused", [f"{m['hit_rate']['tokens']:.0%}" for m in modes]),
        ("prefill seconds saved (estimated)", [_saved(m) for m in modes]),
    ]
    for kind in ("cold", "warm"):
        for point in ("p50", "p95"):
            rows.append((f"TTFT {kind} {point}", [_ms(m["ttft_ms"][kind][point]) for m in modes]))
    rows.append(("ITL p50", [_ms(m["itl_ms"]["p50"]) for m in modes]))
    rows.append(("throughput, prompt + answer", [f"{m['throughput_tok_s']:.0f} tok/s" for m in modes]))
    for way in ("stored", "loaded"):
        rows += [
            (f"{way}, {tier}", [_mib(m["bytes"][way][tier]) for m in modes]) for tier in ("memory", "disk")
        ]
    rows.append(("replay", [f"{m['seconds']:.0f} s" for m in modes]))
    return rows


def _saved(mode: Mapping[str, Any]) -> str:
    return f"{mode['hit_rate']['seconds']:.0%} ({mode['saved_seconds']:.1f} s)"


def _ms(value: float | None) -> str:
    return "-" if value is None else seconds_text(value / 1000)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
