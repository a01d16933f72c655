"""Asking every replica (`--data-parallel-size`): each is an engine core with a pool of its own.

What an API server says of them together is put together here, in plain values. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

SAME_ON_ALL = ("slot_bytes", "slot_blocks", "block_size", "block_bytes")
"""Figures that replicas do not add up: sizes."""

Answers = Mapping[int, dict[str, Any]]
"""One answer for each replica, by its number."""


LOOK_S = 0.5
"""vLLM forgets what was asked of an engine that has died: who waits has to look."""


class EngineGone(RuntimeError):
    """An engine core has died, or ends; the server ends with it."""

    def __init__(self) -> None:
        super().__init__("the engine is gone; the server must be started anew")


def numbers(engine_client: Any) -> list[int]:
    """The replicas that this API server speaks to, by vLLM's own numbers."""
    ranks: list[int] = engine_client.engine_core.engine_ranks_managed
    return ranks


async def ask_all(engine_client: Any, method: str, *args: Any) -> dict[int, dict[str, Any]]:
    """Call a utility method of every engine core; vLLM's `call_utility` returns only the first's
    answer.

    Raises:
        EngineGone: there is no engine to answer.
    """
    if engine_client.errored:
        raise EngineGone
    asked = asyncio.ensure_future(
        engine_client.engine_core.call_utility_all_async(method, *args),
    )
    try:
        while not (await asyncio.wait([asked], timeout=LOOK_S))[0]:
            if engine_client.errored:
                raise EngineGone
        try:
            answers = asked.result()
        except Exception as error:
            if engine_client.errored:
                raise EngineGone from error
            raise
    finally:
        asked.cancel()
    return dict(zip(numbers(engine_client), answers, strict=True))


def all_figures(answers: Answers) -> dict[str, Any]:
    """The figures of one engine as they are; of several, their sums and each one's own.

    Args:
        answers: an `EngineFigures` of each, as a mapping.
    """
    first, *others = answers.values()
    if not others:
        return dict(first)
    sums: dict[str, Any] = {
        name: value if name in SAME_ON_ALL else sum((a[name] for a in others), value)
        for name, value in first.items()
        if name != "streams"
    }
    # A source is pinned on every replica under the same name.
    sums["sources"] = max(answer["sources"] for answer in answers.values())
    sums["streams"] = [stream for answer in answers.values() for stream in answer["streams"]]
    sums["replicas"] = [{"engine": number, **answer} for number, answer in answers.items()]
    return sums


def all_sources(action: str, answers: Answers) -> dict[str, Any]:
    """What the replicas say about pinned sources, as if it were one: see `sources.handle`.

    A source is computed when it is on all of them. One that is somehow on a few is shown, and can
    be removed; a source is added only where all agree.

    Returns:
        The first refusal of an `add`; of the others one that all give.
    """
    errors = [answer for answer in answers.values() if "error" in answer]
    good = [answer for answer in answers.values() if "error" not in answer]
    if errors and (action == "add" or not good):
        return errors[0]
    if action == "list":
        views = [view for answer in good for view in answer["data"]]
        by_id = {(view["id"], view["name"]): [] for view in views}  # type: ignore[var-annotated]
        for view in views:
            by_id[view["id"], view["name"]].append(view)
        return {
            "data": [_one_view(same, len(answers)) for same in by_id.values()],
            "pinned_blocks": max(answer["pinned_blocks"] for answer in good),
            "max_pinned_blocks": min(answer["max_pinned_blocks"] for answer in good),
        }
    merged = dict(good[0])
    if "source" in merged:
        merged["source"] = _one_view([answer["source"] for answer in good], len(answers))
    if "is_new" in merged:
        merged["is_new"] = any(answer["is_new"] for answer in good)
    return merged


def _one_view(views: Sequence[dict[str, Any]], num_replicas: int) -> dict[str, Any]:
    is_computed = len(views) == num_replicas and all(view["is_computed"] for view in views)
    return {**views[0], "is_computed": is_computed}
