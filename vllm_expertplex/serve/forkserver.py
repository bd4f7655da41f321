"""One process imports vLLM once; every server of the deployment is forked from it.

Owns: starting that process, and making vLLM start its engines from it. Must not know: servers.

Importing vLLM takes seconds of a core, and a deployment has at least three servers. Python's own
fork server imports `serve/preload.py` while the serve command is still reading the model's
configuration; forking it later takes milliseconds, and servers share the imported code's memory.
"""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

PRELOAD = "vllm_expertplex.serve.preload"


def start(run_dir: Path) -> None:
    """Begin importing. The environment of all servers is this process's, as of now."""
    # Sockets go there too; multiprocessing would make a directory of its own and miss it later.
    multiprocessing.current_process()._config["tempdir"] = str(run_dir)  # type: ignore[attr-defined]
    context().set_forkserver_preload([PRELOAD])
    forkserver.ensure_running()


def context() -> BaseContext:
    """What servers are started with."""
    return multiprocessing.get_context("forkserver")


def use_for_engines() -> None:
    """Make vLLM start engine processes from the fork server too; its environment variable for the
    start method knows only fork and spawn.
    """
    import vllm.v1.engine.utils as engine_utils

    from vllm_expertplex.executor.patches import patch

    def ours(original: Any) -> Any:
        def get_mp_context() -> BaseContext:
            return context()

        return get_mp_context

    patch("forkserver", engine_utils, "get_mp_context", "", ours)
