"""The flags, through vLLM's own parsers: what they write, wherever they stand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("plugin")

Parse = Callable[[list[str]], Any]

FLAGS = [
    *("--kv-plugin", "bounded"),
    *("--bounded-kv-sink", "8"),
    *("--bounded-kv-window", "100"),
    *("--bounded-kv-max-source-len", "50"),
    *("--bounded-kv-max-slots", "3"),
    *("--bounded-kv-max-pinned-blocks", "7"),
    *("--bounded-kv-session-idle-s", "1.5"),
    *("--bounded-kv-max-sessions", "2"),
    *("--bounded-kv-positions", "absolute"),
]
POLICY = {
    "sink": 8,
    "window": 100,
    "max_source_len": 50,
    "max_slots": 3,
    "max_pinned_blocks": 7,
    "session_idle_s": 1.5,
    "max_sessions": 2,
    "positions": "absolute",
}
CONFIG = {"kv_plugin": "bounded", "bounded_kv": POLICY}


def engine_parser() -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return EngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.fixture
def serve() -> Parse:
    """Parses what comes behind `vllm serve`, as its command line does."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    return lambda args: parser.parse_args(["serve", *args])


def test_the_engines_own_parser() -> None:
    args = engine_parser().parse_args(["--model", "some/model", *FLAGS])
    assert args.additional_config == CONFIG
    assert args.model == "some/model"


def test_before_and_after_the_model_name(serve: Parse) -> None:
    for words in (["some/model", *FLAGS], [*FLAGS, "some/model"]):
        args = serve(words)
        assert args.model_tag == "some/model"
        assert args.additional_config == CONFIG
    args = serve([*FLAGS[:4], "some/model", *FLAGS[4:]])
    assert (args.model_tag, args.additional_config) == ("some/model", CONFIG)


def test_the_other_spellings_of_a_flag(serve: Parse) -> None:
    args = serve(["m", "--kv_plugin=bounded", "--bounded_kv_sink", "8", "--bounded-kv-window=9"])
    assert args.additional_config == {
        "kv_plugin": "bounded",
        "bounded_kv": {"sink": 8, "window": 9},
    }


def test_the_bare_plugin(serve: Parse) -> None:
    assert serve(["m", "--kv-plugin", "bounded"]).additional_config == {"kv_plugin": "bounded"}


def test_nothing_given_writes_nothing(serve: Parse) -> None:
    assert serve(["m"]).additional_config == {}
    assert engine_parser().parse_args([]).additional_config == {}


def test_parsing_twice_starts_afresh(serve: Parse) -> None:
    assert serve(["m", *FLAGS]).additional_config == CONFIG
    assert serve(["m"]).additional_config == {}
    assert serve(["m", "--kv-plugin", "bounded"]).additional_config == {"kv_plugin": "bounded"}


def test_a_retention_callable_and_a_file(serve: Parse) -> None:
    args = serve(["m", "--bounded-kv-retention", "mod:fn", "--bounded-kv-config", "kv.yaml"])
    assert args.additional_config == {
        "bounded_kv": {"retention": "mod:fn"},
        "bounded_kv_config": "kv.yaml",
    }


def as_yaml(flags: list[str]) -> str:
    return "".join(f"{n[2:]}: {v}\n" for n, v in zip(flags[::2], flags[1::2], strict=True))


