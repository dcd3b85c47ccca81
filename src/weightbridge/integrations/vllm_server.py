"""Which weights made a completion, told by vLLM's OpenAI-compatible server.

vLLM counts the versions of every completion and leaves them out of the OpenAI endpoints' answers. With the endpoint plugin
`weightbridge` (start the server with VLLM_PLUGINS=weightbridge) they are told in three ways:

    x-weight-versions: 3            a header of every answer that is not streamed; more than one version means mixed
    : x-weight-versions: 3, 4       a comment, the last line of every stream of server-sent events
    GET /weightbridge/completions/ID    spans of tokens and their versions, choice by choice, by the answer's `id`

    GET /weightbridge/status        the version that is served now
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from importlib import import_module
from typing import Any

__all__ = ["CompletionVersions"]

_KEPT = 20_000  # answers whose spans can be asked for
_HEADER = "x-weight-versions"
_Message = MutableMapping[str, Any]
# What the request that is being answered was made of, in order; each HTTP request has a list of its own.
_seen: ContextVar[list[str] | None] = ContextVar("weightbridge_versions", default=None)


class CompletionVersions:
    """An endpoint plugin of vLLM. Runs in the event loop of the API server; each server process knows its own answers."""

    name = "weightbridge"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        # id of an answer -> (prompt, choice) -> spans
        self._spans: OrderedDict[str, dict[tuple[int, int], list[dict[str, Any]]]] = OrderedDict()
        self._engine: Any = None

    def attach_router(self, app: Any) -> None:
        """Called by vLLM while it builds its app."""
        app.add_middleware(_Stamp)
        app.add_api_route("/weightbridge/status", self._status, methods=["GET"])
        app.add_api_route("/weightbridge/completions/{completion_id}", self._completion, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called by vLLM when there is an engine; from here on its answers are looked at."""
        self._engine = engine_client
        generate = engine_client.generate

        async def watched(
            prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
        ) -> AsyncIterator[Any]:
            async with aclosing(generate(prompt, sampling_params, request_id, *args, **kwargs)) as outputs:
                async for output in outputs:
                    self._note(request_id, output)
                    yield output

        engine_client.generate = watched

    def _note(self, request_id: str, output: Any) -> None:
        for choice in output.outputs:
            spans = choice.weight_versions
            if spans is None:  # not its last part
                continue
            name, prompt = _answer_of(request_id)
            found = [{"version": s.version, "start": s.start, "end": s.end} for s in spans]
            self._spans.setdefault(name, {})[prompt, choice.index] = found
            while len(self._spans) > _KEPT:
                self._spans.popitem(last=False)
            seen = _seen.get()
            if seen is not None:
                seen.extend(v for v in dict.fromkeys(s["version"] for s in found) if v not in seen)

    async def _status(self) -> dict[str, Any]:
        return {"version": await self._engine.get_weight_version()}

    async def _completion(self, completion_id: str) -> dict[str, Any]:
        choices = self._spans.get(completion_id)
        if choices is None:
            text = f"no completion {completion_id!r} among the last {_KEPT} of this process"
            raise import_module("fastapi").HTTPException(404, text)
        versions = {span["version"] for spans in choices.values() for span in spans}
        return {
            "id": completion_id,
            "mixed": len(versions) > 1,
            "choices": [{"index": index, "weight_versions": choices[key]} for index, key in enumerate(sorted(choices))],
        }


def _answer_of(request_id: str) -> tuple[str, int]:
    """The answer's id and the number of the prompt in it: /v1/completions makes a request of each prompt, ID-NUMBER."""
    name, _, number = request_id.rpartition("-")
    return (name, int(number)) if name.startswith("cmpl-") and number.isdigit() else (request_id, 0)


class _Stamp:
    """ASGI middleware: says at the end of an answer what it was made of, or at its beginning if all is known by then."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Message, receive: Any, send: Callable[[_Message], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen: list[str] = []
        is_stream = False

        async def stamped(message: _Message) -> None:
            nonlocal is_stream
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                is_stream = any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
                if seen and not is_stream:
                    message["headers"] = [*headers, (_HEADER.encode(), ", ".join(seen).encode())]
            elif is_stream and seen and not message.get("more_body", False):
                comment = f": {_HEADER}: {', '.join(seen)}\n\n".encode()
                message["body"] = bytes(message.get("body", b"")) + comment
            await send(message)

        token = _seen.set(seen)
        try:
            await self._app(scope, receive, stamped)
        finally:
            _seen.reset(token)
