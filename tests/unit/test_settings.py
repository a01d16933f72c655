"""Where settings come from, which of them wins, and what a bad file or mapping is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_bounded_kv import SinkWindow
from vllm_bounded_kv.engine.policy import EnginePolicy, PolicyError
from vllm_bounded_kv.engine.settings import is_enabled, policy_of, settle


def engine(
    model_policy: Any = None, max_model_len: int = 4096, architecture: str = "OtherForCausalLM"
) -> Any:
    """A stand-in for a `VllmConfig` whose model declares `model_policy`."""
    hf_config = SimpleNamespace(
        max_position_embeddings=8192, rope_parameters={"rope_type": "default"}
    )
    if model_policy is not None:
        hf_config.bounded_kv = model_policy
    model = SimpleNamespace(
        hf_config=hf_config,
        hf_text_config=hf_config,
        max_model_len=max_model_len,
        architectures=[architecture],
        model_impl="auto",
        use_mla=False,
        uses_mrope=False,
        uses_alibi=False,
    )
    return SimpleNamespace(model_config=model, speculative_config=None)


def asked(**config: Any) -> dict[str, Any]:
    return {"kv_plugin": "bounded", **config}


def settled(config: dict[str, Any], model_policy: Any = None) -> dict[str, Any]:
    policy: dict[str, Any] = settle(config, engine(model_policy))["bounded_kv"]
    return policy


def written(tmp_path: Path, text: str, name: str = "kv.yaml") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- is it asked for? ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [None, {}, {"other": 1}, {"kv_plugin": None}, {"bounded_kv": {}}, "text", ["kv_plugin"]],
)
def test_not_asked_for(config: Any) -> None:
    assert is_enabled(config) is False


def test_asked_for() -> None:
    assert is_enabled(asked()) is True
    assert is_enabled(asked(bounded_kv={"sink": 1}, other=2)) is True


@pytest.mark.parametrize("name", ["bound", "", "Bounded", 5])
def test_an_unknown_plugin_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(PolicyError, match=rf"--kv-plugin={name!r}: .*known: bounded"):
        is_enabled({"kv_plugin": name})


@pytest.mark.parametrize(
    ("key", "value"), [("bounded_kv", {"sink": 8}), ("bounded_kv_config", "kv.yaml")]
)
def test_settings_without_the_plugin_are_refused(key: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=rf"{key}=.*no effect without --kv-plugin bounded"):
        is_enabled({key: value})


# --- who wins --------------------------------------------------------------------------------


def test_each_source_overrides_the_ones_before(tmp_path: Path) -> None:
    """Defaults, the model's config.json, the file, the flags."""
    file = written(tmp_path, "window: 300\nmax_source_len: 30\nmax_slots: 3\n")
    policy = settled(
        asked(bounded_kv={"max_source_len": 40}, bounded_kv_config=file),
        model_policy={"sink": 2, "window": 200, "max_source_len": 20},
    )
    assert policy == {
        **EnginePolicy().to_mapping(),
        "sink": 2,
        "window": 300,
        "max_source_len": 40,
        "max_slots": 3,
        "positions": "absolute",
    }


def test_nothing_given_is_the_defaults() -> None:
    expected = EnginePolicy(window=2048, positions="absolute")
    assert settled(asked()) == expected.to_mapping()


