"""What an API server makes of several engine cores' answers; the cores do as they are told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_bounded_kv.engine import replicas, source_routes
from vllm_bounded_kv.engine.sources import SourceError
from vllm_bounded_kv.engine.stats import EngineFigures, StreamFigures

VIEW = {"id": "src_1", "name": "voice", "is_computed": True, "expires_in_s": None}
GONE = {"error": {"status": 404, "field": "name", "message": "no such source"}}
FULL = {"error": {"status": 409, "field": "name", "message": "quota"}}


def figures(seed: int) -> dict[str, Any]:
    stream = StreamFigures(f"r{seed}", 50, 40, 10, 3, 5, 96)
    return EngineFigures(
        slots_total=4,
        slots_used=1,
        slot_bytes=6000,
        slot_blocks=6,
        block_size=32,
        block_bytes=1000,
        pool_blocks=30,
        pool_blocks_free=20 + seed,
        source_blocks_held=seed,
        source_blocks_shared=0,
        sources=2,
        pinned_blocks=3,
        max_pinned_blocks=5,
        ring_wraps=7,
        ring_wraps_unread=1,
        streams=[stream],
    ).to_dict()


def test_one_engine_is_shown_as_it_is() -> None:
    assert replicas.all_figures({0: figures(1)}) == figures(1)


def test_several_add_up_but_for_sizes_and_names() -> None:
    shown = replicas.all_figures({0: figures(1), 1: figures(2), 2: figures(4)})
    assert shown.pop("replicas") == [
        {"engine": 0, **figures(1)},
        {"engine": 1, **figures(2)},
        {"engine": 2, **figures(4)},
    ]
    assert [stream["request_id"] for stream in shown.pop("streams")] == ["r1", "r2", "r4"]
    assert shown == {
        "slots_total": 12,
        "slots_used": 3,
        "slot_bytes": 6000,
        "slot_blocks": 6,
        "block_size": 32,
        "block_bytes": 1000,
        "pool_blocks": 90,
        "pool_blocks_free": 67,
        "source_blocks_held": 7,
        "source_blocks_shared": 0,
        "sources": 2,
        "pinned_blocks": 9,
        "max_pinned_blocks": 15,
        "ring_wraps": 21,
        "ring_wraps_unread": 3,
    }


def test_a_source_is_computed_when_it_is_on_all() -> None:
    half = {**VIEW, "is_computed": False}
    for views, is_computed in (([VIEW, VIEW], True), ([VIEW, half], False), ([half, VIEW], False)):
        answers = {i: {"source": view, "token_ids": [1]} for i, view in enumerate(views)}
        found = replicas.all_sources("find", answers)
        assert found == {"source": {**VIEW, "is_computed": is_computed}, "token_ids": [1]}


def test_a_source_that_only_one_has_can_be_seen_and_removed() -> None:
    for action in ("find", "remove"):
        for answers in ({0: GONE, 1: {"source": VIEW}}, {0: {"source": VIEW}, 1: GONE}):
            source = replicas.all_sources(action, answers)["source"]
            assert source == {**VIEW, "is_computed": False}
        assert replicas.all_sources(action, {0: GONE, 1: GONE}) == GONE


def test_the_list_has_every_source_once() -> None:
    other = {**VIEW, "name": "other"}
    shown = replicas.all_sources(
        "list",
        {
            0: {"data": [VIEW], "pinned_blocks": 2, "max_pinned_blocks": 9},
            1: {"data": [VIEW, other], "pinned_blocks": 4, "max_pinned_blocks": 8},
        },
    )
    assert shown == {
        "data": [VIEW, {**other, "is_computed": False}],
        "pinned_blocks": 4,
        "max_pinned_blocks": 8,
    }


def test_an_addition_is_refused_when_one_refuses() -> None:
    added = {"source": VIEW, "is_new": False}
    for answers in ({0: added, 1: FULL}, {0: FULL, 1: added}):
        assert replicas.all_sources("add", answers) == FULL
    answer = replicas.all_sources("add", {0: added, 1: {**added, "is_new": True}})
    assert answer == {"source": VIEW, "is_new": True}


class Cores:
    """Engine cores that answer from a script, and remember what they were asked."""

    def __init__(self, first_rank: int, *scripts: dict[str, Any]) -> None:
        self.engine_ranks_managed = list(range(first_rank, first_rank + len(scripts)))
        self.scripts = scripts
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.read_by: list[int | None] = []

    async def call_utility_all_async(self, _: str, action: str, values: Any) -> list[Any]:
        self.asked.append((action, values))
        return [script.get(action, {}) for script in self.scripts]

    @property
    def client(self) -> Any:
        async def generate(*_: Any, data_parallel_rank: int | None) -> Any:
            self.read_by.append(data_parallel_rank)
            yield None

        config = SimpleNamespace(get_vocab_size=lambda: 100)
        return SimpleNamespace(
            engine_core=self, generate=generate, model_config=config, errored=False
        )


def pin(cores: Cores) -> int:
    state = SimpleNamespace(bounded_kv_engine=cores.client)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
    source = source_routes.NewSource(name="voice", prompt_token_ids=[1, 2])
    return asyncio.run(source_routes._pin(source, request)).status_code


@pytest.mark.parametrize(("first_rank", "num", "read_by"), [(0, 1, [None]), (2, 3, [0, 1, 2])])
def test_a_source_is_read_on_all(first_rank: int, num: int, read_by: list[int | None]) -> None:
    """By the place among those that this server speaks to, as vLLM counts."""
    added = {"source": {**VIEW, "is_computed": False}, "is_new": True}
    cores = Cores(first_rank, *[{"add": added, "find": {"source": VIEW}}] * num)
    assert pin(cores) == 201
    assert cores.read_by == read_by
    assert [action for action, _ in cores.asked] == ["add", "find"]


def test_a_source_that_one_refuses_is_taken_back_from_the_others() -> None:
    cores = Cores(0, {"add": {"source": VIEW, "is_new": True}}, {"add": FULL})
    assert pin(cores) == 409
    (_, added), (action, abandoned) = cores.asked
    assert action == "abandon" and abandoned["even_computed"] is True
    assert abandoned["claim"] == added["claim"] and not cores.read_by


def test_a_single_engine_keeps_what_it_has_computed() -> None:
    added = {"source": {**VIEW, "is_computed": False}, "is_new": True}
    cores = Cores(0, {"add": added, "find": GONE})
    assert pin(cores) == 409
    assert cores.asked[-1][0] == "abandon" and cores.asked[-1][1]["even_computed"] is False


def test_calls_go_by_the_replicas_own_numbers() -> None:
    cores = Cores(4, {"find": {"source": VIEW}}, {"find": GONE})
    answers = asyncio.run(replicas.ask_all(cores.client, "bounded_kv_sources", "find", {}))
    assert answers == {4: {"source": VIEW}, 5: GONE}
    with pytest.raises(SourceError, match="no such source"):
        asyncio.run(source_routes.call(Cores(0, {"find": GONE}).client, "find"))


@pytest.mark.parametrize("dies", ["before", "meanwhile", "answering"])
def test_who_asks_an_engine_that_dies_is_told(dies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would leave it waiting, for ever."""
    monkeypatch.setattr(replicas, "LOOK_S", 0.01)
    cores = Cores(0, {})
    client = cores.client
    client.errored = dies == "before"

    async def answer(*_: Any) -> list[Any]:
        client.errored = True
        if dies == "answering":
            raise RuntimeError("the engine is dead")
        await asyncio.sleep(100)
        return [{}]

    client.engine_core = SimpleNamespace(call_utility_all_async=answer)
    with pytest.raises(SourceError, match="engine is gone") as refused:
        asyncio.run(source_routes.call(client, "list"))
    assert refused.value.status == 503 and refused.value.field is None


def test_every_series_carries_its_engine() -> None:
    from vllm_bounded_kv import metrics

    metrics.create([0, 1])
    before = metrics._metrics().ring_wraps.labels(1)._value.get()
    metrics.update(0, figures(1))
    metrics.update(1, figures(4))
    free = metrics._metrics().gauges["pool_blocks_free"]
    assert [free.labels(engine)._value.get() for engine in (0, 1)] == [21, 24]
    assert metrics._metrics().ring_wraps.labels(1)._value.get() == before + 1
