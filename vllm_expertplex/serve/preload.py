"""What every server of a deployment imports, for the process they are forked from.

Owns: the list of imports. Must not know: anything that happens after them. No import here may
start a thread that takes locks, use a device or run a parallel tensor operation: none of it
survives a fork.
"""
# ruff: noqa: E402

import gc

gc.disable()  # nothing becomes garbage here, and looking for it takes a sixth of the time

import vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker
import vllm.model_executor.layers.fused_moe
import vllm.model_executor.model_loader
import vllm.v1.engine.core
import vllm.v1.engine.utils  # noqa: F401
from vllm.platforms import current_platform

import vllm_expertplex.executor.executor
import vllm_expertplex.executor.kv_rows
import vllm_expertplex.executor.scheduler
import vllm_expertplex.moe_server.server

if current_platform.is_cpu():
    import vllm_expertplex.executor.cpu_worker
else:
    import vllm_expertplex.executor.gpu_worker  # noqa: F401

gc.freeze()  # nor do servers look through what they share
gc.enable()
