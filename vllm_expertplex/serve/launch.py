"""From vLLM's request for an engine-core client to a running deployment.

Owns: starting the engines through vLLM's own factory. Must not know: what engines do.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from vllm_expertplex.client.core_client import ExpertPlexClient
from vllm_expertplex.config import ServerSettings
from vllm_expertplex.executor.patches import explain_errors
from vllm_expertplex.serve import status
from vllm_expertplex.serve.deployment import Deployment
from vllm_expertplex.serve.engines import DeploymentError, adopt


def launch(
    make_async_mp_client: Callable[..., Any],
    settings: ServerSettings,
    vllm_config: VllmConfig,
    executor_class: type,
    log_stats: bool,
    *,
    renderer: Any = None,
    **_single_client: Any,
) -> ExpertPlexClient:
    """Start a deployment and return the client in front of it. Raises DeploymentError."""
    try:
        deployment = Deployment(vllm_config, settings)
    except (ValueError, RuntimeError) as error:
        # The model and the layout, or this machine's memory, do not fit: a word, not a traceback.
        raise DeploymentError(str(error)) from error

    def make_engine(config: VllmConfig, first_decode: bool) -> Any:
        # One client warms the renderer up; which one does not matter.
        mine = renderer if first_decode else None
        return make_async_mp_client(config, executor_class, log_stats, renderer=mine)

    deployment.start(make_engine)
    fits = adopt(vllm_config, deployment.configs, shown=deployment.layout.prefill)
    client = ExpertPlexClient(deployment, fits)
    explain_errors(client.table.failures.reason)
    status.publish(status.ExpertPlexReporter(client))
    return client
