"""What a Llama says under any attention mask: an independent oracle in plain float64 PyTorch.

Contract: no cache, no paging, no kernels. One forward over the whole sequence, with the mask that
the retention defines written out as `[n, n]` booleans. Engines are compared with it, so it shares
no code with what it judges; it is itself compared with transformers.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

NEAR_TIE = 1e-3
"""Tokens whose log-probabilities lie this close are both right: the project's exactness rule."""

QUERY_CHUNK = 512
"""Queries per block of scores: bounds memory, changes nothing else."""

MaskFn = Callable[[int], Tensor]
"""Sequence length `n` -> boolean mask `[n, n]`, true where the row's query sees the key."""


def full_mask(n: int) -> Tensor:
    """Causal attention to everything: `[n, n]` booleans."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def bounded_mask(n: int, sink: int, window: int, window_includes_step: bool = True) -> Tensor:
    """Sink and sliding window: `[n, n]` booleans.

    Query `p` sees `[0, sink)` and `(p - R, p]`, nothing after `p`; `R` is `window`, or one more
    when the window is counted without the query's own token.
    """
    reach = window if window_includes_step else window + 1
    if sink < 0 or reach < 1:
        raise ValueError(f"no query would see itself: sink={sink}, window={window}")
    query = torch.arange(n)[:, None]
    key = torch.arange(n)[None, :]
    return (key <= query) & ((key < sink) | (key > query - reach))


@dataclass(frozen=True)
class Rebase:
    """Rotary positions that never reach `limit`: stream position `p` turns as `v(p)`.

    `v(p) = p` below `limit`, else `base + (p - base) mod (limit - base)`. Keys from `sink` on keep
    their true distance to every query; the first `sink` keys stay at their own positions, so a
    query's distance to them is counted from `v(p)`.
    """

    sink: int
    base: int
    limit: int

    def query_positions(self, n: int) -> Tensor:
        """`v(p)` for `p` in `[0, n)`: `[n]` int64."""
        p = torch.arange(n)
        wrapped = self.base + (p - self.base) % (self.limit - self.base)
        return torch.where(p < self.limit, p, wrapped)


@dataclass(frozen=True)
class OracleConfig:
    """The part of `config.json` that decides a plain Llama's arithmetic."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    frequencies: tuple[float, ...] | None = None
    """Radians a position of each pair, where they are not `rope_theta`'s own."""
    magnitude: float = 1.0
    """Of rotated queries and keys: YaRN's attention factor."""

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "OracleConfig":
        """Read a Hugging Face Llama config; `ValueError` for what this oracle does not compute."""
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        for name, value, known in (
            ("model_type", config.get("model_type"), "llama"),
            ("hidden_act", config.get("hidden_act", "silu"), "silu"),
            ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0),
            ("attention_bias", bool(config.get("attention_bias")), False),
            ("mlp_bias", bool(config.get("mlp_bias")), False),
        ):
            if value != known:
                raise ValueError(f"the oracle knows only {name}={known!r}, not {value!r}")
        num_heads = config["num_attention_heads"]
        frequencies, magnitude = _scaled_rope(config, rope_type)
        return cls(
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
            frequencies=frequencies,
            magnitude=magnitude,
        )


def _scaled_rope(config: dict[str, Any], rope_type: str) -> tuple[tuple[float, ...] | None, float]:
    """Frequencies and magnitude of a scaled rotary embedding, as transformers defines them."""
    if rope_type == "default":
        return None, 1.0
    if rope_type not in ("linear", "llama3", "yarn"):
        raise ValueError(f"the oracle knows only some rope types, not {rope_type!r}")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope_type](LlamaConfig(**config), "cpu")
    return tuple(frequencies.double().tolist()), float(magnitude)


