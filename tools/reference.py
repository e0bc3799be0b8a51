"""Write docs/reference.md from the code: `make reference`. tests/docs compares the two.

Names, ports and headers come from kvist_connector.names, settings from the settings classes,
metrics from the calls that create them, options from the `kvist` command itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from kvist_cli.app import app
from kvist_connector import names
from kvist_connector.agent.settings import AgentSettings
from kvist_connector.engines.vllm.config import ExtraConfig
from kvist_connector.settings import field_names
from kvist_operator.crd import crd, without_note
from kvist_operator.settings import OperatorSettings
from kvist_router.settings import RouterSettings

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
FOLDERS = ("connector", "router", "operator", "cli")
Row = tuple[str, ...]


def page() -> str:
    """The whole reference."""
    parts = [
        "# Reference",
        "Written by `make reference` from the code; a test compares the two.",
        "## Ports",
        "Defaults. `kvist up` adds the replica's ordinal to those of engines and agents.",
        table(("port", "what"), constants("PORT_")),
        "## Headers",
        "Of responses through the router. Inbound headers that start with `x-kvist-` are dropped.",
        table(("header", "constant"), constants("HEADER_")),
        "## HTTP paths",
        "Bodies: controls in [controls.md](controls.md), other paths of agents in "
        "[architecture.md](architecture.md), of routers in [router.md](router.md).",
        table(("path", "constant"), constants("PATH_")),
        "## Label names of metrics",
        table(("label", "constant"), constants("LABEL_")),
        "## Metrics",
        table(("metric", "kind", "labels", "what"), metrics()),
        settings("Agent", "`python -m kvist_connector`", AgentSettings, names.ENV_AGENT),
        settings("Router", "`python -m kvist_router`, `kvist router`", RouterSettings, names.ENV_ROUTER),
        settings("Operator", "`python -m kvist_operator`", OperatorSettings, names.ENV_OPERATOR),
        settings("Connector", "`kv_connector_extra_config` of `--kv-transfer-config`", ExtraConfig, None),
        "## CacheCluster",
        "Fields of `spec` in a manifest; [crds/cachecluster.yaml](../crds/cachecluster.yaml) is the schema.",
        table(("field", "what"), manifest_rows()),
        "## The `kvist` command",
        "Options are environment variables too: `KVIST_UP_PORT_ROUTER` is `--port-router` of `kvist up`.",
        *commands(),
    ]
    return "\n\n".join(parts) + "\n"


def table(columns: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def constants(prefix: str) -> list[Row]:
    """Values of names.py whose names start with `prefix`."""
    found = [(key, value) for key, value in vars(names).items() if key.startswith(prefix)]
    return [(f"`{value}`", key.removeprefix(prefix).lower().replace("_", " ")) for key, value in found]


def settings(title: str, program: str, cls: type[BaseModel], prefix: str | None) -> str:
    """One program's settings, with default and description."""
    ways = (
        f" Flags: `--` + name, `_` as `-`. Environment: `{prefix}` + name in upper case, `.` as `__`. File: "
        "`--config FILE`, YAML with these names. A flag wins over its variable, a variable over the file; "
        "`--print-config` prints what holds."
        if prefix
        else ""
    )
    rows = [(f"`{name}`", default_of(field), one_line(field.description)) for name, field in field_names(cls)]
    return f"## {title} settings\n\n{program}.{ways}\n\n" + table(("name", "default", "what"), rows)


def default_of(field: Any) -> str:
    """A field's default as text."""
    if field.is_required():
        return "required"
    value = field.default if field.default is not PydanticUndefined else field.default_factory()
    return "none" if value is None or value in ("", ()) else f"`{value}`"


