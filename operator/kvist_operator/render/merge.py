"""A user's podTemplate laid over the rendered one: a strategic merge, as `kubectl patch` does it.

    mapping over mapping   merged field by field; null takes a field away
    list with merge key    entries with the same key are merged in place, new ones appended
    list without           replaced
    `$patch: delete`       in an entry: takes the entry with that key away; in a mapping: the mapping
    `$patch: replace`      in a mapping: replaces instead of merging (a volume of another kind, say)

Pure. MERGE_KEYS is the whole table; a key that is given twice in one list is refused by name, since
the API server would keep only one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from kvist_connector.errors import ConfigError
from kvist_connector.settings import brief

MERGE_KEYS: Final[Mapping[str, str]] = {
    "spec.containers": "name",
    "spec.containers.env": "name",
    "spec.containers.ports": "containerPort",
    "spec.containers.volumeDevices": "devicePath",
    "spec.containers.volumeMounts": "mountPath",
    "spec.containers.resources.claims": "name",
    "spec.initContainers": "name",
    "spec.initContainers.env": "name",
    "spec.initContainers.ports": "containerPort",
    "spec.initContainers.volumeDevices": "devicePath",
    "spec.initContainers.volumeMounts": "mountPath",
    "spec.initContainers.resources.claims": "name",
    "spec.hostAliases": "ip",
    "spec.imagePullSecrets": "name",
    "spec.readinessGates": "conditionType",
    "spec.resourceClaims": "name",
    "spec.schedulingGates": "name",
    "spec.topologySpreadConstraints": "topologyKey",
    "spec.volumes": "name",
}
_DIRECTIVE: Final = "$patch"
_DIRECTIVES: Final = ("delete", "replace")
_DELETE: Final = object()


def overlay(template: dict[str, Any], patch: Mapping[str, Any], field: str) -> dict[str, Any]:
    """`template` with `patch` laid over; raises ConfigError that begins with `field`."""
    merged = _merge_mapping(template, patch, "", field)
    if not isinstance(merged, dict):
        raise ConfigError(f"{field}: the whole pod template cannot be deleted; leave the field out instead")
    return merged


def _merge(base: Any, patch: Any, path: str, where: str) -> Any:
    _check_shape(base, patch, where)
    if isinstance(patch, Mapping):
        return _merge_mapping(base if isinstance(base, dict) else {}, patch, path, where)
    if isinstance(patch, list):
        return _merge_list(base if isinstance(base, list) else [], patch, path, where)
    return deepcopy(patch)


def _check_shape(base: Any, patch: Any, where: str) -> None:
    shape = "mapping" if isinstance(base, Mapping) else "list"
    wrong = isinstance(base, dict | list) and not isinstance(patch, type(base))
    if wrong and not (isinstance(patch, Mapping) and _DIRECTIVE in patch):
        raise ConfigError(f"{where}: {brief(patch)} is no {shape}; give one, or null to take the field away")


def _merge_mapping(base: dict[str, Any], patch: Mapping[str, Any], path: str, where: str) -> Any:
    directive = _directive(patch, where)
    if directive == "delete":
        return _DELETE
    result = {} if directive == "replace" else dict(base)
    for name, value in patch.items():
        if name == _DIRECTIVE:
            continue
        inner = f"{path}.{name}" if path else name
        merged = None if value is None else _merge(result.get(name), value, inner, f"{where}.{name}")
        if merged is None or merged is _DELETE:
            result.pop(name, None)
        else:
            result[name] = merged
    return result


def _merge_list(base: list[Any], patch: list[Any], path: str, where: str) -> list[Any]:
    key = MERGE_KEYS.get(path)
    if key is None:
        return [_merge(None, item, path, f"{where}[{i}]") for i, item in enumerate(patch)]
    merged: dict[Any, Any] = {item[key]: item for item in base}
    seen: set[Any] = set()
    for i, item in enumerate(patch):
        value = _key_of(item, key, f"{where}[{i}]")
        if value in seen:
            raise ConfigError(f"{where}: {key} {value!r} is given twice; keep one of the two entries")
        seen.add(value)
        entry = _merge(merged.get(value), item, path, f"{where}[{i}]")
        if entry is _DELETE:
            merged.pop(value, None)
        else:
            merged[value] = entry
    return list(merged.values())


def _key_of(item: Any, key: str, where: str) -> Any:
    value = item.get(key) if isinstance(item, Mapping) else None
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ConfigError(f"{where}: {brief(item)} has no {key}, by which entries are merged; add it")
    return value


def _directive(patch: Mapping[str, Any], where: str) -> str | None:
    value = patch.get(_DIRECTIVE)
    if value is not None and value not in _DIRECTIVES:
        raise ConfigError(f"{where}.{_DIRECTIVE}: {brief(value)} is not valid: use delete or replace")
    return value
