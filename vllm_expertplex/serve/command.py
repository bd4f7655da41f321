"""`vllm serve MODEL --executor expertplex` or `asyncep`: vLLM's own command around a deployment.

Owns: the command from parsed arguments to exit code. Must not know: requests, tensors.
"""

import argparse
import errno
import gc
import os
import signal
import sys
from typing import NoReturn

from vllm_expertplex.serve import forkserver, options
from vllm_expertplex.serve.run import run_directory
from vllm_expertplex.shapes import fair_share


def serve(args: argparse.Namespace) -> None:
    """Run vLLM's API server over a deployment; when it ends, nothing of it is left.

    Exit code 0 after an orderly stop, 1 when a server could not start or everything's was lost.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand

    from vllm_expertplex.serve import status
    from vllm_expertplex.serve.engines import DeploymentError

    if args.executor == "asyncep":
        from vllm_expertplex.asyncep import options as asyncep_options

        _set_environment(asyncep_options.set_up(args))
    else:
        config = options.check(args)
        options.apply(args, config)
        _set_environment(config.attention_threads or fair_share(config))
    # asyncio would turn a Ctrl-C during start-up into a cancellation that waits until all servers
    # have loaded. vLLM replaces this one once it serves, and SIGTERM's earlier.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    gc.disable()  # imports leave little garbage; looking for it takes a sixth of the start
    try:
        with run_directory() as run_dir:
            forkserver.start(run_dir)
            ServeSubcommand.cmd(args)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except DeploymentError as error:
        _end(str(error))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        _end(f"port {args.port} is in use; choose another with --port")
    if reason := status.failure():
        _end(reason)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end(reason: str) -> NoReturn:
    print(f"vllm serve: error: {reason}", file=sys.stderr)
    raise SystemExit(1)


def _set_environment(threads: int) -> None:
    """What has to be there before an engine starts, because it is read once."""
    from vllm import envs

    os.environ["OMP_NUM_THREADS"] = str(threads)
    # Servers take turns on the cores; pinning each to its own share would leave cores idle.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # torch keeps what it compiles among temporary files, and those end with the run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{envs.VLLM_CACHE_ROOT}/torchinductor")
