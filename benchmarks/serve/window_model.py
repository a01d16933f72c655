"""The same weights under a configuration that says `sliding_window`."""

from __future__ import annotations

import json
from pathlib import Path


def windowed_copy(model: str, window: int, folder: Path) -> Path:
    """A folder of links to the model's files whose `config.json` has a sliding window.

    vLLM 0.32 takes `sliding_window` for every layer of a Llama that names no `layer_types`.

    Args:
        model: a folder.
        window: entries, the query's own included.
        folder: where to write; it may exist.

    Raises:
        ValueError: when the model is no folder, or has layer types of its own.
    """
    source = Path(model)
    if not (source / "config.json").is_file():
        raise ValueError(f"--model={model!r}: stock-window needs a folder with a config.json")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("layer_types"):
        raise ValueError(f"--model={model!r}: has layer_types of its own; leave out stock-window")
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        link = folder / path.name
        if path.name != "config.json" and not link.exists():
            link.symlink_to(path.resolve())
    # Mistral and Qwen2 have a switch as well; Llama knows none and ignores it.
    config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
