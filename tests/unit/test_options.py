"""The command line: our options, and every refusal by name before anything starts."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.core_client import EngineCoreClient

from vllm_expertplex import plugin
from vllm_expertplex.config import ADDITIONAL_CONFIG_KEY, ExpertPlexConfig
from vllm_expertplex.executor import patches
from vllm_expertplex.executor.executor import EXECUTOR, TP_EXECUTOR
from vllm_expertplex.executor.loader import LOAD_FORMAT
from vllm_expertplex.planner.plan import make_plan, read_plan, write_plan
from vllm_expertplex.planner.search import search
from vllm_expertplex.planner.setup import setting
from vllm_expertplex.serve import options
from vllm_expertplex.serve.command import serve

EXECUTOR_GIVEN = ["--executor", "expertplex"]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """vLLM's parser of `vllm serve`, which loads the plugin."""
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def parse(parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch) -> Parse:
    for name in options._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)

    def parse(*arguments: str) -> argparse.Namespace:
        return parser.parse_args(["model", *arguments])

    return parse


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[argparse.Namespace], str]:
    """The one line with which a command line is refused."""

    def refused(args: argparse.Namespace) -> str:
        with pytest.raises(SystemExit) as end:
            options.check(args)
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("vllm serve: error: ")
        return line

    return refused


def test_help_shows_our_options_in_their_own_group(
    parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = (g for g in parser._action_groups if g.title == "ExpertPlex")
    ours = {option for action in group._group_actions for option in action.option_strings}
    own = ("layout", "config", "plan", "trace")
    named = {"--executor", *(f"--expertplex-{name}" for name in own)}
    assert ours == named
    monkeypatch.setattr(parser, "_search_keyword", "all")
    text = parser.format_help()
    assert all(option in text for option in named)
    # The options of the file are listed where a person looks for them.
    flat = " ".join(text.split()).replace("- ", "-")
    assert all(option in flat for option in ExpertPlexConfig.__struct_fields__)


def test_plain_vllm_is_left_alone(parse: Parse) -> None:
    args = parse()
    assert args.executor == "default"
    assert not hasattr(args, "dispatch_function")
    assert not hasattr(parse("--executor", "default"), "dispatch_function")


def test_defaults(parse: Parse) -> None:
    args = parse(*EXECUTOR_GIVEN)
    assert args.dispatch_function is serve
    assert options.check(args) == ExpertPlexConfig()


def test_options_and_file_reach_the_configuration(parse: Parse, tmp_path: Any) -> None:
    file = tmp_path / "c.toml"
    file.write_text('layout = "1P1D2E"\nmoe_timeout_s = 7')
    given = ("--expertplex-config", str(file), "--expertplex-layout", "2P1D1E")
    config = options.check(parse(*EXECUTOR_GIVEN, *given))
    assert config == ExpertPlexConfig(layout="2P1D1E", moe_timeout_s=7.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--expertplex-layout", "1P1D"], "layout '1P1D': expected xPyDzE"),
        (["--expertplex-layout", "1P1D0E"], "every role needs at least one server"),
        (["--expertplex-config", "/no/such/file"], "/no/such/file: No such file"),
        (["--expertplex-trace", "/no/such/folder/t.json"], "/no/such/folder is no directory"),
    ],
)
def test_wrong_values_are_refused(
    parse: Parse, refused: Callable[..., str], arguments: list[str], message: str
) -> None:
    assert message in refused(parse(*EXECUTOR_GIVEN, *arguments))


@pytest.mark.parametrize("option", ["layout", "config", "trace"])
def test_our_options_need_the_executor(
    parse: Parse, refused: Callable[..., str], option: str
) -> None:
    args = parse(f"--expertplex-{option}", "1P1D1E")
    assert args.dispatch_function is serve
    assert "need --executor expertplex" in refused(args)


def test_other_commands_refuse_our_options(capsys: pytest.CaptureFixture[str]) -> None:
    other = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm bench latency"))
    with pytest.raises(SystemExit):
        other.parse_args(EXECUTOR_GIVEN)
    assert "--executor works with `vllm serve` only" in capsys.readouterr().err


# -- what of vLLM's is refused -------------------------------------------------------------------

# Where a value that is refused is not simply 2, or the flag itself.
VALUES = {
    "--distributed-executor-backend": "mp",
    "--worker-cls": "some.Worker",
    "--scheduler-cls": "some.Scheduler",
    "--kv-transfer-config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    "--kv-events-config": '{"enable_kv_cache_events": true}',
    "--speculative-config": '{"method": "ngram", "num_speculative_tokens": 2}',
    "--runner": "pooling",
    "--load-format": "tensorizer",
    "--data-parallel-rank": "0",
    "--device-ids": "1",
    "--weight-transfer-config": '{"backend": "nccl"}',
}


def action_of(parser: FlexibleArgumentParser, option: str) -> argparse.Action | None:
    return parser._option_string_actions.get(option)


