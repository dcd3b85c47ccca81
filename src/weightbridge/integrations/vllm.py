"""vLLM engines as rollout workers. Two ways in; both keep to what docs/guides/vllm.md says.

The backend, one line and some environment variables, for the offline engine and for `vllm serve`:

    LLM(model, weight_transfer_config=WeightTransferConfig(backend="weightbridge"))

It is registered by the entry points in `weightbridge.integrations.vllm_plugin`, which vLLM finds by itself. And the worker
extension, for those who drive an engine by RPC and want nothing but its workers touched:

    LLM(model, worker_extension_cls="weightbridge.integrations.vllm.WorkerExtension")
    llm.collective_rpc("weightbridge_join", kwargs={"endpoint": ..., "engine": "a", "checkpoint": folder})

From then on each worker polls before every step of the engine, and takes a new version in between two steps. An engine that
has no requests makes no steps: call `llm.collective_rpc("weightbridge_poll")` while it idles.
"""

from __future__ import annotations

from typing import Any

from weightbridge.integrations import vllm_seat
from weightbridge.integrations.vllm_seat import JoinSettings
from weightbridge.integrations.vllm_weights import EngineWeights

__all__ = ["EngineWeights", "JoinSettings", "WorkerExtension"]


class WorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; each method is called by `collective_rpc`, on every worker.

    Every method returns a status and raises nothing: an exception in a worker's RPC leaves stale answers behind. The status
    is a dict: ok, error (text, empty when ok), state and version (of the receiver), updated (a version was installed),
    requested (polls are waited for).
    """

    def weightbridge_join(
        self, endpoint: str, engine: str, checkpoint: str = "", node: str = "", options: dict[str, Any] | None = None,
        poll_in_steps: bool = True, token: str = "",
    ) -> dict[str, Any]:  # fmt: skip
        """Join a session in the background. Call it while the engine has no requests.

        endpoint, engine, node: as for ReceiverAdapter. checkpoint: a folder with the spec of what trainers send, default the
        engine's own. options: fields of Options. poll_in_steps: poll before every step; else only in weightbridge_poll.
        """
        settings = JoinSettings(
            endpoint=endpoint, engine=engine, checkpoint=checkpoint, node=node, token=token, options=options or {}
        )
        return vllm_seat.status(self, lambda: _join(self, settings, poll_in_steps))

    def weightbridge_poll(self) -> dict[str, Any]:
        """One poll between two steps: what an engine without requests calls, now and then. Blocks while it is updated."""
        return vllm_seat.status(self, lambda: vllm_seat.poll(self))

    def weightbridge_status(self) -> dict[str, Any]:
        """The status alone: no poll, nothing waits."""
        return vllm_seat.status(self)

    def weightbridge_leave(self) -> dict[str, Any]:
        """Leave the session; the engine serves on with the weights it has."""
        return vllm_seat.status(self, lambda: vllm_seat.leave(self))


def _join(worker: Any, settings: JoinSettings, poll_in_steps: bool) -> None:
    seat = vllm_seat.join(worker, settings)
    if poll_in_steps and not seat.polls_in_steps:
        seat.polls_in_steps = True
        execute_model = worker.execute_model

        def polling(*args: Any, **kwargs: Any) -> Any:
            seat.poll(worker)
            return execute_model(*args, **kwargs)

        worker.execute_model = polling
