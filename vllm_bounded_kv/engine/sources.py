"""Pinned sources, in the engine core: prefixes whose full blocks stay in the pool.

A source is a name for tokens within a tenant (a cache salt). What is pinned are blocks, by their
hash, which covers every token before them and the salt: the same tokens are pinned once however
many names they have, and two tenants never share one. The blocks are vLLM's own prefix cache, held
by one reference more; requests hit them as they hit any cached block.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

KV_GROUP = 0
"""The bounded layers are vLLM's only group of cache layers."""


class SourceError(ValueError):
    """A source that cannot be pinned or found. `status` is the HTTP status that says so."""

    def __init__(self, status: int, field: str | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


@dataclass
class _Pin:
    """One block that sources hold."""

    num_sources: int = 0
    block: KVCacheBlock | None = None
    """`None` until a request has computed it."""


@dataclass
class Source:
    """One name, within one tenant."""

    name: str
    salt: str | None
    token_ids: list[int]
    hashes: tuple[BlockHash, ...]
    """Of its blocks that are pinned: the full ones inside the sink of who declares it."""
    expires: float | None
    """By `time.monotonic`; `None`: never."""
    first_claim: str = ""
    """Of who made it; `claim`: of who declared it last, and may abandon it."""
    claim: str = ""

    @property
    def id(self) -> str:
        """What it is, whatever it is called."""
        content = repr((self.salt, self.token_ids)).encode()
        return "src_" + hashlib.sha256(content).hexdigest()[:24]


class PinnedSources:
    """Names, and the blocks that they hold."""

    def __init__(self, pool: BlockPool, max_blocks: int, block_size: int, block_bytes: int) -> None:
        self.pool = pool
        self.max_blocks = max_blocks
        self.block_size = block_size
        self.block_bytes = block_bytes
        self._sources: dict[tuple[str | None, str], Source] = {}
        self._pins: dict[BlockHash, _Pin] = {}
        self._missing: dict[BlockHash, None] = {}  # in order, of those not computed yet
        self._next_expiry: float | None = None

    @property
    def num_sources(self) -> int:
        """Names, of all tenants."""
        return len(self._sources)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are pinned, or promised to be once computed."""
        return len(self._pins)

    def blocks(self) -> Iterator[KVCacheBlock]:
        """The blocks that are held, each once."""
        return (pin.block for pin in self._pins.values() if pin.block is not None)

    def add(
        self,
        name: str,
        salt: str | None,
        token_ids: list[int],
        hashes: Sequence[BlockHash],
        ttl_s: float | None,
        claim: str = "",
    ) -> bool:
        """Name a source and pin what is cached of it; a name given again is renewed.

        Args:
            claim: marks this call, for `abandon`.

        Returns:
            Whether the name is new.

        Raises:
            SourceError: when the name means other tokens, or the quota is too small.
        """
        self.expire()
        known = self._sources.get((salt, name))
        if known is not None and known.token_ids != token_ids:
            raise SourceError(
                409,
                "name",
                f"name={name!r}: names another source of {len(known.token_ids)} tokens; delete "
                "that first, or choose another name",
            )
        num_new = len(set(hashes) - self._pins.keys())
        if self.num_blocks + num_new > self.max_blocks:
            raise SourceError(
                409,
                "name",
                f"name={name!r}: needs {num_new} blocks of {self.block_size} tokens more, but "
                f"{self.num_blocks} of {self.max_blocks} are pinned; delete a source, or raise "
                "--bounded-kv-max-pinned-blocks (by default, what max_slots leaves of the pool)",
            )
        expires = None if ttl_s is None else time.monotonic() + ttl_s
        if known is None:
            self._sources[salt, name] = Source(
                name, salt, token_ids, tuple(hashes), expires, first_claim=claim
            )
            for block_hash in hashes:
                pin = self._pins.get(block_hash)
                if pin is None:
                    pin = self._pins[block_hash] = _Pin()
                    self._missing[block_hash] = None
                pin.num_sources += 1
            self.settle()
        else:
            known.expires = expires
        self._sources[salt, name].claim = claim
        self._plan_expiry()
        return known is None

    def abandon(self, name: str, salt: str | None, claim: str, even_computed: bool = False) -> None:
        """Forget a source that could not be computed, unless somebody has declared it since.

        Args:
            claim: of the call that declared it.
            even_computed: forget what that call has made in any case: not all replicas have it.
        """
        source = self._sources.get((salt, name))
        if source is None or source.claim != claim:
            return
        if not self.is_computed(source) or (even_computed and source.first_claim == claim):
            self.remove(source)

    def is_computed(self, source: Source) -> bool:
        """Whether all of its blocks are held."""
        return all(self._pins[h].block is not None for h in source.hashes)

    def find(self, name: str, salt: str | None, field: str = "name") -> Source:
        """The source of that name.

        Args:
            field: how the client wrote the name.

        Raises:
            SourceError: when the tenant has none.
        """
        self.expire()
        try:
            return self._sources[salt, name]
        except KeyError:
            raise SourceError(
                404,
                field,
                f"{field}={name!r}: no such source here; POST it to /v1/bounded_kv/sources "
                "first (a cache_salt has its own: a field of requests, elsewhere the header "
                "X-Cache-Salt)",
            ) from None

    def of_tenant(self, salt: str | None) -> list[Source]:
        """The tenant's sources, oldest first."""
        self.expire()
        return [source for source in self._sources.values() if source.salt == salt]

    def remove(self, source: Source) -> None:
        """Forget a name; running requests keep the blocks they use."""
        self._forget(source)
        self._plan_expiry()

    def expire(self) -> None:
        """Forget the sources whose time is over."""
        now = time.monotonic()
        if self._next_expiry is None or now < self._next_expiry:
            return
        for source in [s for s in self._sources.values() if s.expires is not None]:
            if source.expires is not None and source.expires <= now:
                self._forget(source)
        self._plan_expiry()

    def settle(self) -> None:
        """Hold every promised block that has been computed by now.

        Called before a request lets go of its blocks: there is no moment at which a block that
        it has just computed could be evicted.
        """
        for block_hash in list(self._missing):
            cached = self.pool.get_cached_block(block_hash, [KV_GROUP])
            if cached:
                self.pool.touch(cached)
                self._pins[block_hash].block = cached[0]
                del self._missing[block_hash]

    @contextmanager
    def set_aside(self, keep: bool) -> Iterator[None]:
        """While vLLM resets its prefix cache, which it does only when nothing is held.

        Args:
            keep: whether the blocks are as good afterwards as before. If not (a reset that even
                takes running streams' blocks: the weights are others), they are computed again by
                the next request that uses them.
        """
        held = [(block, block.block_hash, block.block_hash_num_tokens) for block in self.blocks()]
        self.pool.free_blocks(block for block, _, _ in reversed(held))
        try:
            yield
        except BaseException:
            keep = True
            raise
        finally:
            if keep:
                for block, block_hash, num_tokens in held:
                    self.pool.touch([block])
                    if block.block_hash is None:
                        assert block_hash is not None
                        self.pool._insert_block_hash(block_hash, block, num_tokens=num_tokens)
            else:
                for pin in self._pins.values():
                    pin.block = None
                self._missing = dict.fromkeys(self._pins)

    def view(self, source: Source) -> dict[str, Any]:
        """The source as plain values."""
        return {
            "id": source.id,
            "name": source.name,
            "tokens": len(source.token_ids),
            "blocks": len(source.hashes),
            "bytes": len(source.hashes) * self.block_bytes,
            "is_computed": self.is_computed(source),
            "expires_in_s": (
                None if source.expires is None else max(0.0, source.expires - time.monotonic())
            ),
        }

    def _forget(self, source: Source) -> None:
        del self._sources[source.salt, source.name]
        free = []
        for block_hash in reversed(source.hashes):  # the last is to be evicted first
            pin = self._pins[block_hash]
            pin.num_sources -= 1
            if pin.num_sources:
                continue
            del self._pins[block_hash]
            self._missing.pop(block_hash, None)
            if pin.block is not None:
                free.append(pin.block)
        self.pool.free_blocks(free)

    def _plan_expiry(self) -> None:
        times = [s.expires for s in self._sources.values() if s.expires is not None]
        self._next_expiry = min(times, default=None)


def handle(
    sources: PinnedSources,
    action: str,
    values: dict[str, Any],
    hash_blocks: Callable[[list[int], str | None, str], Sequence[BlockHash]],
) -> dict[str, Any]:
    """One call of an API server's: `add`, `find`, `list`, `remove` or `abandon`.

    Returns:
        Plain values; `{"error": {"status", "field", "message"}}` for what is refused.
    """
    salt = values.get("cache_salt")
    try:
        if action == "list":
            listed = [sources.view(source) for source in sources.of_tenant(salt)]
            return {
                "data": listed,
                "pinned_blocks": sources.num_blocks,
                "max_pinned_blocks": sources.max_blocks,
            }
        name = values["name"]
        if action == "add":
            token_ids = values["token_ids"]
            hashes = hash_blocks(token_ids, salt, values.get("field", "prompt_token_ids"))
            is_new = sources.add(
                name, salt, token_ids, hashes, values.get("ttl_s"), values.get("claim", "")
            )
            source = sources.find(name, salt)
            return {"source": sources.view(source), "is_new": is_new}
        if action == "abandon":
            sources.abandon(name, salt, values["claim"], values.get("even_computed", False))
            return {}
        if action == "remove":
            source = sources.find(name, salt)
            shown = sources.view(source)
            sources.remove(source)
            return {"source": shown}
        source = sources.find(name, salt, values.get("field", "name"))
        return {"source": sources.view(source), "token_ids": source.token_ids}
    except SourceError as error:
        return {
            "error": {"status": error.status, "field": error.field, "message": str(error)},
        }