@pytest.mark.parametrize("refusal", options.REFUSALS, ids=lambda r: r.option)
def test_every_refusal_names_an_option_that_vllm_has(
    parser: FlexibleArgumentParser,
    parse: Parse,
    refused: Callable[..., str],
    refusal: options.Refusal,
) -> None:
    action = action_of(parser, refusal.option)
    assert action is not None, "vLLM renamed it: what is refused now goes through"
    assert action.dest == refusal.attribute
    assert not refusal.unsupported(parser.get_default(refusal.attribute)), "its default"
    value = [] if action.nargs == 0 else [VALUES.get(refusal.option, "2")]
    line = refused(parse(*EXECUTOR_GIVEN, refusal.option, *value))
    assert refusal.option in line
    assert line.endswith(refusal.instead)


@pytest.mark.parametrize("name", options._ENVIRONMENT)
def test_environment_that_cannot_work_is_refused(
    parse: Parse, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import vllm.envs

    assert name in vllm.envs.environment_variables
    args = parse(*EXECUTOR_GIVEN)
    monkeypatch.setenv(name, options._ENVIRONMENT[name])
    assert f"{name}={options._ENVIRONMENT[name]}" in refused(args)


@pytest.fixture
def _refusal_restored() -> Iterator[None]:
    before = options._refusal
    yield
    options.refuse_start(before)


@pytest.mark.usefixtures("_refusal_restored")
def test_an_unsupported_vllm_refuses_to_start(parse: Parse, refused: Callable[..., str]) -> None:
    options.refuse_start("vLLM 0.99 is installed")
    assert "vLLM 0.99 is installed" in refused(parse(*EXECUTOR_GIVEN))


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch, _refusal_restored: None) -> None:
    """As before the plugin was loaded; whatever it patches is put back."""
    monkeypatch.setattr(patches, "_applied", set())
    monkeypatch.setattr(EngineArgs, "add_cli_args", staticmethod(lambda parser: parser))


@pytest.mark.usefixtures("unregistered")
def test_registration_records_an_unsupported_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.33.0")
    plugin.register()
    assert "vLLM 0.33.0 is installed, but ExpertPlex needs 0.32.x" in str(options._refusal)
    assert patches._applied == {"cli-options"}, "plain vLLM is left as it is"


@pytest.mark.usefixtures("unregistered")
def test_registration_records_a_patch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = staticmethod(lambda vllm_config: None)
    monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", renamed)
    plugin.register()
    expected = "patch 'engine-client': EngineCoreClient.make_async_mp_client takes (vllm_config),"
    assert str(options._refusal).startswith(expected)


# -- what is set for vLLM --------------------------------------------------------------------------


def test_a_deployment_is_set_up_and_the_users_choices_stay(parse: Parse) -> None:
    args = parse(*EXECUTOR_GIVEN, "--additional-config", '{"mine": 1}', "--max-num-seqs", "7")
    options.apply(args, ExpertPlexConfig(layout="1P2D1E"))
    assert args.distributed_executor_backend == EXECUTOR
    assert args.load_format == LOAD_FORMAT
    assert args.kv_transfer_config.kv_role == "kv_consumer"
    assert args.additional_config["mine"] == 1
    assert args.additional_config[ADDITIONAL_CONFIG_KEY]["config"]["layout"] == "1P2D1E"
    assert args.max_num_seqs == 7
    assert args.enforce_eager


