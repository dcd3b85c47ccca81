"""What vLLM's server says of the versions of its answers, with an engine and endpoints that are made up here. Seconds.

A real server is in test_vllm_engines.py; this is for answers of several choices and prompts. Run by `make test-vllm`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment: make test-vllm", allow_module_level=True)

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.testclient import TestClient
from vllm.outputs import WeightVersionSpan
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

from weightbridge.integrations import vllm_server
from weightbridge.integrations.vllm_server import CompletionVersions

SPANS = {
    "cmpl-a-7-0": [[("1", 0, 4)], [("1", 0, 2), ("2", 2, 9)]],  # two choices
    "cmpl-a-7-1": [[("2", 0, 3)], [("2", 0, 5)]],
    "chatcmpl-b-3": [[("2", 0, 3)]],
}


class Engine:
    """Gives each request a part without an end, and then one that ends every choice."""

    closed = 0

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0) -> Any:
        try:
            for ends in (False, True):
                yield SimpleNamespace(
                    outputs=[
                        SimpleNamespace(
                            index=index,
                            weight_versions=[WeightVersionSpan(*s) for s in spans] if ends else None,
                        )
                        for index, spans in enumerate(SPANS[request_id])
                    ]
                )
        finally:
            Engine.closed += 1

    async def get_weight_version(self) -> str:
        return "2"


@pytest.fixture
def client() -> TestClient:
    engine, plugin, app = Engine(), CompletionVersions(), FastAPI()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, None))

    @app.post("/whole")
    async def whole() -> Any:
        for request_id in ("cmpl-a-7-0", "cmpl-a-7-1"):
            async for _ in engine.generate("", None, request_id=request_id, priority=1):
                pass
        return JSONResponse({"id": "cmpl-a-7"})

    @app.post("/stream")
    async def stream() -> Any:
        async def events() -> AsyncIterator[str]:
            async for _ in engine.generate("", None, "chatcmpl-b-3"):
                yield "data: {}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return TestClient(app)


def test_choices_of_several_prompts_are_told_apart(client: TestClient) -> None:
    answer = client.post("/whole")
    assert answer.headers["x-weight-versions"] == "1, 2"
    told = client.get("/weightbridge/completions/cmpl-a-7").json()
    assert told["mixed"]
    spans = [[(s["version"], s["start"], s["end"]) for s in c["weight_versions"]] for c in told["choices"]]
    assert spans == SPANS["cmpl-a-7-0"] + SPANS["cmpl-a-7-1"]
    assert [c["index"] for c in told["choices"]] == [0, 1, 2, 3]


def test_a_stream_says_it_at_its_end(client: TestClient) -> None:
    answer = client.post("/stream")
    assert "x-weight-versions" not in answer.headers
    assert answer.text == "data: {}\n\ndata: {}\n\ndata: [DONE]\n\n: x-weight-versions: 2\n\n"
    told = client.get("/weightbridge/completions/chatcmpl-b-3").json()
    assert not told["mixed"]
    assert told["id"] == "chatcmpl-b-3"


def test_one_request_is_not_told_of_another(client: TestClient) -> None:
    client.post("/whole")
    assert client.post("/stream").text.endswith(": x-weight-versions: 2\n\n")
    assert "x-weight-versions" not in client.get("/weightbridge/status").headers
    assert client.get("/weightbridge/status").json() == {"version": "2"}


def test_an_unknown_answer_and_one_that_is_too_old(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/weightbridge/completions/nobody").status_code == 404
    monkeypatch.setattr(vllm_server, "_KEPT", 1)
    client.post("/whole")
    client.post("/stream")
    assert client.get("/weightbridge/completions/cmpl-a-7").status_code == 404
    assert client.get("/weightbridge/completions/chatcmpl-b-3").status_code == 200


def test_who_stops_listening_ends_the_request() -> None:
    async def first_only() -> int:
        engine, before = Engine(), Engine.closed
        await CompletionVersions().init_state(engine, None, None)
        listening = engine.generate("", None, "chatcmpl-b-3")
        await anext(listening)
        await listening.aclose()
        return Engine.closed - before

    assert asyncio.run(first_only()) == 1