def manifest_rows() -> Iterator[Row]:
    """Every field below spec, in the order of the schema."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    yield from schema_rows(schema["properties"]["spec"], "")


def schema_rows(schema: dict[str, Any], prefix: str) -> Iterator[Row]:
    """Fields of one object and of those inside it."""
    for name, inner in schema.get("properties", {}).items():
        many = inner.get("type") == "array"
        yield f"`{prefix}{name}{'[]' if many else ''}`", without_note(one_line(inner.get("description")))
        item = inner.get("items", {}) if many else inner
        yield from schema_rows(item, f"{prefix}{name}{'[]' if many else ''}.")


def metrics() -> list[Row]:
    """Every metric that the packages create, by name."""
    found = {row[0]: row for path in sources() for row in metric_calls(ast.parse(path.read_text()))}
    return [found[name] for name in sorted(found)]


def sources() -> Iterator[Path]:
    """Modules of the packages."""
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def metric_calls(tree: ast.Module) -> Iterator[Row]:
    """Calls like Counter("kvist_...", "what it counts", [labels])."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            name, text = (getattr(argument, "value", None) for argument in node.args[:2])
            if isinstance(name, str) and name.startswith("kvist_") and isinstance(text, str):
                kind = kind_of(node)
                yield f"`{scraped(name, kind)}`", kind, ", ".join(labels_of(node, tree)), one_line(text)
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            yield from looped_metrics(node, node.iter)


def scraped(name: str, kind: str) -> str:
    """The name as Prometheus has it: client libraries end counters so by themselves."""
    return f"{name.removesuffix('_total')}_total" if kind == "counter" else name


def looped_metrics(loop: ast.For, rows: ast.Tuple) -> Iterator[Row]:
    """Metrics of a loop over (name, what, value) whose body puts a prefix before the name."""
    for node in ast.walk(loop):
        match node:
            case ast.Call(args=[ast.BinOp(left=ast.Constant(value=str(prefix))), *_]):
                for row in rows.elts:
                    name, text = (part.value for part in row.elts[:2])  # type: ignore[attr-defined]
                    yield f"`{prefix}{name}`", kind_of(node), "", one_line(text)


def kind_of(call: ast.Call) -> str:
    """counter, gauge or histogram, from the class that is called."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return next((kind for kind in ("counter", "gauge", "histogram") if kind in called.lower()), called)


def labels_of(call: ast.Call, tree: ast.Module) -> list[str]:
    """Label names of a metric's call, constants resolved."""
    given = list(call.args[2:3])
    given += [keyword.value for keyword in call.keywords if keyword.arg in ("labels", "labelnames")]
    known = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [label for value in given for label in label_names(value, known)]


def label_names(value: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """Names in an expression of labels."""
    match value:
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [label for part in parts for label in label_names(part, known)]
        case ast.Starred(value=inner):
            return label_names(inner, known)
        case ast.BinOp(left=left, right=right):
            return label_names(left, known) + label_names(right, known)
        case ast.Attribute(attr=attribute) if hasattr(names, attribute):
            return [str(getattr(names, attribute))]
        case ast.Constant(value=text) if isinstance(text, str):
            return [text]
        case ast.Name(id=name) if name in known:
            return label_names(known[name], known)
    return []


def commands() -> Iterator[str]:
    """Each command with its options."""
    group: Any = typer.main.get_command(app)
    yield from command_parts(group, "kvist")


def command_parts(command: Any, path: str) -> Iterator[str]:
    """A command, and those below it."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield f"### `{path}`"
        yield one_line(command.help)
        if path == "kvist router":
            yield (
                "Its options are the [router settings](#router-settings), and `--replica "
                "URL[,agent=URL][,name=NAME]` for each engine."
            )
        rows = [option_row(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            yield table(("option", "default", "what"), rows)
    for name, child in inner.items():
        yield from command_parts(child, f"{path} {name}")


def option_row(parameter: Any) -> Row:
    """One option or argument."""
    option = parameter.param_type_name == "option"
    flags = [*parameter.opts, *parameter.secondary_opts] if option else [f"{parameter.name.upper()}"]
    default = parameter.default
    shown = (
        "required" if parameter.required else "none" if default in (None, False, (), []) else f"`{default}`"
    )
    return ", ".join(f"`{flag}`" for flag in flags), shown, one_line(getattr(parameter, "help", ""))


def one_line(text: str | None) -> str:
    """Text without line breaks."""
    return " ".join((text or "").split())


def main(argv: Sequence[str] = ()) -> int:
    """Write the page."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