def test_with_vllms_config_file(serve: Parse, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(as_yaml(FLAGS) + "max-num-seqs: 7\n")
    args = serve(["m", "--config", str(file)])
    assert args.additional_config == CONFIG
    assert (args.model_tag, args.max_num_seqs) == ("m", 7)


def test_the_command_line_wins_over_vllms_config_file(serve: Parse, tmp_path: Path) -> None:
    """The model stands in the file here: vLLM wants it there, or straight behind `serve`."""
    file = tmp_path / "serve.yaml"
    file.write_text("model: some/model\n" + as_yaml(FLAGS))
    for words in (
        ["--bounded-kv-sink", "2", "--config", str(file)],
        ["--config", str(file), "--bounded-kv-sink", "2"],
    ):
        args = serve(words)
        assert args.model == "some/model"
        assert args.additional_config == {**CONFIG, "bounded_kv": {**POLICY, "sink": 2}}


def test_additional_config_nested_in_vllms_config_file(serve: Parse, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "additional-config:\n  kv_plugin: bounded\n  other: 1\n"
        "  bounded_kv:\n    window: 64\n    window_includes_step: false\n"
    )
    args = serve(["m", "--config", str(file), "--bounded-kv-sink", "8"])
    assert args.additional_config == {
        "kv_plugin": "bounded",
        "other": 1,
        "bounded_kv": {"sink": 8, "window": 64, "window_includes_step": False},
    }


OTHERS = {"other": {"a": [1, 2]}}


@pytest.mark.parametrize("flags_first", [True, False])
def test_beside_other_additional_config(serve: Parse, flags_first: bool) -> None:
    other = ["--additional-config", json.dumps(OTHERS)]
    args = serve(["m", *FLAGS, *other] if flags_first else ["m", *other, *FLAGS])
    assert args.additional_config == {**CONFIG, **OTHERS}


@pytest.mark.parametrize("flags_first", [True, False])
def test_settings_by_both_ways_are_put_together(serve: Parse, flags_first: bool) -> None:
    given = {"bounded_kv": {"window": 64, "window_includes_step": False}, "kv_plugin": "bounded"}
    other, flags = ["--additional-config", json.dumps(given)], ["--bounded-kv-sink", "8"]
    args = serve(["m", *flags, *other] if flags_first else ["m", *other, *flags])
    assert args.additional_config == {
        "kv_plugin": "bounded",
        "bounded_kv": {"sink": 8, "window": 64, "window_includes_step": False},
    }


@pytest.mark.parametrize("flags_first", [True, False])
def test_a_flag_wins_over_additional_config(serve: Parse, flags_first: bool) -> None:
    given = {"bounded_kv": {"sink": 1, "window": 64}}
    other, flags = ["--additional-config", json.dumps(given)], ["--bounded-kv-sink", "8"]
    args = serve(["m", *flags, *other] if flags_first else ["m", *other, *flags])
    assert args.additional_config["bounded_kv"] == {"sink": 8, "window": 64}


def test_without_the_flags_the_last_additional_config_counts_alone(serve: Parse) -> None:
    """As in stock vLLM."""
    args = serve(["m", "--additional-config", '{"a": 1}', "--additional-config", '{"b": 2}'])
    assert args.additional_config == {"b": 2}


def test_dotted_additional_config(serve: Parse) -> None:
    args = serve(["m", "--additional-config.bounded_kv.window", "64", *FLAGS[:4]])
    assert args.additional_config == {
        "kv_plugin": "bounded",
        "bounded_kv": {"sink": 8, "window": 64},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-plugin", "unbounded"], "argument --kv-plugin: invalid choice: 'unbounded'"),
        (["--kv-plugin", "unbounded"], "(choose from 'bounded')"),
        (["--bounded-kv-sink", "four"], "argument --bounded-kv-sink: invalid int value: 'four'"),
        (["--bounded-kv-window", "1.5"], "argument --bounded-kv-window: invalid int value"),
        (["--bounded-kv-positions", "rel"], "argument --bounded-kv-positions: invalid choice"),
    ],
)
def test_what_the_parser_refuses(
    serve: Parse, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        serve(["m", *words])
    assert message in capsys.readouterr().err


def test_the_flags_have_a_help_group_of_their_own() -> None:
    groups = {group.title: group for group in engine_parser()._action_groups}
    names = {name for a in groups["Bounded KV cache"]._group_actions for name in a.option_strings}
    assert names == {
        "--kv-plugin",
        "--bounded-kv-config",
        "--bounded-kv-sink",
        "--bounded-kv-window",
        "--bounded-kv-max-source-len",
        "--bounded-kv-max-slots",
        "--bounded-kv-max-pinned-blocks",
        "--bounded-kv-session-idle-s",
        "--bounded-kv-max-sessions",
        "--bounded-kv-retention",
        "--bounded-kv-positions",
        "--bounded-kv-position-limit",
    }
    help_text = groups["Bounded KV cache"]._group_actions
    assert any("default: 4" in (action.help or "") for action in help_text)


def test_an_extension_has_a_help_group_and_flags_that_reach_the_engine(serve: Parse) -> None:
    groups = {group.title: group for group in engine_parser()._action_groups}
    names = {name for a in groups["Speech"]._group_actions for name in a.option_strings}
    assert {"--speech-profile", "--max-audio-streams", "--voices-dir"} <= names
    args = serve(["m", "--kv-plugin", "bounded", "--max-audio-streams", "3"])
    assert args.additional_config["bounded_kv_speech"] == {"max_audio_streams": 3}


def test_registering_twice_adds_no_second_flag() -> None:
    from vllm_bounded_kv.engine.plugin import register

    register()
    actions = [a for a in engine_parser()._actions if "--kv-plugin" in a.option_strings]
    assert len(actions) == 1


# --- from the flags to the engine ------------------------------------------------------------


def config_of(model: Path, words: list[str]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    common = ["--model", str(model), "--dtype", "float32", "--enforce-eager"]
    args = engine_parser().parse_args([*common, "--max-model-len", "4096", *words])
    return EngineArgs.from_cli_args(args).create_engine_config()


def test_the_flags_reach_the_engines_config(tiny_model: Path, tmp_path: Path) -> None:
    from vllm_bounded_kv.engine.policy import EnginePolicy
    from vllm_bounded_kv.engine.settings import policy_of

    file = tmp_path / "kv.json"
    file.write_text('{"sink": 1, "window": 70, "window_includes_step": false}')
    words = ["--kv-plugin", "bounded", "--bounded-kv-sink", "8", "--bounded-kv-config", str(file)]
    config = config_of(tiny_model, words)
    assert policy_of(config) == EnginePolicy(
        sink=8,
        window=70,
        window_includes_step=False,
        positions="rebase",
        position_limit=4 * (8 + 71),
    )
    assert config.cache_config.block_size == 32
    config = config_of(tiny_model, [*words, "--block-size", "64"])
    assert config.cache_config.block_size == 64


@pytest.mark.parametrize("words", [FLAGS[2:4], ["--bounded-kv-config", "kv.yaml"]])
def test_flags_without_the_plugin_are_refused(tiny_model: Path, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"bounded_kv.*no effect without --kv-plugin bounded"):
        config_of(tiny_model, words)


def test_an_unknown_name_in_additional_config_is_refused(tiny_model: Path) -> None:
    words = ["--additional-config", '{"kv_plugin": "unbounded"}']
    with pytest.raises(ValueError, match=r"--kv-plugin='unbounded'.*known: bounded"):
        config_of(tiny_model, words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bounded-kv-sink", "-1"], "sink=-1: must be >= 0"),
        (["--bounded-kv-window", "0"], "window=0: must be >= 1"),
        (["--bounded-kv-window", "4093"], r"sink \+ window=4097: .*max_model_len=4096"),
        (["--scheduler-cls", "a.B"], "--scheduler-cls='a.B': cannot be combined"),
        (["--worker-cls", "a.B"], "--worker-cls='a.B': cannot be combined"),
    ],
)
def test_bad_flags_stop_the_start(tiny_model: Path, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tiny_model, ["--kv-plugin", "bounded", *words])
