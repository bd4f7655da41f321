"""From vLLM's request for an engine-core client to a running AsyncEP deployment.

Owns: starting the engines through vLLM's own factory. Must not know: what engines do.
"""

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig

from vllm_expertplex.asyncep.client import AsyncEPClient
from vllm_expertplex.asyncep.config import AsyncEPSettings
from vllm_expertplex.asyncep.deployment import AsyncEPDeployment
from vllm_expertplex.asyncep.kv_free import refuse_generation
from vllm_expertplex.asyncep.status import AsyncEPReporter
from vllm_expertplex.executor.patches import explain_errors
from vllm_expertplex.serve import status
from vllm_expertplex.serve.engines import adopt


def launch(
    make_async_mp_client: Callable[..., Any],
    settings: AsyncEPSettings,
    vllm_config: VllmConfig,
    executor_class: type,
    log_stats: bool,
    *,
    renderer: Any = None,
    **_single_client: Any,
) -> AsyncEPClient:
    """Start a deployment and return the client in front of it. Raises DeploymentError."""
    deployment = AsyncEPDeployment(vllm_config, settings)

    def make_engine(config: VllmConfig, index: int) -> Any:
        # One client warms the renderer up; which one does not matter.
        mine = renderer if index == 0 else None
        return make_async_mp_client(config, executor_class, log_stats, renderer=mine)

    deployment.start(make_engine)
    adopt(vllm_config, deployment.configs, shown=0)
    client = AsyncEPClient(deployment)
    if settings.config.kv_free:
        refuse_generation()
    explain_errors(client.failures.reason)
    status.publish(AsyncEPReporter(client))
    return client
