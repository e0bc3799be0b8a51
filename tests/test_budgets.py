"""Sizes stay readable: the style budgets, counted over the product packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("operator", "router", "connector", "cli")
FILE_P50, FILE_P90 = 150, 400
FUNCTION_P50, FUNCTION_P90 = 10, 40
BROAD_EXCEPT_PER_KLOC = 1.0

Sized = list[tuple[int, str]]


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {path: ast.parse(path.read_text(), str(path)) for path in paths}


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def at(sizes: Sequence[tuple[int, str]], share: float) -> int:
    return sorted(sizes)[int(share * (len(sizes) - 1))][0]


def functions(trees: dict[Path, ast.Module]) -> Iterator[tuple[int, str]]:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                end = node.end_lineno or node.lineno
                yield end - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def broad_handlers(trees: dict[Path, ast.Module]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type)
    ]


def is_broad(caught: ast.expr | None) -> bool:
    names = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(
        n is None or (isinstance(n, ast.Name) and n.id in {"Exception", "BaseException"}) for n in names
    )


def test_files_are_short(trees: dict[Path, ast.Module]) -> None:
    sizes = [(lines(path), str(path.relative_to(ROOT))) for path in trees]
    longest = sorted(sizes, reverse=True)[:10]
    assert at(sizes, 0.5) <= FILE_P50, longest
    assert at(sizes, 0.9) <= FILE_P90, longest


def test_functions_are_short(trees: dict[Path, ast.Module]) -> None:
    sizes = list(functions(trees))
    longest = sorted(sizes, reverse=True)[:15]
    assert at(sizes, 0.5) <= FUNCTION_P50, longest
    assert at(sizes, 0.9) <= FUNCTION_P90, longest


def test_broad_handlers_are_rare(trees: dict[Path, ast.Module]) -> None:
    found = broad_handlers(trees)
    kloc = sum(lines(path) for path in trees) / 1000
    assert len(found) <= BROAD_EXCEPT_PER_KLOC * kloc, found
