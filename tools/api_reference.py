"""Write docs/api.md from the CRD: `python -m tools.api_reference`. tests/docs compares the two."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvist_operator.crd import crd, without_note
from kvist_operator.render.merge import MERGE_KEYS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
Row = tuple[str, ...]
_HEAD = """# CacheCluster `kvist.dev/v1alpha1`

Written by `python -m tools.api_reference`; [crds/cachecluster.yaml](../crds/cachecluster.yaml) is the schema.
Short name `cc`. Kubernetes 1.33 or newer.

One CacheCluster is one model on one pool of equal engines with one OpenAI-compatible endpoint,
`http://NAME-router.NAMESPACE.svc:8080`.
For several models make a CacheCluster each and put what chooses by model in front: a Gateway with HTTPRoutes
to the routers' Services, or any OpenAI-compatible gateway. Within v1alpha1 fields are only added.

`kubectl wait --for=condition=Ready cc/NAME` returns when a request through the router would succeed;
`kubectl scale cc/NAME --replicas=N` and autoscalers write `spec.engine.replicas`."""

_AMOUNTS = """\
A `quantity` is a number of bytes, or a number with a suffix: `k`, `M`, `G`, `T`, `P` are powers of 1000,
`Ki`, `Mi`, `Gi`, `Ti`, `Pi` powers of 1024: `4096`, `512Mi`, `1.5G`. There is no `B` in it: `1G`, not `1GB`.
A `duration` is a whole number of seconds, or a number with one of the units `ms`, `s`, `m`, `h`, `d`, without
a space: `120`, `30s`, `1.5h`, `7d`. Units are not added up: `90m`, not `1h30m`. A duration in quotes needs
its unit: `120` or `"120s"`, not `"120"`. For other texts the API server names the pattern that they miss."""

_OVERLAY = """\
`engine.podTemplate` and `router.podTemplate` are laid over the pod template that the operator renders, as a
strategic merge: mappings are merged, `null` takes a field away, lists of this table are merged by their key
and others replaced. An entry with `$patch: delete` is taken away, one with `$patch: replace` replaces. A
key that is given twice in a list is refused. What the API server does not accept is reported in the
condition Degraded, and what runs is left alone."""


def page() -> str:
    """The whole page."""
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = [_HEAD, "## Rules", "The API server refuses what breaks one of these."]
    parts.append(table(("where", "rule"), rules(schema, "")))
    parts += ["## Quantities and durations", _AMOUNTS]
    for name, section in schema["properties"]["spec"]["properties"].items():
        parts += [f"## spec.{name}", text_of(section)]
        parts.append(table(("field", "type", "what"), fields(section, "")))
    parts += ["## status", text_of(schema["properties"]["status"])]
    parts.append(table(("field", "type", "what"), fields(schema["properties"]["status"], "")))
    parts += ["## podTemplate", *pod_template()]
    return "\n\n".join(parts) + "\n"


def rules(node: dict[str, Any], path: str) -> Iterator[Row]:
    """Messages of all rules, from the root down."""
    for rule in node.get("x-kubernetes-validations", ()):
        yield f"`{path or 'metadata'}`", rule["message"]
    for name, inner in node.get("properties", {}).items():
        yield from rules(inner, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from rules(node["items"], f"{path}[]")


def fields(node: dict[str, Any], prefix: str) -> Iterator[Row]:
    """One row a field, those inside it after it."""
    required = node.get("required", ())
    for name, inner in node.get("properties", {}).items():
        many = inner.get("type") == "array"
        path = f"{prefix}{name}{'[]' if many else ''}"
        text = text_of(inner)
        yield f"`{path}`", kind(inner), f"Required. {text}" if name in required else text
        yield from fields(inner["items"] if many else inner, f"{path}.")


def kind(node: dict[str, Any]) -> str:
    """Type and bounds in a few words."""
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        return "duration" if "(ms|s|m|h|d)" in node.get("pattern", "") else "quantity"
    if node["type"] == "array":
        return f"list, at most {node['maxItems']}"
    if node["type"] in ("integer", "number"):
        return bounded(node)
    if node["type"] == "object" and "additionalProperties" in node:
        return "mapping"
    return str(node["type"])


def bounded(node: dict[str, Any]) -> str:
    """A number's type with its limits."""
    low, high = node.get("minimum"), node.get("maximum")
    limits = {(True, True): f", {low} to {high}", (True, False): f", at least {low}"}
    return str(node["type"]) + limits.get((low is not None, high is not None), "")


def pod_template() -> list[str]:
    """How overlays are merged."""
    return [
        _OVERLAY,
        table(("list", "merged by"), [(f"`{path}`", f"`{key}`") for path, key in MERGE_KEYS.items()]),
    ]


def table(columns: Row, rows: Any) -> str:
    """A Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def text_of(node: dict[str, Any]) -> str:
    """The description in one line, without what the page says once for all fields of a type."""
    return without_note(" ".join(node.get("description", "").split()))


def main(argv: Sequence[str] = ()) -> int:
    """Write the page."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