class OracleLlama:
    """A Llama in float64 whose attention mask is an argument.

    `angle_dtype`: where rotary angles, position times frequency, are rounded. Engines and
    transformers compute them in float32 whatever the model's dtype, which moves log-probabilities
    by about 1e-3 at position 4,000; with `torch.float32` the oracle rounds as they do, and only
    there. It takes that for the model's own definition, so it cannot see those angles go wrong.
    """

    def __init__(
        self,
        config: OracleConfig,
        weights: dict[str, Tensor],
        angle_dtype: torch.dtype = torch.float64,
    ) -> None:
        """`weights`: checkpoint tensors by their Hugging Face names, any float dtype."""
        self.config = config
        self.angle_dtype = angle_dtype
        self.weights = {name: tensor.double() for name, tensor in weights.items()}
        embedding = "model.embed_tokens.weight"
        self.head = self.weights[embedding if config.tied else "lm_head.weight"]

    @classmethod
    def from_folder(
        cls, folder: Path | str, angle_dtype: torch.dtype = torch.float64
    ) -> "OracleLlama":
        """Read `config.json` and every `*.safetensors` file of a checkpoint folder."""
        config = OracleConfig.from_json(json.loads((Path(folder) / "config.json").read_text()))
        weights: dict[str, Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            weights |= load_file(file)
        return cls(config, weights, angle_dtype)

    @torch.inference_mode()
    def logprobs(
        self,
        tokens: Sequence[int],
        mask: Tensor,
        positions: Tensor | None = None,
        rebase: Rebase | None = None,
        first_row: int = 0,
    ) -> Tensor:
        """Log-probabilities of the token after each token: `[n - first_row, vocab]` float64.

        `tokens`: `n` ids. `mask`: `[n, n]` booleans, causal, each query seeing itself.
        `positions`: `[n]` rotary positions of queries and keys, by default `0 .. n - 1`.
        `rebase`: turn queries by `v(p)` against the sink's keys; it sets the positions itself.
        `first_row`: leave out the rows before this one.
        """
        n = len(tokens)
        _check_mask(mask, n)
        if rebase is not None and positions is not None:
            raise ValueError("rebase sets the positions: give one of the two")
        own = self._turns(torch.arange(n) if positions is None else positions)
        far = None if rebase is None else self._turns(rebase.query_positions(n))
        sink = 0 if rebase is None else rebase.sink
        hidden = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm")
            hidden = hidden + self._attention(normed, prefix + "self_attn.", mask, own, far, sink)
            normed = self._norm(hidden, prefix + "post_attention_layernorm")
            hidden = hidden + self._mlp(normed, prefix + "mlp.")
        final = self._norm(hidden[first_row:], "model.norm")
        return (final @ self.head.T).log_softmax(-1)

    def greedy(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        mask_fn: MaskFn,
        rebase: Rebase | None = None,
    ) -> list[int]:
        """The `num_tokens` likeliest next tokens, one whole forward for each: for short runs."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            n = len(tokens)
            last = self.logprobs(tokens, mask_fn(n), rebase=rebase, first_row=n - 1)
            tokens.append(int(last.argmax()))
        return tokens[len(prompt) :]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """`[n, in_features]` -> `[n, out_features]`."""
        return x @ self.weights[name + ".weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last axis: `[n, hidden]` -> `[n, hidden]`."""
        scale = (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.weights[name + ".weight"]

    def _mlp(self, x: Tensor, prefix: str) -> Tensor:
        """SwiGLU: `[n, hidden]` -> `[n, hidden]`."""
        gate = silu(self._linear(x, prefix + "gate_proj"))
        return self._linear(gate * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _turns(self, positions: Tensor) -> Tensor:
        """Complex numbers that turn each pair of a head: `[n, 1, head_dim / 2]`."""
        half = self.config.head_dim // 2
        if self.config.frequencies is not None:
            frequencies = torch.tensor(self.config.frequencies, dtype=self.angle_dtype)
        else:
            exponent = torch.arange(half, dtype=self.angle_dtype) / half
            frequencies = 1.0 / self.config.rope_theta**exponent
        angles = (positions.to(self.angle_dtype)[:, None] * frequencies).double()
        magnitude = torch.full_like(angles, self.config.magnitude)
        return torch.polar(magnitude, angles)[:, None, :]

    def _attention(
        self,
        x: Tensor,
        prefix: str,
        mask: Tensor,
        own: Tensor,
        far: Tensor | None,
        sink: int,
    ) -> Tensor:
        """`[n, hidden]` -> `[n, hidden]`; against the first `sink` keys, queries turn by `far`."""
        head_dim = self.config.head_dim
        q, k, v = (
            self._linear(x, prefix + name).view(len(x), -1, head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        k = _rotate(k, own)
        near_q = _rotate(q, own)
        sink_q = None if far is None else _rotate(q, far)
        out = torch.empty_like(q)
        for head in range(self.config.num_heads):
            kv_head = head * self.config.num_kv_heads // self.config.num_heads
            out[:, head] = _attend(
                near_q[:, head],
                k[:, kv_head],
                v[:, kv_head],
                mask,
                None if sink_q is None else sink_q[:, head],
                sink,
            )
        return self._linear(out.flatten(1), prefix + "o_proj")


def _check_mask(mask: Tensor, n: int) -> None:
    if mask.dtype != torch.bool or mask.shape != (n, n):
        raise ValueError(f"the mask must be [{n}, {n}] booleans: {mask.dtype} {list(mask.shape)}")
    if not mask.diagonal().all() or mask.triu(1).any():
        raise ValueError("the mask must be causal and let every query see itself")


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn `x [n, heads, head_dim]`, element `i` paired with `i + head_dim / 2`, by `turns`."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * turns
    return torch.cat((turned.real, turned.imag), dim=-1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink_q: Tensor | None, sink: int
) -> Tensor:
    """One head's attention: `q, k, v [n, head_dim]`, `mask [n, n]` -> `[n, head_dim]`.

    `sink_q [n, head_dim]` takes the place of `q` against the first `sink` keys.
    """
    out = torch.empty_like(q)
    for start in range(0, len(q), QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        # Keys that no query of the chunk sees have weight 0 exactly: leave them out.
        seen = mask[rows].any(0).nonzero().squeeze(1)
        scores = q[rows] @ k[seen].T
        if sink_q is not None:
            scores = torch.where(seen < sink, sink_q[rows] @ k[seen].T, scores)
        scores = scores / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask[rows][:, seen], -math.inf)
        out[rows] = scores.softmax(-1) @ v[seen]
    return out


@dataclass(frozen=True)
class TokenReport:
    """How an engine's tokens compare with the oracle's.

    `first_mismatch` indexes the generated tokens, `None` when all are right; `mismatch_gap` is how
    far below the oracle's choice that token lies. `max_abs_logprob_error` is over the engine's
    log-probabilities of its tokens, `None` when none were given, NaN when one of them is.
    """

    num_tokens: int
    num_near_ties: int
    num_mismatches: int
    first_mismatch: int | None
    mismatch_gap: float | None
    max_abs_logprob_error: float | None
    logprob_tol: float | None

    @property
    def exact(self) -> bool:
        """Every token is right, and every given log-probability within the tolerance."""
        if self.first_mismatch is not None:
            return False
        if self.max_abs_logprob_error is None or self.logprob_tol is None:
            return True
        return self.max_abs_logprob_error <= self.logprob_tol


def check_tokens(
    oracle: OracleLlama,
    prompt: Sequence[int],
    generated: Sequence[int],
    mask_fn: MaskFn,
    tie: float = NEAR_TIE,
    logprobs: Sequence[float] | None = None,
    logprob_tol: float | None = None,
    rebase: Rebase | None = None,
) -> TokenReport:
    """Compare greedy tokens with the oracle's, in one forward over prompt and tokens.

    A token is right when it is the oracle's choice, or lies within `tie` of it in log-probability
    (a near tie; the comparison goes on from the engine's token). `logprobs`: the engine's own
    log-probabilities of its tokens.
    """
    if not prompt or not generated:
        raise ValueError(f"nothing to compare: {len(prompt)} + {len(generated)} tokens")
    if logprobs is not None and len(logprobs) != len(generated):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(generated)} tokens")
    if logprob_tol is not None and logprobs is None:
        raise ValueError(f"logprob_tol={logprob_tol} without log-probabilities to compare")
    tokens = [*prompt, *generated][:-1]
    table = oracle.logprobs(tokens, mask_fn(len(tokens)), rebase=rebase, first_row=len(prompt) - 1)
    chosen = table.gather(1, torch.tensor(generated)[:, None]).squeeze(1)
    gaps = table.max(-1).values - chosen
    wrong = (~(gaps <= tie)).nonzero().squeeze(1).tolist()
    error = None
    if logprobs is not None:
        error = float((chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().max())
    return TokenReport(
        num_tokens=len(generated),
        num_near_ties=int(((gaps > 0) & (gaps <= tie)).sum()),
        num_mismatches=len(wrong),
        first_mismatch=wrong[0] if wrong else None,
        mismatch_gap=float(gaps[wrong[0]]) if wrong else None,
        max_abs_logprob_error=error,
        logprob_tol=logprob_tol,
    )


def assert_exact(
    oracle: OracleLlama,
    prompt: Sequence[int],
    generated: Sequence[int],
    mask_fn: MaskFn,
    tie: float = NEAR_TIE,
    logprobs: Sequence[float] | None = None,
    logprob_tol: float | None = None,
    rebase: Rebase | None = None,
) -> TokenReport:
    """`check_tokens`, raising `AssertionError` with the numbers unless the report is exact."""
    report = check_tokens(oracle, prompt, generated, mask_fn, tie, logprobs, logprob_tol, rebase)
    if not report.exact:
        raise AssertionError(f"after a prompt of {len(prompt)} tokens, tie={tie}: {report}")
    return report
