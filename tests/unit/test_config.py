"""The configuration: defaults, files, and one clear word for everything that is wrong."""

from pathlib import Path

import msgspec
import pytest

from vllm_expertplex.config import (
    ADDITIONAL_CONFIG_KEY,
    ENV_RUN_DIR,
    ExpertPlexConfig,
    ServerSettings,
    load_config,
    run_dir,
)


def test_defaults_are_the_smallest_deployment() -> None:
    assert load_config(None) == ExpertPlexConfig()
    assert str(ExpertPlexConfig().parsed_layout) == "1P1D1E"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"layout": "1P2D3E", "moe_timeout_s": 5}'),
        ("c.toml", 'layout = "1P2D3E"\nmoe_timeout_s = 5.0\n'),
        ("c", '{"layout": "1P2D3E", "moe_timeout_s": 5.0}'),
    ],
)
def test_a_file_sets_options_and_the_command_line_wins(
    tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert load_config(str(file)) == ExpertPlexConfig(layout="1P2D3E", moe_timeout_s=5.0)
    given = load_config(str(file), layout="2P1D1E", trace=None)
    assert given == ExpertPlexConfig(layout="2P1D1E", moe_timeout_s=5.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a JSON or TOML table"),
        ("[1]", "expected a JSON or TOML table"),
        ('{"layuot": "1P1D1E"}', r"unknown field `layuot`; the options are: layout, "),
        ('{"layout": "1P1D"}', r"expected xPyDzE"),
        ('{"layout": 3}', r"Expected `str`, got `int` - at `\$.layout`"),
        ('{"moe_timeout_s": 0}', r"> 0.*moe_timeout_s"),
        ('{"moe_threads": -1}', r">= 0.*moe_threads"),
        ('{"moe_threads": 1.5}', r"moe_threads"),
        ('{"moe_backend": "gpu"}', r"Invalid enum value 'gpu'.*moe_backend"),
        ('{"moe_scheduling": "lifo"}', r"Invalid enum value 'lifo'.*moe_scheduling"),
        ('{"spin_us": -2}', r">= -1.*spin_us"),
        ('{"kv_lease_s": 0.5}', r">= 1.*kv_lease_s"),
    ],
)
def test_a_wrong_file_is_named_with_what_was_expected(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "wrong.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_config(str(file))
    assert f"--expertplex-config {file}" in str(error.value)


@pytest.mark.parametrize("data", [b"layout = ", b"layout = '\xff'", b"moe_timeout_s = nan"])
def test_a_wrong_toml_file_is_named(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "wrong.toml"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"--expertplex-config {file}: "):
        load_config(str(file))


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_deadlines_are_finite(tmp_path: Path, value: str) -> None:
    for option in ("moe_timeout_s", "heartbeat_timeout_s", "startup_timeout_s", "kv_lease_s"):
        file = tmp_path / "wrong.toml"
        file.write_text(f"{option} = {value}")
        with pytest.raises(ValueError, match=option):
            load_config(str(file))


def test_a_file_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.json: No such file"):
        load_config(str(tmp_path / "missing.json"))
    with pytest.raises(ValueError, match=r"Is a directory; give a readable"):
        load_config(str(tmp_path))


def test_a_wrong_option_on_the_command_line_is_named() -> None:
    with pytest.raises(ValueError, match=r"--expertplex-\* options: .*expected xPyDzE"):
        load_config(None, layout="one of each")


def test_settings_travel_through_vllms_additional_config() -> None:
    settings = ServerSettings(ExpertPlexConfig(layout="1P3D4E"), "decode", 2)
    carried = msgspec.json.decode(msgspec.json.encode(settings.to_additional_config()))
    assert ServerSettings.from_additional_config(carried | {"other": 1}) == settings


@pytest.mark.parametrize("other", [None, {}, {"other": 1}])
def test_plain_vllm_has_no_settings(other: object) -> None:
    assert ServerSettings.from_additional_config(other) is None


def test_settings_hold_nothing_that_differs_between_two_starts() -> None:
    """vLLM hashes them into its compile cache's key."""
    one = ServerSettings(ExpertPlexConfig(), "prefill", 0).to_additional_config()
    two = ServerSettings(ExpertPlexConfig(), "prefill", 0).to_additional_config()
    assert list(one) == [ADDITIONAL_CONFIG_KEY]
    assert one == two


def test_servers_are_not_started_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_RUN_DIR, raising=False)
    with pytest.raises(RuntimeError, match="vllm serve MODEL --executor expertplex"):
        run_dir()
