"""Does a chat template only insert message contents, without looking at them? Called by template.py.

If so, the text of a conversation is that of any other with the same roles, with the contents
exchanged, and need not be rendered again (skeleton.py). The answer comes from the parsed template
and is False for everything that is not known to be harmless.
"""

from __future__ import annotations

from jinja2 import nodes

_MESSAGES = "messages"
_LOOP = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length", "depth"})
_CHANGING = frozenset({"strftime_now", "lipsum", "self", "caller", "varargs", "kwargs"})
_OPAQUE_NODES = (
    nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Import, nodes.FromImport, nodes.Include,
    nodes.Extends, nodes.Block, nodes.AssignBlock,
)  # fmt: skip


def inserts_content(root: nodes.Template) -> bool:
    """Whether every message's content is written as it is and nothing depends on it."""
    return _Check(root).plain(root, written=False)


class _Check:
    """`written`: the value of the node goes straight into the text."""

    def __init__(self, root: nodes.Template) -> None:
        loops = [loop for loop in root.find_all(nodes.For) if self._is_messages(loop.iter)]
        self._variables = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)}
        self._taken = {_MESSAGES, "loop", *self._variables, *_CHANGING}

    def plain(self, node: nodes.Node, written: bool) -> bool:
        """Whether the node is harmless."""
        if isinstance(node, _OPAQUE_NODES) or (isinstance(node, nodes.Filter) and node.name == "random"):
            return False
        if isinstance(node, nodes.Name):
            return node.name not in self._taken
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return self._access(node, written)
        if isinstance(node, nodes.For):
            return self._loop(node)
        if isinstance(node, nodes.Filter) and node.name in ("length", "count") and node.node is not None:
            return self._is_messages(node.node) or self.plain(node.node, written=False)
        if isinstance(node, nodes.CondExpr):
            ends = [node.expr1] if node.expr2 is None else [node.expr1, node.expr2]
            return self.plain(node.test, False) and all(self.plain(end, written) for end in ends)
        passes = isinstance(node, nodes.Output) or (written and isinstance(node, nodes.Add | nodes.Concat))
        return all(self.plain(child, passes) for child in node.iter_child_nodes())

    def _access(self, node: nodes.Getattr | nodes.Getitem, written: bool) -> bool:
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name == "loop":
            return node.attr in _LOOP
        if self._is_message(node.node):
            name = _name_of(node)
            return name == "role" or (name == "content" and written)
        return all(self.plain(child, written=False) for child in node.iter_child_nodes())

    def _loop(self, loop: nodes.For) -> bool:
        if not self._is_messages(loop.iter):
            return all(self.plain(child, written=False) for child in loop.iter_child_nodes())
        inner = [*loop.body, *loop.else_, *([] if loop.test is None else [loop.test])]
        if loop.recursive or not isinstance(loop.target, nodes.Name) or loop.target.name in _CHANGING:
            return False
        return all(self.plain(child, written=False) for child in inner)

    def _is_messages(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            parts = (node.arg.start, node.arg.stop, node.arg.step)
            return self._is_messages(node.node) and all(part is None or _number(part) for part in parts)
        return isinstance(node, nodes.Name) and node.name == _MESSAGES

    def _is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem):
            return self._is_messages(node.node) and _number(node.arg)
        return isinstance(node, nodes.Name) and node.name in self._variables


def _name_of(node: nodes.Getattr | nodes.Getitem) -> str:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else ""


def _number(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Neg):
        return _number(node.node)
    return isinstance(node, nodes.Const) and isinstance(node.value, int)