@pytest.mark.parametrize(
    ("model_policy", "flags", "expected"),
    [
        ({"position_limit": 4096}, {"positions": "absolute"}, ("absolute", None, 2048, None)),
        ({"retention": f"{__name__}:half"}, {"window": 50}, ("rebase", 216, 50, None)),
        (
            {"sink": 9, "window": 50, "window_includes_step": False},
            {"retention": f"{__name__}:half"},
            ("rebase", 64, None, f"{__name__}:half"),
        ),
    ],
)
def test_a_later_source_drops_what_its_choice_makes_meaningless(
    model_policy: dict[str, Any], flags: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    config = engine(model_policy, architecture="LlamaForCausalLM")
    policy = settle(asked(bounded_kv=flags), config)["bounded_kv"]
    names = ("positions", "position_limit", "window", "retention")
    assert tuple(policy[name] for name in names) == expected


def half(source_len: int) -> SinkWindow:
    return SinkWindow(8, 8, window_includes_step=True)


def test_positions_fall_back_where_the_model_supports_it() -> None:
    policy = settle(asked(), engine(architecture="LlamaForCausalLM"))["bounded_kv"]
    assert (policy["positions"], policy["position_limit"]) == ("rebase", 8192)
    small = asked(bounded_kv={"window": 96})
    policy = settle(small, engine(architecture="LlamaForCausalLM"))["bounded_kv"]
    assert policy["position_limit"] == 400


def test_a_falsy_flag_still_wins(tmp_path: Path) -> None:
    file = written(tmp_path, "sink: 9\nwindow_includes_step: true\n")
    flags = {"sink": 0, "window_includes_step": False}
    policy = settled(asked(bounded_kv=flags, bounded_kv_config=file))
    assert (policy["sink"], policy["window_includes_step"]) == (0, False)


def test_what_others_wrote_stays_and_the_file_is_read_once(tmp_path: Path) -> None:
    config = asked(bounded_kv_config=written(tmp_path, "sink: 9"), other={"a": 1})
    before = dict(config)
    result = settle(config, engine())
    assert config == before
    assert sorted(result) == ["bounded_kv", "kv_plugin", "other"]
    assert result["other"] == {"a": 1}
    assert settle(result, engine({"sink": 77})) == result  # all of it is settled


def test_the_default_window_fits_the_models_length() -> None:
    assert settle(asked(), engine(max_model_len=100))["bounded_kv"]["window"] == 96


def test_the_settled_policy_is_what_every_process_reads() -> None:
    config = settle(asked(bounded_kv={"sink": 6, "window": 50}), engine())
    assert policy_of(SimpleNamespace(additional_config=config)) == EnginePolicy(
        sink=6, window=50, positions="absolute"
    )
    for stock in (None, {}, {"other": 1}, "text"):
        assert policy_of(SimpleNamespace(additional_config=stock)) is None


@pytest.mark.parametrize("value", [[1], "sink=4", 5])
def test_settings_that_are_no_mapping_are_refused(value: Any) -> None:
    with pytest.raises(PolicyError, match=r"bounded_kv=.*must be a mapping"):
        settle(asked(bounded_kv=value), engine())
    with pytest.raises(PolicyError, match=r"bounded_kv=.*must be a mapping"):
        settle(asked(), engine(model_policy=value))


def test_the_length_of_drafts_is_vllms_to_say() -> None:
    drafting = engine()
    drafting.speculative_config = SimpleNamespace(num_speculative_tokens=5)
    policy = settle(asked(), drafting)["bounded_kv"]
    assert policy["num_draft_tokens"] == 5
    assert settle(asked(bounded_kv=policy), drafting)["bounded_kv"] == policy
    with pytest.raises(PolicyError, match="num_draft_tokens=5: is not to be set: --speculative"):
        settle(asked(bounded_kv=policy), engine())


@pytest.mark.parametrize("where", ["flags", "file", "model"])
def test_a_bad_value_is_named_wherever_it_stands(tmp_path: Path, where: str) -> None:
    bad = {"sinks": 4}
    flags = {"bounded_kv": bad} if where == "flags" else {}
    if where == "file":
        flags["bounded_kv_config"] = written(tmp_path, "sinks: 4")  # type: ignore[assignment]
    with pytest.raises(PolicyError, match="sinks=4: unknown bounded_kv setting"):
        settle(asked(**flags), engine(bad if where == "model" else None))


# --- the file --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kv.yaml", "kv.yml", "kv.json", "kv"])
def test_yaml_and_json(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, json.dumps({"sink": 9, "window": 70}), name)
    for path in (file, Path(file)):
        policy = settled(asked(bounded_kv_config=path))
        assert (policy["sink"], policy["window"]) == (9, 70)


def test_a_path_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path, "sink: 9")
    assert settled(asked(bounded_kv_config="~/kv.yaml"))["sink"] == 9


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("kv.yaml", "sink: [4", "is not valid YAML or JSON"),
        ("kv.yaml", "sink: 4\n window: 5", "is not valid YAML or JSON"),
        ("kv.yaml", "a: !!python/object:os.system x", "is not valid YAML or JSON"),
        ("kv.json", "{'sink': 4}", "is not valid YAML or JSON"),
        ("kv.json", "sink: 4", "is not valid YAML or JSON"),
        ("kv.yaml", "- sink\n- window\n", "must contain a mapping"),
        ("kv.json", "[1, 2]", "must contain a mapping"),
        ("kv.yaml", "", "must contain a mapping"),
        ("kv.yaml", "just text", "must contain a mapping"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    file = written(tmp_path, text, name)
    with pytest.raises(PolicyError, match=rf"--bounded-kv-config='.*{name}': {reason}"):
        settle(asked(bounded_kv_config=file), engine())


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    with pytest.raises(PolicyError, match=r"none.yaml': cannot be read: No such file"):
        settle(asked(bounded_kv_config=missing), engine())
    with pytest.raises(PolicyError, match=r"cannot be read: Is a directory"):
        settle(asked(bounded_kv_config=str(tmp_path)), engine())


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "kv.yaml").write_bytes(b"sink: \xff")
    with pytest.raises(PolicyError, match=r"kv.yaml': is not valid YAML or JSON"):
        settle(asked(bounded_kv_config=str(tmp_path / "kv.yaml")), engine())


@pytest.mark.parametrize("path", [5, ["kv.yaml"]])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(PolicyError, match=r"--bounded-kv-config=.*must be a path"):
        settle(asked(bounded_kv_config=path), engine())
