"""YAML as people write it into our files, read strictly: no key twice, every fault one error.

Called by `settings` and by the operator's spec. Plain data only: no tag of Python is known.
"""

from __future__ import annotations

from typing import Any

import yaml

MOST_VALUES = 200_000


class YamlTextError(ValueError):
    """The text is no YAML, or none that we take; the message says where."""


class _Loader(yaml.SafeLoader):
    """A key that is given twice would silently lose the first value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return node


def parse_documents(text: str) -> list[Any]:
    """The documents that are not empty; raises YamlTextError."""
    try:
        # _Loader adds a check to SafeLoader and constructs nothing of its own.
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.YAMLError as error:
        raise YamlTextError(str(error)) from error
    except RecursionError as error:
        raise YamlTextError("it is nested too deeply") from error
    except ValueError as error:  # a number or a date that Python cannot hold
        raise YamlTextError(str(error)) from error
    _check_size(documents)
    return documents


def _check_size(documents: list[Any]) -> None:
    """Few aliases of aliases make more values than memory holds, and one of its own parent never ends."""
    left, open_values = MOST_VALUES, list(documents)
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict | list):
            left -= len(value)
            if left < 0:
                raise YamlTextError(f"it has more than {MOST_VALUES} values, aliases followed; write less")
            open_values += value.values() if isinstance(value, dict) else value
