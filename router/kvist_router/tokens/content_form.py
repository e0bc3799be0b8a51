"""Does a chat template take a message's content as a string or as a list of parts? Called by template.py.

vLLM finds that out from the parsed template ("string" or "openai" content format) and gives contents in the
form found; what counts is where a loop goes over the content of a message. Held to vLLM's own
answers by tests/router/rendering.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


class _UnclearError(Exception):
    """The template is written in a way that makes vLLM fall back to strings."""


def takes_parts(root: nodes.Template) -> bool:
    """Whether contents are lists of parts."""
    try:
        messages = set(_message_names(root))
        in_macros, parameters = _macro_loops(root, messages)
    except _UnclearError:
        return False
    for loop in root.find_all(nodes.For):
        if any(_reaches(loop.iter, name, "content") for name in messages):
            return True
        if isinstance(loop.iter, nodes.Name):
            name = loop.iter.name
            if name in parameters.get(id(loop), ()) or (name == "content" and id(loop) not in in_macros):
                return True
    return False


def _message_names(root: nodes.Template) -> Iterator[str]:
    """Names that loops over the messages, or over a part of them, give to one message."""
    lists, rest = ["messages"], ["messages"]
    while rest:
        known = rest.pop(0)
        for assign in root.find_all(nodes.Assign):
            if _reaches(assign.node, known):
                name = _name(assign.target)
                lists.append(name)
                if name != known:
                    rest.append(name)
        if len(lists) > 1000:  # two names that are assigned to each other
            raise _UnclearError
    for loop in root.find_all(nodes.For):
        if any(_reaches(loop.iter, name) for name in lists):
            yield _name(loop.target)


def _macro_loops(root: nodes.Template, messages: set[str]) -> tuple[set[int], dict[int, set[str]]]:
    """Loops inside macros, and for each the macro's parameters that some call gives a message's content."""
    inside: set[int] = set()
    parameters: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = {name for call in root.find_all(nodes.Call) for name in _content_of(call, macro, messages)}
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if names:
                parameters[id(loop)] = names
    return inside, parameters


def _content_of(call: nodes.Call, macro: nodes.Macro, messages: set[str]) -> Iterator[str]:
    if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
        return
    names = [argument.name for argument in macro.args]
    given = list(zip(names, call.args, strict=False))
    given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
    for name, value in given:
        if any(_reaches(value, message, "content") for message in messages):
            yield name


def _reaches(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether the node is the variable, or its member `key`; filters, tests and slices of it count."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reaches(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reaches(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reaches_name(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reaches_name(node.node, name)


def _reaches_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnclearError
    return target.name
