"""`bounded-kv size` and a server that runs: the same figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.server import BLOCK_BYTES, MAX_POSITIONS, figures, start_up_line
from vllm_bounded_kv.launch import VllmServer
from vllm_bounded_kv.tools.main import main

SINK, WINDOW, MAX_SOURCE, SLOTS, POOL_BLOCKS = 5, 96, 96, 4, 39


def test_the_servers_figures_without_a_server(
    server: VllmServer, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the server's flags say beyond the command's options, the model's configuration says."""
    config = json.loads((tiny_model / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MAX_POSITIONS
    config["bounded_kv"] = {"max_slots": SLOTS, "positions": "absolute"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = ["--sink", str(SINK), "--window", str(WINDOW), "--max-source-len", str(MAX_SOURCE)]
    # One block is vLLM's null block.
    options += ["--dtype", "float32", "--memory", str((POOL_BLOCKS + 1) * BLOCK_BYTES)]
    assert main(["size", str(tmp_path), *options, "--json"]) == 0
    sizing = json.loads(capsys.readouterr().out)
    shown, line = figures(server.url), start_up_line(server)
    same = sizing.keys() & shown.keys()
    assert same == {
        *("policy", "block_size", "block_bytes", "slot_blocks", "slot_bytes"),
        *("pool_blocks", "slots_total", "max_pinned_blocks"),
    }
    assert {name: sizing[name] for name in same} == {name: shown[name] for name in same}
    both = sizing.keys() & line.keys()
    assert "source_blocks" in both
    assert {name: sizing[name] for name in both} == {name: line[name] for name in both}