@pytest.mark.parametrize("in_file", [False, True])
def test_tensor_parallel_attention_is_asked_for_as_of_vllm_or_in_the_file(
    parse: Parse, tmp_path: Path, in_file: bool
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("tensor_parallel_size = 2")
    given = ["--expertplex-config", str(file)] if in_file else ["--tensor-parallel-size", "2"]
    args = parse(*EXECUTOR_GIVEN, *given)
    config = options.check(args)
    options.apply(args, config)
    assert config.tensor_parallel_size == args.tensor_parallel_size == 2
    assert args.distributed_executor_backend == TP_EXECUTOR


def test_images_go_to_every_engine_whole(parse: Parse) -> None:
    """vLLM leaves out what it has sent before, but here to one of several engines."""
    args = parse(*EXECUTOR_GIVEN)
    assert args.mm_processor_cache_gb > 0
    options.apply(args, ExpertPlexConfig())
    assert args.mm_processor_cache_gb == 0


def test_a_trace_that_nobody_would_write_is_refused(
    parse: Parse,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given = [*EXECUTOR_GIVEN, "--expertplex-trace", str(tmp_path / "t.json")]
    config = options.check(parse(*given))
    file = tmp_path / "c.toml"
    file.write_text('moe_backend = "torch"')
    assert "moe_backend torch" in refused(parse(*given, "--expertplex-config", str(file)))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(SystemExit):
        options.apply(parse(*given), config)
    assert "--expertplex-trace" in capsys.readouterr().err


def test_whoever_asks_for_compilation_gets_it(parse: Parse) -> None:
    args = parse(*EXECUTOR_GIVEN, "--compilation-config", '{"mode": 3}')
    assert args.compilation_config != CompilationConfig()
    options.apply(args, ExpertPlexConfig())
    assert not args.enforce_eager


def test_kv_memory_is_shared_by_the_attention_servers(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    sizes = []
    for layout in ("1P1D1E", "4P4D1E", "40P40D1E"):
        args = parse(*EXECUTOR_GIVEN)
        options.apply(args, ExpertPlexConfig(layout=layout))
        sizes.append(args.kv_cache_memory_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] > 0
    args = parse(*EXECUTOR_GIVEN, "--kv-cache-memory-bytes", "1000000")
    options.apply(args, ExpertPlexConfig())
    assert args.kv_cache_memory_bytes == 1_000_000


def _plan_file(folder: Path, **changes: Any) -> str:
    """A plan of the planner's own for one 80 GB node, changed as told."""
    given = setting("minimax-m2.7", "h800", "sharegpt", 1.0, 0.05)
    space = given.space(8, "free")
    best = search(given.problem(8), space)
    assert best is not None
    plan = msgspec.structs.replace(make_plan(given, 8, "free", best), **changes)
    write_plan(plan, str(folder / "plan.json"))
    return str(folder / "plan.json")


def test_a_plan_sets_layout_and_limits(parse: Parse, tmp_path: Path) -> None:
    plan = _plan_file(tmp_path)
    args = parse(*EXECUTOR_GIVEN, "--expertplex-plan", plan, "--max-num-seqs", "7")
    written = read_plan(plan)
    config = options.check(args)
    assert config.layout == written.layout
    assert config.decode_sms == written.decode_sms
    assert config.expected_x_moe >= written.expects["x_moe"]
    assert args.max_num_batched_tokens == written.max_prefill_tokens
    assert args.max_num_seqs == 7  # what the user set stays


def test_a_plan_of_shared_gpus_sets_their_shares(parse: Parse, tmp_path: Path) -> None:
    given = [*EXECUTOR_GIVEN, "--expertplex-plan"]
    plan = _plan_file(tmp_path, layout="2P1D2E", moe_sm_percent=45, prefill_sm_percent=70)
    config = options.check(parse(*given, plan))
    assert (config.moe_sm_percent, config.prefill_sm_percent) == (45, 70)
    own = options.check(parse(*given, _plan_file(tmp_path)))
    default = ExpertPlexConfig()
    assert own.moe_sm_percent == default.moe_sm_percent
    assert own.prefill_sm_percent == default.prefill_sm_percent


@pytest.mark.parametrize(("overlap", "tokens"), [("tbo", 2048), ("none", 0), ("sbo", 0)])
def test_a_plan_says_whether_steps_are_cut_in_two(
    parse: Parse, tmp_path: Path, overlap: str, tokens: int
) -> None:
    prefill = msgspec.structs.replace(read_plan(_plan_file(tmp_path)).prefill, overlap=overlap)
    plan = _plan_file(tmp_path, prefill=prefill, max_prefill_tokens=4096)
    assert options.check(parse(*EXECUTOR_GIVEN, "--expertplex-plan", plan)).tbo_tokens == tokens


def test_a_plan_says_how_many_ranks_share_attention(parse: Parse, tmp_path: Path) -> None:
    pool = msgspec.structs.replace(read_plan(_plan_file(tmp_path)).decode, tensor_parallel=2)
    plan = _plan_file(tmp_path, prefill=pool, decode=pool, layout="2P4D2E")
    config = options.check(parse(*EXECUTOR_GIVEN, "--expertplex-plan", plan))
    assert config.tensor_parallel_size == 2
    assert config.layout == "1P2D2E"  # a plan's are GPUs, two for each server


def test_a_plan_leaves_to_vllm_what_it_would_break(parse: Parse, tmp_path: Path) -> None:
    given = [*EXECUTOR_GIVEN, "--expertplex-plan", _plan_file(tmp_path, max_decode_batch=64)]
    args = parse(*given, "--no-enable-chunked-prefill")
    options.check(args)
    assert args.max_num_batched_tokens is None  # a step has to hold the longest prompt
    args = parse(*given, "--max-num-batched-tokens", "32")
    options.check(args)
    assert args.max_num_seqs == 32


def test_a_plan_that_cannot_be_run_is_refused(
    parse: Parse, refused: Callable[..., str], tmp_path: Path
) -> None:
    several = _plan_file(tmp_path, copies=3)
    given = [*EXECUTOR_GIVEN, "--expertplex-plan"]
    assert "3 deployments" in refused(parse(*given, several))
    (tmp_path / "layout.json").write_text('{"layout": "1P1D1E"}')
    (tmp_path / "ranks.json").write_text('{"tensor_parallel_size": 8}')
    for option in (
        ("--expertplex-layout", "1P1D1E"),
        ("--tensor-parallel-size", "8"),
        ("--expertplex-config", str(tmp_path / "layout.json")),
        ("--expertplex-config", str(tmp_path / "ranks.json")),
    ):
        assert "not both" in refused(parse(*given, _plan_file(tmp_path), *option))
    pair = [msgspec.structs.replace(read_plan(several).decode, tensor_parallel=n) for n in (2, 4)]
    unequal = _plan_file(tmp_path, prefill=pair[0], decode=pair[1])
    assert "2 in prefill and 4 in decode" in refused(parse(*given, unequal))
    assert "No such file" in refused(parse(*given, str(tmp_path / "none.json")))
