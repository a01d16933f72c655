"""Two versions of vLLM, seam by seam: what is as it was, and what somebody has to look at."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.seams import ours
from support.seams.listed import SEAMS, Seam
from support.seams.source import Source, code_of, signature_of

SAME, CODE, SIGNATURE, TEXT, GONE, NEW = (
    "same",
    "other code",
    "other signature",
    "text gone",
    "gone",
    "new to implement",
)
HOLDS = (SAME, CODE)
"""As far as a reader of source can say."""


@dataclass(frozen=True)
class Verdict:
    """What came of one seam."""

    kind: str
    seam: str
    verdict: str
    what: str = ""
    diff: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is where it was, taken as it was."""
        return self.verdict in HOLDS


def compare(base: Source, other: Source) -> list[Verdict]:
    """All seams of this project, in `other` as against `base`."""
    return [*_imports(other), *_overrides(base, other), *(_listed(s, base, other) for s in SEAMS)]


def installed() -> Source:
    """The vLLM that is installed, not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Source(Path(spec.submodule_search_locations[0]).parent)


def _imports(other: Source) -> Iterator[Verdict]:
    for module, name in ours.imports():
        is_there = other.find(module, name) if name else other.path(module)
        shown = f"{module}: {name}" if name else module
        yield Verdict("imported", shown, SAME if is_there else GONE)


def _overrides(base: Source, other: Source) -> Iterator[Verdict]:
    for module, owner, roots in ours.subclasses():
        for root_module, root in roots:
            where = f"{module.rpartition('.')[2]}.{owner.name} of {root}"
            before, now = base.find(root_module, root), other.find(root_module, root)
            if before is None or now is None:
                yield Verdict("subclassed", where, GONE)
                continue
            for name in sorted(ours.methods(owner)):
                seam = Seam("overridden", root_module, f"{root}.{name}")
                if base.find(seam.module, seam.name) is not None:
                    yield _listed(seam, base, other, f"{where}: {name}")
            for name in sorted(ours.inherited_names(owner) - set(ours.methods(owner))):
                seam = Seam("inherited", root_module, f"{root}.{name}")
                if base.find(seam.module, seam.name) is not None:
                    yield _listed(seam, base, other, f"{where}: {name}")
            abstract = ours.abstract_names(other, now[0], now[1])  # type: ignore[arg-type]
            old = ours.abstract_names(base, before[0], before[1])  # type: ignore[arg-type]
            for name in sorted(abstract - old - set(ours.methods(owner))):
                yield Verdict("overridden", f"{where}: {name}", NEW)


def _listed(seam: Seam, base: Source, other: Source, shown: str | None = None) -> Verdict:
    shown = shown or str(seam)
    before, now = base.find(seam.module, seam.name), other.find(seam.module, seam.name)
    if before is None:
        raise LookupError(f"{seam}: not in the vLLM that this is compared with")
    if now is None:
        return Verdict(seam.kind, shown, GONE)
    if before[1] is now[1] and not seam.texts:  # compared with itself
        return Verdict(seam.kind, shown, SAME)
    old, new = code_of(before[1]), code_of(now[1])
    missing = [text for text in seam.texts if text not in new]
    signatures = signature_of(before[1]), signature_of(now[1])
    diff = "\n".join(difflib.unified_diff(old.split("\n"), new.split("\n"), lineterm="", n=2))
    if missing:
        return Verdict(seam.kind, shown, TEXT, "; ".join(missing), diff)
    if signatures[0] != signatures[1]:
        return Verdict(seam.kind, shown, SIGNATURE, f"{signatures[0]} -> {signatures[1]}", diff)
    return Verdict(seam.kind, shown, SAME if old == new else CODE, "", diff)


def main() -> int:
    """Print what does not hold, and counts; returns 1 where something does not."""
    parser = argparse.ArgumentParser(
        prog="scripts/check-seams",
        description="Compare what this project relies on in vLLM with another version's source.",
    )
    parser.add_argument("folder", type=Path, help="an unpacked wheel: the folder that has vllm/")
    parser.add_argument("--all", action="store_true", help="show code that changed as well")
    parser.add_argument("--diff", action="store_true", help="with how it changed")
    args = parser.parse_args()
    if not (args.folder / "vllm" / "__init__.py").is_file():
        parser.error(f"{args.folder}: has no vllm/__init__.py; unpack a wheel of vLLM there")
    verdicts = compare(installed(), Source(args.folder))
    for each in verdicts:
        if not each.holds or ((args.all or args.diff) and each.verdict != SAME):
            print(f"{each.verdict:16} {each.kind:11} {each.seam}")
            if each.what:
                print(f"{'':28} {each.what}")
            if args.diff:
                print(each.diff)
    counts = Counter(each.verdict for each in verdicts)
    print(f"{len(verdicts)} seams: " + ", ".join(f"{n} {v}" for v, n in counts.most_common()))
    return 0 if all(each.holds for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
