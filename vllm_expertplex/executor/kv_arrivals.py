"""Schedulers that look for fetched KV before they plan a step.

Owns: asking vLLM's KV connector, and failures until vLLM can be told.
Must not know: how KV travels, or what begins once it is here.

vLLM asks while it launches a step and hears the answer with that step's tokens. Where steps are
planned while others run (asynchronous scheduling), a request stands by for two steps meanwhile,
with all its KV here. Only an engine that computes in its own process has somebody to ask; a server
of several ranks hears as ever.
"""

from dataclasses import replace
from functools import reduce
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.outputs import KVConnectorOutput


class KVArrivals:
    """In front of one of vLLM's schedulers (v1/core/sched/scheduler.py)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._untold: list[KVConnectorOutput] = []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.kv_holding_waiting and has_kv_transfer_group():  # type: ignore[attr-defined]
            self._look(get_kv_transfer_group())
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _look(self, connector: Any) -> None:
        results = connector.get_transfer_results(set())
        found = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
        )
        if found.failed_recving or found.invalid_block_ids:
            # They end requests with an error, which vLLM makes from a step's results. Names and
            # blocks stay together: blocks told later could be another request's by then.
            self._untold.append(found)
        else:
            self._update_from_kv_xfer_finished(found)  # type: ignore[attr-defined]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self._untold:
            of_step = model_runner_output.kv_connector_output or KVConnectorOutput()
            told = reduce(_merged, self._untold, of_step)
            model_runner_output = replace(model_runner_output, kv_connector_output=told)
            self._untold.clear()
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]


def _merged(one: KVConnectorOutput, other: KVConnectorOutput) -> KVConnectorOutput:
    return replace(
        one,
        finished_sending=(one.finished_sending or set()) | (other.finished_sending or set()),
        finished_recving=(one.finished_recving or set()) | (other.finished_recving or set()),
        failed_recving=one.failed_recving | other.failed_recving,
        invalid_block_ids=one.invalid_block_ids | other.invalid_block_ids,
    )
