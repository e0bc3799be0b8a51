"""How the API server merges: server-side apply and strategic merge patch, as far as used here. Pure.

Fields are paths; a list with a key is a map of its items by that key, every other list is one value.
"""

from __future__ import annotations

import copy
from typing import Any, Final

# List -> key of its items, for the lists that appear in what the operator applies.
LIST_KEYS: Final = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "ownerReferences": "uid",
    "engines": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}
Path = tuple[str, ...]


def apply(live: dict[str, Any], wished: dict[str, Any], dropped: set[Path]) -> dict[str, Any]:
    """`live` with `wished` over it and the fields in `dropped` taken away."""
    result = copy.deepcopy(live)
    keys = set(LIST_KEYS.values())  # an item's key goes last, and the item with it
    for path in sorted(dropped, key=lambda path: (path[-1] in keys, -len(path))):
        _remove(result, path)
    _merge(result, wished)
    return result


def leaves(value: Any, name: str = "", prefix: Path = ()) -> dict[Path, Any]:
    """Path -> value of all leaves of an object: what an apply of it owns."""
    if isinstance(value, dict) and value:
        parts = [leaves(inner, key, (*prefix, key)) for key, inner in value.items()]
    elif isinstance(value, list) and value and _keyed(name, value):
        parts = [leaves(item, "", (*prefix, f"[{item[LIST_KEYS[name]]}]")) for item in value]
    else:
        return {prefix: value}
    return {path: leaf for part in parts for path, leaf in part.items()}


def _keyed(name: str, value: list[Any]) -> bool:
    key = LIST_KEYS.get(name)
    return key is not None and all(isinstance(item, dict) and key in item for item in value)


def _merge(target: dict[str, Any], wished: dict[str, Any]) -> None:
    for name, value in wished.items():
        current = target.get(name)
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(current, dict):
            _merge(current, value)
        elif isinstance(value, list) and isinstance(current, list) and value and _keyed(name, value):
            _merge_items(current, value, LIST_KEYS[name])
        else:
            target[name] = copy.deepcopy(value)


def _merge_items(current: list[Any], wished: list[Any], key: str) -> None:
    known = {item[key]: item for item in current}
    for item in wished:
        if item[key] in known:
            _merge(known[item[key]], item)
        else:
            current.append(copy.deepcopy(item))


def _remove(target: Any, path: Path) -> None:
    head, rest = path[0], path[1:]
    if head.startswith("[") and isinstance(target, list):
        for item in [found for found in target if _is(found, head[1:-1])]:
            if len(rest) == 1 and rest[0] in LIST_KEYS.values():
                target.remove(item)
            elif rest:
                _remove(item, rest)
    elif isinstance(target, dict) and head in target:
        if rest:
            _remove(target[head], rest)
        if not rest or target[head] in ({}, []):
            del target[head]


def _is(item: Any, key: str) -> bool:
    return isinstance(item, dict) and key in (item.get(name) for name in set(LIST_KEYS.values()))
