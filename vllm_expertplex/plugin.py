"""The entry point vLLM loads in each of its processes.

Owns: the version gate, the CLI options, and putting the seams in place.
Must not know: anything that happens at run time.
"""

import functools
import logging
from typing import Any

SUPPORTED = "0.32."


def vllm_version() -> str:
    from vllm.version import __version__

    return __version__


def unsupported_reason() -> str | None:
    """Why ExpertPlex must not run on the installed vLLM, or None."""
    from vllm_expertplex.executor.patches import remedy

    version = vllm_version()
    if version.startswith(SUPPORTED):
        return None
    return f"vLLM {version} is installed, but ExpertPlex needs {SUPPORTED}x: {remedy()}"


def register() -> None:
    """Called by vLLM (`vllm.general_plugins`) in every process; idempotent.

    On a vLLM that does not fit, plain `vllm serve` is left alone and `--executor expertplex`
    refuses to start with the reason.
    """
    from vllm_expertplex.executor import patches
    from vllm_expertplex.serve import options

    _log_as_vllm_does()
    reason = unsupported_reason()
    if reason is None:
        try:
            _install_seams()
        except patches.PatchError as error:
            reason = str(error)
    options.refuse_start(reason)
    _add_cli_options()


def _log_as_vllm_does() -> None:
    """vLLM sets up its own package's logger only; start-up progress would not be seen."""
    ours, theirs = logging.getLogger("vllm_expertplex"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, theirs.propagate
    ours.setLevel(theirs.level)


def _install_seams() -> None:
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.platforms import current_platform
    from vllm.v1.engine.core_client import EngineCoreClient

    from vllm_expertplex.executor.patches import apply_cpu_fixes, patch

    patch(
        "engine-client",
        EngineCoreClient,
        "make_async_mp_client",
        "vllm_config executor_class log_stats client_addresses client_count client_index renderer",
        _engine_client,
    )
    patch("status-route", entry, "build_app", "args supported_tasks model_config", _status_route)
    if current_platform.is_cpu():
        apply_cpu_fixes()


def _engine_client(original: Any) -> Any:
    @functools.wraps(original)
    def make_async_mp_client(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_expertplex.asyncep.config import AsyncEPSettings
        from vllm_expertplex.config import ServerSettings

        asyncep = AsyncEPSettings.from_additional_config(vllm_config.additional_config)
        if asyncep is not None and asyncep.rank == AsyncEPSettings.FRONT:
            from vllm_expertplex.asyncep.launch import launch as launch_asyncep

            return launch_asyncep(original, asyncep, vllm_config, *args, **kwargs)
        settings = ServerSettings.from_additional_config(vllm_config.additional_config)
        if settings is None or settings.role != ServerSettings.FRONT:
            return original(vllm_config, *args, **kwargs)
        from vllm_expertplex.serve.launch import launch

        return launch(original, settings, vllm_config, *args, **kwargs)

    return make_async_mp_client


def _status_route(original: Any) -> Any:
    @functools.wraps(original)
    def build_app(args: Any, *rest: Any, **kwargs: Any) -> Any:
        app = original(args, *rest, **kwargs)
        executor = getattr(args, "executor", None)
        if executor in ("expertplex", "asyncep"):
            from vllm_expertplex.serve.status import attach

            attach(app)
        if executor == "asyncep":
            from vllm_expertplex.asyncep.endpoint import attach as attach_choose

            attach_choose(app)
        return app

    return build_app


def _add_cli_options() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_expertplex.executor.patches import patch
    from vllm_expertplex.serve.options import add_options

    def add(original: Any) -> Any:
        def add_cli_args(parser: Any) -> Any:
            return add_options(original(parser))

        return add_cli_args

    patch("cli-options", EngineArgs, "add_cli_args", "parser", add)
