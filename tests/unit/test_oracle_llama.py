"""The oracle against transformers, and proof that its verdicts can fail."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.tiny_llama import (
    EOS_ID,
    SPECIAL_TOKENS,
    TinyLlama,
    cached_tiny_llama,
    random_prompt,
    write_tiny_llama,
)
from support.oracle_llama import (
    NEAR_TIE,
    MaskFn,
    OracleLlama,
    Rebase,
    assert_exact,
    bounded_mask,
    check_tokens,
    full_mask,
)

# transformers rounds rotary angles to float32 whatever the dtype: by default the oracle does not.
# Its norms, cosines and softmax are float32 too: the second tolerance leaves room for those.
TRANSFORMERS_ATOL = 1e-3
SAME_ANGLES_ATOL = 1e-4

SINK, WINDOW = 4, 32
BOUNDED: MaskFn = partial(bounded_mask, sink=SINK, window=WINDOW)

ModelFactory = Callable[[TinyLlama], Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    return partial(cached_tiny_llama, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def oracle(tiny: ModelFactory) -> OracleLlama:
    return OracleLlama.from_folder(tiny(TinyLlama()))


def transformers_logprobs(
    folder: Path, tokens: list[int], mask: Tensor | None, positions: Tensor | None = None
) -> Tensor:
    """`[n, vocab]` float64 log-probabilities; `mask [n, n]` goes in as a 4D mask."""
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    additive = None
    if mask is not None:
        additive = torch.zeros(mask.shape, dtype=torch.float64)
        additive = additive.masked_fill(~mask, torch.finfo(torch.float64).min)[None, None]
    with torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([tokens]),
            attention_mask=additive,
            position_ids=None if positions is None else positions[None],
        ).logits
    logprobs: Tensor = logits[0].log_softmax(-1)
    return logprobs


SPECS = [
    TinyLlama(),
    TinyLlama(num_layers=2, seed=1, rope_theta=500000.0),
    TinyLlama(head_dim=64, num_kv_heads=4, hidden_size=64, seed=2),
    TinyLlama(tie_word_embeddings=True, num_kv_heads=1, seed=3),
]


@pytest.mark.parametrize("spec", SPECS, ids=["default", "theta", "mha64", "tied-mqa"])
@pytest.mark.parametrize("bounded", [False, True], ids=["full", "bounded"])
def test_agrees_with_transformers(tiny: ModelFactory, spec: TinyLlama, bounded: bool) -> None:
    folder, tokens = tiny(spec), random_prompt(300, seed=5)
    mask = BOUNDED(300) if bounded else full_mask(300)
    expected = transformers_logprobs(folder, tokens, mask if bounded else None)
    actual = OracleLlama.from_folder(folder).logprobs(tokens, mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TRANSFORMERS_ATOL)


def test_agrees_with_transformers_at_given_positions(
    tiny: ModelFactory, oracle: OracleLlama
) -> None:
    tokens, positions = random_prompt(200), torch.arange(200) * 3 + 7
    expected = transformers_logprobs(tiny(TinyLlama()), tokens, None, positions)
    actual = oracle.logprobs(tokens, full_mask(200), positions)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TRANSFORMERS_ATOL)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    ],
)
def test_agrees_with_transformers_on_scaled_positions(
    tiny: ModelFactory, scaling: dict[str, Any]
) -> None:
    folder = tiny(TinyLlama(rope_scaling=tuple(scaling.items())))
    tokens = random_prompt(300, seed=5)
    expected = transformers_logprobs(folder, tokens, None)
    actual = OracleLlama.from_folder(folder).logprobs(tokens, full_mask(300))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TRANSFORMERS_ATOL)
    plain = OracleLlama.from_folder(tiny(TinyLlama())).logprobs(tokens, full_mask(300))
    assert (plain - expected).abs().max() > 10 * TRANSFORMERS_ATOL


def test_rounded_angles_are_the_whole_difference(tiny: ModelFactory) -> None:
    folder, tokens, positions = tiny(TinyLlama()), random_prompt(300), torch.arange(300) + 7000
    expected = transformers_logprobs(folder, tokens, None, positions)
    exact, rounded = (
        OracleLlama.from_folder(folder, dtype).logprobs(tokens, full_mask(300), positions)
        for dtype in (torch.float64, torch.float32)
    )
    torch.testing.assert_close(rounded, expected, rtol=0, atol=SAME_ANGLES_ATOL)
    assert (exact - expected).abs().max() > 10 * SAME_ANGLES_ATOL


def test_reads_both_forms_of_rope_theta(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", TinyLlama(rope_theta=777.0))
    new = OracleLlama.from_folder(folder).config
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    old = OracleLlama.from_folder(folder).config
    assert new == old
    assert new.rope_theta == 777.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"rope_type": "dynamic", "factor": 8.0}),
        ("attention_bias", True),
        ("model_type", "qwen3"),
    ],
)
def test_refuses_models_it_does_not_compute(tmp_path: Path, key: str, value: object) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match="the oracle knows only"):
        OracleLlama.from_folder(folder)


@pytest.mark.parametrize(
    ("sink", "window", "includes_step"),
    [(0, 1, True), (0, 0, False), (2, 3, True), (2, 3, False), (9, 2, True), (50, 4, True)],
)
def test_bounded_mask_by_brute_force(sink: int, window: int, includes_step: bool) -> None:
    n = 20
    mask = bounded_mask(n, sink, window, includes_step)
    for query in range(n):
        written = list(range(query + 1))
        recent = written[-(window if includes_step else window + 1) :]
        kept = sorted(set(written[:sink]) | set(recent))
        assert mask[query].nonzero().squeeze(1).tolist() == kept


def test_rebase_by_brute_force(oracle: OracleLlama) -> None:
    """Row by row, with every key at the position it has when that query runs."""
    sink, window, limit, n = 3, 8, 16, 60
    base = sink + window
    rebase = Rebase(sink, base, limit)
    tokens, mask = random_prompt(n, seed=9), bounded_mask(n, sink, window)
    v = rebase.query_positions(n).tolist()
    assert v == [p if p < limit else base + (p - base) % (limit - base) for p in range(n)]
    actual = one_layer(oracle).logprobs(tokens, mask, rebase=rebase)
    for p in range(n):
        positions = [key if key < sink else v[p] - (p - key) for key in range(p + 1)]
        row_mask = full_mask(p + 1)
        row_mask[-1] = mask[p, : p + 1]
        expected = one_layer(oracle).logprobs(
            tokens[: p + 1], row_mask, torch.tensor(positions), first_row=p
        )
        torch.testing.assert_close(actual[p : p + 1], expected, rtol=0, atol=1e-9)


def one_layer(oracle: OracleLlama) -> OracleLlama:
    """The first layer alone: its keys depend on no earlier mask, so rows can be checked singly."""
    return OracleLlama(replace(oracle.config, num_layers=1), oracle.weights)


def test_rebase_changes_nothing_below_its_limit(oracle: OracleLlama) -> None:
    tokens = random_prompt(100)
    plain = oracle.logprobs(tokens, BOUNDED(100))
    rebased = oracle.logprobs(tokens, BOUNDED(100), rebase=Rebase(SINK, SINK + WINDOW, 90))
    torch.testing.assert_close(rebased[:90], plain[:90], rtol=0, atol=1e-9)
    assert (rebased[90:] - plain[90:]).abs().max() > 0.1


def test_chunks_and_first_row_change_nothing(
    oracle: OracleLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_prompt(90)
    whole = oracle.logprobs(tokens, BOUNDED(90))
    monkeypatch.setattr("support.oracle_llama.QUERY_CHUNK", 7)
    chunked = oracle.logprobs(tokens, BOUNDED(90), first_row=50)
    torch.testing.assert_close(chunked, whole[50:], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "broken", [lambda m: m.float(), lambda m: m[1:], lambda m: m.T, lambda m: ~m]
)
def test_refuses_masks_that_mean_nothing(
    oracle: OracleLlama, broken: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(ValueError, match="the mask must be"):
        oracle.logprobs(random_prompt(8), broken(full_mask(8)))


@pytest.mark.parametrize("seed", range(3))
def test_verdict_is_exact_for_the_mask_and_fails_for_its_neighbours(
    oracle: OracleLlama, seed: int
) -> None:
    prompt = random_prompt(SINK + WINDOW, seed)
    tokens = oracle.greedy(prompt, 60, BOUNDED)
    assert_exact(oracle, prompt, tokens, BOUNDED)
    for sink, window in ((SINK - 1, WINDOW), (SINK + 1, WINDOW), (SINK, WINDOW + 1)):
        neighbour = partial(bounded_mask, sink=sink, window=window)
        report = check_tokens(oracle, prompt, tokens, neighbour)
        assert report.first_mismatch is not None, (sink, window)
        assert report.mismatch_gap is not None and report.mismatch_gap > NEAR_TIE
        with pytest.raises(AssertionError, match="first_mismatch"):
            assert_exact(oracle, prompt, tokens, neighbour)
        assert oracle.greedy(prompt, 60, neighbour) != tokens


def test_verdict_counts_near_ties(oracle: OracleLlama) -> None:
    prompt = random_prompt(20)
    tokens = oracle.greedy(prompt, 5, full_mask)
    row = oracle.logprobs(prompt + tokens[:4], full_mask(24), first_row=23)[0]
    best, second = row.topk(2)
    assert best[0] - best[1] > NEAR_TIE
    tokens[4] = int(second[1])
    gap = float(best[0] - best[1])
    assert check_tokens(oracle, prompt, tokens, full_mask).first_mismatch == 4
    within = check_tokens(oracle, prompt, tokens, full_mask, tie=gap * 1.001)
    assert (within.first_mismatch, within.num_near_ties) == (None, 1)


def test_verdict_compares_logprobs(oracle: OracleLlama) -> None:
    prompt = random_prompt(20)
    tokens = oracle.greedy(prompt, 5, full_mask)
    table = oracle.logprobs(prompt + tokens[:4], full_mask(24), first_row=19)
    values = [float(row[token]) for row, token in zip(table, tokens, strict=True)]
    check = partial(check_tokens, oracle, prompt, tokens, full_mask, logprob_tol=1e-4)
    assert check(logprobs=values).exact
    values[2] += 1e-3
    report = check(logprobs=values)
    assert not report.exact
    assert report.max_abs_logprob_error == pytest.approx(1e-3)
    values[2] = math.nan
    assert not check(logprobs=values).exact


def test_verdict_refuses_to_compare_nothing(oracle: OracleLlama) -> None:
    with pytest.raises(ValueError, match="nothing to compare"):
        check_tokens(oracle, [1], [], full_mask)
    with pytest.raises(ValueError, match="2 log-probabilities for 1 tokens"):
        check_tokens(oracle, [1], [2], full_mask, logprobs=[0.0, 0.0])


def test_tiny_folder_is_deterministic_and_cached(tmp_path: Path) -> None:
    first, second = write_tiny_llama(tmp_path / "a"), cached_tiny_llama(tmp_path / "cache")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert cached_tiny_llama(tmp_path / "cache") == second
    assert cached_tiny_llama(tmp_path / "cache", TinyLlama(seed=1)) != second
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_tiny_tokenizer_is_bytes(tiny: ModelFactory) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny(TinyLlama()))
    text = "Ein Satz, größer als ASCII.\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == EOS_ID
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == f"{SPECIAL_TOKENS[0]}<|start|>user\nhi<|end|>\n<|start|>assistant\n"
