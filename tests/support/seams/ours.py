"""What our own code takes of vLLM, read from our code: so the list cannot go stale."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from support.seams.source import Function, Source

ROOT = Path(__file__).parents[3]
PACKAGES = (
    ROOT / "vllm_bounded_kv",
    ROOT / "bounded_kv_speech",
    ROOT / "server" / "bounded_kv_server",
)
VLLM = "vllm"


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Our modules, by name, but for those that train the voice."""
    found = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            if "recipe" not in path.parts:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                found.append((name.removesuffix(".__init__"), tree))
    return found


def imports() -> list[tuple[str, str]]:
    """Module and name of all that is imported from vLLM."""
    found = set()
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _is_vllms(node.module) and not node.level:
                found |= {(str(node.module), alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {(alias.name, "") for alias in node.names if _is_vllms(alias.name)}
    return sorted(found)


def _is_vllms(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == VLLM


def subclasses() -> list[tuple[str, ast.ClassDef, list[tuple[str, str]]]]:
    """Our classes that stand on vLLM's: where, which, and vLLM's by module and name.

    A mixin stands on what the classes that use it stand on.
    """
    classes = {}
    for name, tree in modules():
        taken = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and not node.level
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                classes[name, node.name] = (node, [taken.get(b, (name, b)) for b in bases])

    def roots(key: tuple[str, str]) -> set[tuple[str, str]]:
        if _is_vllms(key[0]):
            return {key}
        return set().union(*(roots(base) for base in classes.get(key, (None, []))[1]))

    of_mixins: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for key, (_, bases) in classes.items():
        for base in bases:
            of_mixins.setdefault(base, set()).update(roots(key))
    found = []
    for (name, _), (node, _) in classes.items():
        under = roots((name, node.name)) | of_mixins.get((name, node.name), set())
        if under:
            found.append((name, node, sorted(under)))
    return found


def methods(owner: ast.ClassDef) -> dict[str, Function]:
    """A class's own."""
    return {
        node.name: node
        for node in owner.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def inherited_names(owner: ast.ClassDef) -> set[str]:
    """Attributes of `self`, and of `super()`, that our class reads and does not define."""
    used, own = set(), set(methods(owner))
    for node in ast.walk(owner):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Assign):
            own |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        if not isinstance(node, ast.Attribute):
            continue
        of = ast.unparse(node.value)
        if of == "self" and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif of in ("self", "super()"):
            used.add((of, node.attr))
    return {name for of, name in used if of == "super()" or name not in own}


def abstract_names(source: Source, module: str, owner: ast.ClassDef) -> set[str]:
    """Methods that a class, or one that it stands on, leaves to others."""
    found = {
        name
        for name, method in methods(owner).items()
        if any("abstractmethod" in ast.unparse(d) for d in method.decorator_list)
    }
    for base in source.bases(module, owner):
        found |= abstract_names(source, *base) - set(methods(owner))
    return found
