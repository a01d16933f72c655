"""A package's source, as syntax trees: nothing is imported, so any version can be read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Found = ast.ClassDef | Function | ast.stmt | Path
"""A definition, an assignment, or a whole module."""
MAX_HOPS = 8
"""From a name to where it is defined, through modules that only hand it on."""


class Source:
    """The modules below a folder, by their dotted names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = cache(self._module)
        self.find = cache(self._find)

    def path(self, name: str) -> Path | None:
        """The file of a module."""
        base = self.root.joinpath(*name.split("."))
        choices = (base / "__init__.py", base.with_suffix(".py"))
        return next((path for path in choices if path.is_file()), None)

    def _module(self, name: str) -> ast.Module | None:
        path = self.path(name)
        return None if path is None else ast.parse(path.read_text(encoding="utf-8"))

    def _find(self, module: str, name: str, hops: int = MAX_HOPS) -> tuple[str, Found] | None:
        """Where `name` (`Class.method`, say) of a module is defined, and what it is.

        A method is looked for in base classes too.
        """
        tree = self.module(module)
        if tree is None or not hops:
            return None
        first, _, rest = name.partition(".")
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == first:
                return self._member(module, node, rest, hops) if rest else (module, node)
            if _binds(node, first):
                return (module, node)
            target = _imported_from(node, first, module, self.path(module))
            if target is not None:
                return self._find(target[0], ".".join(filter(None, (target[1], rest))), hops - 1)
        handed_on = _handed_on_late(tree, first, module)
        if handed_on is not None:
            return self._find(handed_on[0], ".".join(filter(None, (handed_on[1], rest))), hops - 1)
        path = self.path(f"{module}.{first}")
        return None if path is None else (f"{module}.{first}", path)

    def _member(
        self, module: str, owner: ast.ClassDef, name: str, hops: int
    ) -> tuple[str, Found] | None:
        for node in owner.body:
            if _binds(node, name):
                return (module, node)
        for node in ast.walk(owner):  # what a method sets of the instance
            if isinstance(node, ast.Assign | ast.AnnAssign) and _sets_of_self(node, name):
                return (module, node)
        for base in self.bases(module, owner):
            found = self._member(*base, name, hops - 1) if hops else None
            if found is not None:
                return found
        return None

    def bases(self, module: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Base classes that are defined in this source."""
        for base in owner.bases:
            name = ast.unparse(base).split("[")[0]
            found = self.find(module, name)
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield found[0], found[1]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                for inner in getattr(node, part, []):
                    yield from _statements(
                        inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    )


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    return False


def _sets_of_self(node: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [e for t in targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return any(
        isinstance(t, ast.Attribute)
        and t.attr == name
        and isinstance(t.value, ast.Name)
        and t.value.id == "self"
        for t in flat
    )


def _imported_from(
    node: ast.stmt, name: str, module: str, path: Path | None
) -> tuple[str, str] | None:
    """Module and name that an import takes `name` from; an empty name: it is the module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return alias.name, ""
    if not isinstance(node, ast.ImportFrom):
        return None
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            start = (node.module or "").split(".") if node.module else []
            if node.level:
                package = module.split(".")
                is_package = path is not None and path.name == "__init__.py"
                package = package[: len(package) - node.level + is_package]
                start = package + start
            return ".".join(start), alias.name
    return None


def _handed_on_late(tree: ast.Module, name: str, module: str) -> tuple[str, str] | None:
    """As packages write it that import lazily: `{"NAME": ".module:NAME"}`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name:
                text = value.value if isinstance(value, ast.Constant) else None
                if isinstance(text, str) and (m := re.fullmatch(r"\.?([\w.]+):(\w+)", text)):
                    prefix = f"{module}." if text.startswith(".") else ""
                    return prefix + m[1], m[2]
    return None


def code_of(found: Found) -> str:
    """A definition's code, without docstrings and comments, in one form."""
    if isinstance(found, Path):
        return ""
    copy = ast.parse(ast.unparse(found))  # unparse drops comments
    for node in ast.walk(copy):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(copy)


def signature_of(found: Found) -> str | None:
    """A function's parameters, without annotations; `None`: it is no function."""
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    copy = ast.parse(ast.unparse(found)).body[0]
    assert isinstance(copy, ast.FunctionDef | ast.AsyncFunctionDef)
    for node in ast.walk(copy.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    kind = "async " if isinstance(copy, ast.AsyncFunctionDef) else ""
    decorators = [f"@{ast.unparse(d)} " for d in copy.decorator_list]
    return f"{''.join(decorators)}{kind}({ast.unparse(copy.args)})"
