"""What this project relies on in vLLM is there, in the source; what is not is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.seams import check, ours
from support.seams.listed import PATCHED, SEAMS, Seam
from support.seams.source import Source
from unit.test_compat import PATCHED as TARGETS


@pytest.fixture(scope="module")
def installed() -> Source:
    return check.installed()


def test_the_installed_vllm_has_every_seam(installed: Source) -> None:
    verdicts = check.compare(installed, installed)
    assert [each for each in verdicts if each.verdict != check.SAME] == []
    assert {each.kind for each in verdicts} == {
        "imported",
        "overridden",
        "inherited",
        "patched",
        "called",
        "read",
    }


def test_every_patch_is_listed() -> None:
    patched = [seam for seam in SEAMS if seam.kind == PATCHED]
    listed = {seam.name for seam in patched} | {f"{s.module}.{s.name}" for s in patched}
    assert set(TARGETS) - listed == set()


BASE = '''
class Base:
    limit: int = 1

    def __init__(self):
        self.held, self.free = [], []

    def take(self, count: int, *, at: str = "end") -> int:
        """Some."""
        return count + self.limit  # here

    def never(self):
        pass


class Owner(Base):
    pass
'''


@pytest.mark.parametrize(
    ("change", "name", "verdict"),
    [
        (("", ""), "Owner.take", check.SAME),
        (('"""Some."""', "# nothing said"), "Owner.take", check.SAME),
        (("count: int", "count: float"), "Owner.take", check.CODE),
        (("return count", "return 1 * count"), "Owner.take", check.CODE),
        (('at: str = "end"', 'at: str = "start"'), "Owner.take", check.SIGNATURE),
        (("def take(self, ", "def take(self, more, "), "Owner.take", check.SIGNATURE),
        (("    def take", "    async def take"), "Owner.take", check.SIGNATURE),
        (("self.limit", "1"), "Owner.take", check.TEXT),
        (("def take", "def took"), "Owner.take", check.GONE),
        (("self.held, self.free", "self.held, self.rest"), "Owner.free", check.GONE),
        (("limit: int", "most: int"), "Owner.limit", check.GONE),
        (("class Base", "class Root"), "Owner.take", check.GONE),
    ],
)
def test_what_changes_is_noticed(
    tmp_path: Path, change: tuple[str, str], name: str, verdict: str
) -> None:
    sources = []
    for folder, text in (("old", BASE), ("new", BASE.replace(*change) if change[0] else BASE)):
        package = tmp_path / folder / "pkg"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text('LATE = {"Owner": ".hand:Owner"}\n')
        (package / "hand.py").write_text("from .base import Owner\n")
        (package / "base.py").write_text(text)
        sources.append(Source(tmp_path / folder))
    texts = ("self.limit",) if name == "Owner.take" else ()
    found = check._listed(Seam("read", "pkg", name, texts), *sources)
    assert found.verdict == verdict


def test_our_own_code_is_read() -> None:
    assert ("vllm.v1.core.sched.scheduler", "Scheduler") in ours.imports()
    names = {node.name: roots for _, node, roots in ours.subclasses()}
    assert ("vllm.v1.core.sched.scheduler", "Scheduler") in names["BoundedSchedulerMixin"]
