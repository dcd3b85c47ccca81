"""What vLLM finds by entry point: the backend `weightbridge`, and the routes of its server.

    vllm.general_plugins    weightbridge = weightbridge.integrations.vllm_plugin:register
    vllm.endpoint_plugins   weightbridge = weightbridge.integrations.vllm_server:CompletionVersions

vLLM loads the first in every process of every engine, whether it uses the backend or not; so this module imports nothing but
what it needs to register. The second is loaded where VLLM_PLUGINS names it.
"""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

__all__ = ["BACKEND", "register"]

BACKEND = "weightbridge"


def register() -> None:
    """Make the backend known to this process, and attach to the engine core if one starts here. Safe to call again.

    A vLLM without a place for it is left alone: its engines are none of ours until one asks for the backend.
    """
    try:
        factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        engine_core = import_module("vllm.v1.engine.core").EngineCore
        known = factory._registry
        # Workers exist and are warm when this returns, and no request has come; vLLM offers no hook there.
        start = engine_core._initialize_kv_caches
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.weightbridge").warning(
            "this version of vLLM has no place for the backend weightbridge (%s); see its guide for those that have",
            error,
        )
        return
    if BACKEND not in known:
        factory.register_engine(BACKEND, "weightbridge.integrations.vllm_backend", "WeightBridgeBackend")
    if hasattr(start, "_weightbridge"):
        return

    @functools.wraps(start)
    def starting(core: Any, vllm_config: Any) -> Any:
        caches = start(core, vllm_config)
        transfer = vllm_config.weight_transfer_config
        if transfer is not None and transfer.backend == BACKEND:
            import_module("weightbridge.integrations.vllm_core").attach(core)
        return caches

    starting._weightbridge = True  # type: ignore[attr-defined]
    engine_core._initialize_kv_caches = starting
