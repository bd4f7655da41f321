"""Schedulers that look for fetched KV before they plan a step.

Owns: what vLLM's KV connector has to tell, and failures until vLLM can be told.
Must not know: how KV travels, or what begins once it is here.

vLLM asks the connector while it launches a step and hears the answer with that step's tokens. Where
steps are planned while others run (asynchronous scheduling), a request stands by for one or two
steps meanwhile, with all its KV here. Only an engine that computes in its own process has somebody
to ask; a server of several ranks hears as ever.
"""

from dataclasses import replace
from functools import reduce
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.outputs import KVConnectorOutput


class KVArrivals:
    """In front of one of vLLM's schedulers (v1/core/sched/scheduler.py), made after the worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker: Any = get_kv_transfer_group() if has_kv_transfer_group() else None
        self._untold: list[KVConnectorOutput] = []
        if self._worker is not None:
            # Each result is told once; what a step took would be heard when the step is over.
            self._take_results = self._worker.get_transfer_results
            self._worker.get_transfer_results = lambda _: KVConnectorTransferResults()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._worker is not None:
            self._look()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _look(self) -> None:
        results = self._take_results(set())  # of the requests that have ended NIXL makes no use
        found = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self._worker.get_block_ids_with_load_errors(),
        )
        if found.failed_recving or found.invalid_block_ids:
            # They end requests with an error, which vLLM makes from a step's results. Names and
            # blocks stay together: blocks told later could be another request's by then.
            self._untold.append(found)
        elif not found.is_empty():
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
