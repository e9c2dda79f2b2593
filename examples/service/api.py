"""HTTP interface: OpenAI's completions and chat API, a page to chat, and endpoints for operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from examples.service.completion import Answer, ChatBody, ChatForm, CompletionBody, CompletionForm, Form, whole_answer
from examples.service.decode import DecodeWorker, Generation
from tidekv import CapacityError, EngineClosed, InvalidConfig, InvalidRequest, RequestFailed, StorageFailed, TidekvError

RETRY_AFTER_S = 1
COMPLETION_MAX_TOKENS = 16  # That of OpenAI.
CHAT_MAX_TOKENS = 512
CHAT_PAGE = Path(__file__).with_name("chat.html")
STATUS_PAGE = Path(__file__).with_name("status.html")
BODY_BYTES_MAX = 4 * 1024 * 1024
"""Maximum bytes of a request's body: a prompt of a million token ids fits."""
T = TypeVar("T")
B = TypeVar("B")


class FlushBody(msgspec.Struct, frozen=True):
    """Tiers to empty: "l1", "l2", "l3"; of one namespace only, if it is given."""

    tiers: list[str]
    namespace: str | None = None


class StorageBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether to use the storage that the service was started with."""

    attached: bool


class RequestBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to change of a request that waits; see `DecodeEngine.change_request`."""

    priority: int | None = None
    deadline_s: float | None = None


class Api:
    """The routes of one decode worker."""

    def __init__(self, worker: DecodeWorker, *, storage: str = "") -> None:
        """`storage`: URI that the service was started with. Clients reach these routes too, so they name no other."""
        self._worker = worker
        self._storage = storage
        self._started_at = int(time.time())

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
                Route("/health", self.health),
                Route("/requests", self.requests),
                Route("/requests/{request_id}", self.change_request, methods=["POST"]),
                Route("/policy", self.policy),
                Route("/policy", self.change_policy, methods=["POST"]),
                Route("/storage", self.exchange_storage, methods=["POST"]),
                Route("/flush", self.flush, methods=["POST"]),
                Route("/look_up", self.look_up, methods=["POST"]),
                Route("/hints", self.hints, methods=["POST"]),
                Route("/status", self.status_page),
                Route("/", self.chat_page),
            ]
        )

    # --- Completions ---

    async def completions(self, request: Request) -> Response | EventStream:
        """Answer one or several prompts, as one response or as a stream of events."""
        return await self._answer(request, CompletionBody, CompletionForm(), COMPLETION_MAX_TOKENS)

    async def chat_completions(self, request: Request) -> Response | EventStream:
        """Answer the last message of a conversation, as one response or as a stream of events."""
        return await self._answer(request, ChatBody, ChatForm(), CHAT_MAX_TOKENS)

    async def _answer(
        self, request: Request, kind: type[CompletionBody | ChatBody], form: Form, default_max_tokens: int
    ) -> Response | EventStream:
        worker = self._worker
        if worker.is_draining or not worker.engine.is_running:
            return _refusal(503, "the service is shutting down", "unavailable")
        generations: list[Generation] = []
        is_streamed = False
        try:
            body = msgspec.json.decode(await _body_of(request), type=kind)
            # `extend` keeps what was started before a later prompt is refused; it is cancelled below.
            generations.extend(body.start(worker, default_max_tokens))
            answers = [Answer(generation, worker, form, index) for index, generation in enumerate(generations)]
            if body.stream:
                usage = body.stream_options is not None and body.stream_options.include_usage
                events = answers[0].events(with_usage=usage)
                # Awaited here, so that an error before the first token still gets its own HTTP status.
                first = await _unless_disconnected(request.receive, anext(events))
                is_streamed = True
                return EventStream(first, events, generations[0])
            await _unless_disconnected(request.receive, _all_of(answers))
            return JSONResponse(whole_answer(answers))
        except (TidekvError, msgspec.MsgspecError, TimeoutError) as error:
            return _as_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        finally:
            if not is_streamed:
                for generation in generations:
                    generation.cancel()

    async def models(self, request: Request) -> Response:
        """Return the one model that is served."""
        model = {"id": self._worker.model.name, "object": "model", "created": self._started_at, "owned_by": "tidekv"}
        return JSONResponse({"object": "list", "data": [model]})

    # --- For operators ---

    async def metrics(self, request: Request) -> Response:
        """Return the engine's metrics and the counts of this service, in Prometheus format."""
        text = await asyncio.to_thread(_fetch, f"http://{self._worker.engine.metrics_address}/metrics")
        counts = [f"service_{name}_total {count}\n" for name, count in sorted(self._worker.counts.items())]
        return Response(text + "".join(counts), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        """Return 200 while new requests are accepted, for load balancers and start scripts."""
        worker = self._worker
        status = "draining" if worker.is_draining else "ok" if worker.prefill.is_up.is_set() else "no prefill worker"
        if not worker.engine.is_running:
            status = "broken"
        prefill = {"address": worker.prefill.address, "pid": worker.prefill.pid, "starts": worker.prefill.starts}
        answer = {
            "status": status,
            "model": worker.model.name,
            "random_weights": worker.model.is_random,
            "prefill": prefill,
            "peer_address": worker.engine.peer_address,
            "counts": worker.counts,
        }
        return JSONResponse(answer, status_code=200 if status == "ok" else 503)

    async def requests(self, request: Request) -> Response:
        """Return every live request with its state in the engine and its progress."""
        worker = self._worker
        states = worker.engine.states()
        now_s = time.monotonic()
        live = [
            {
                "id": generation.request_id,
                "phase": generation.phase,
                # Between two restores a request has no state in the engine: its KV is held in host memory.
                "state": states.get(generation.request_id, "RETRACTED" if generation.retractions else "ARRIVING"),
                "age_s": round(now_s - generation.arrived_at_s, 3),
                "prompt_tokens": len(generation.prompt),
                "output_tokens": len(generation.output),
                "max_tokens": generation.max_tokens,
                "retractions": generation.retractions,
                "sources": generation.sources,
            }
            for generation in worker.live.values()
        ]
        core = worker.engine.statistics()["core"]
        assert isinstance(core, dict)
        conditions = ("owned", "cached", "evictable", "draining", "free", "total")
        pools = {pool: {name: core[f"{pool}_{name}"] for name in conditions} for pool in ("device", "host")}
        for pages in pools.values():
            # Cached pages are pinned by requests and transfers, or else they may be evicted.
            pages["pinned"] = pages["cached"] - pages["evictable"]
        return JSONResponse({"requests": live, "pools": pools, "counts": worker.counts, "queue": core["queue"]})

    async def change_request(self, request: Request) -> Response:
        """Give a request that waits another priority or deadline; false if it is READY or gone."""

        async def act(body: RequestBody) -> dict[str, bool]:
            request_id = request.path_params["request_id"]
            changed = self._worker.engine.change_request(request_id, priority=body.priority, deadline_s=body.deadline_s)
            return {"changed": changed}

        return await _operate(request, RequestBody, act)

    async def policy(self, request: Request) -> Response:
        """Return the present storage policy."""
        return JSONResponse(msgspec.to_builtins(self._worker.engine.policy))

    async def change_policy(self, request: Request) -> Response:
        """Change fields of the storage policy, as `{"prefetch": "best_effort"}`; returns the whole policy."""

        async def act(body: dict[str, object]) -> object:
            return msgspec.to_builtins(self._worker.engine.change_policy(**body))  # type: ignore[arg-type]  # It checks.

        return await _operate(request, dict[str, object], act)

    async def exchange_storage(self, request: Request) -> Response:
        """Stop using storage (`{"attached": false}`), for its maintenance, or use it again; requests go on."""

        async def act(body: StorageBody) -> dict[str, bool]:
            if not self._storage:
                raise InvalidRequest("the service was started without --storage")
            if body.attached:
                await self._worker.engine.attach_storage(self._storage)
            else:
                await self._worker.engine.detach_storage()
            return {"attached": body.attached}

        return await _operate(request, StorageBody, act)

    async def flush(self, request: Request) -> Response:
        """Drop the unused pages of the tiers in `{"tiers": ["l1"]}`, so that a later answer shows the next tier."""

        async def act(body: FlushBody) -> dict[str, dict[str, int]]:
            return await self._worker.engine.flush(tuple(body.tiers), namespace=body.namespace)

        return await _operate(request, FlushBody, act)

    async def look_up(self, request: Request) -> Response:
        """Say how many tokens each tier has of the prompts of a completion body, storage included."""
        try:
            body = msgspec.json.decode(await _body_of(request), type=CompletionBody)
            asked = [
                self._worker.engine.look_up(prompt, namespace=body.cache_salt) for prompt in body.prompts(self._worker)
            ]
            return JSONResponse([asdict(each) for each in await asyncio.gather(*asked)])
        except (TidekvError, msgspec.MsgspecError) as error:
            return _as_response(error)
        except ClientDisconnect:
            return Response(status_code=499)

    async def hints(self, request: Request) -> Response:
        """Act on an envelope of KV hints, as an orchestrator sends it; returns the outcome of each action."""

        async def act(envelope: object) -> list[dict[str, object]]:
            return [asdict(each) for each in await self._worker.engine.hint(envelope)]

        return await _operate(request, object, act)

    # --- Pages ---

    async def chat_page(self, request: Request) -> Response:
        """Return the page to chat."""
        return HTMLResponse(CHAT_PAGE.read_text())

    async def status_page(self, request: Request) -> Response:
        """Return the page that shows `/requests`."""
        return HTMLResponse(STATUS_PAGE.read_text())


async def _operate(request: Request, kind: type[B], act: Callable[[B], Awaitable[object]]) -> Response:
    """Answer an operator's POST: decode its body as `kind`, and return what `act` makes of it."""
    if refusal := _refusal_of_foreign_page(request):
        return refusal
    try:
        return JSONResponse(await act(msgspec.json.decode(await _body_of(request), type=kind)))
    except (TidekvError, msgspec.MsgspecError) as error:
        return _as_response(error)
    except ClientDisconnect:
        return Response(status_code=499)


async def _body_of(request: Request) -> bytes:
    """Return a request's body. Raises InvalidRequest as soon as more than `BODY_BYTES_MAX` have come."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise InvalidRequest(f"the body has more than {BODY_BYTES_MAX} bytes")
    return bytes(body)


def _refusal_of_foreign_page(request: Request) -> Response | None:
    """Refuse a request that a page of another site made a browser send.

    A browser sends JSON to another site only after asking it, and names the site of the page in Origin.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return _refusal(415, "send the body as application/json", "invalid_request_error")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        return _refusal(403, "pages of other sites may not ask for this", "invalid_request_error")
    return None


async def _all_of(answers: list[Answer]) -> None:
    for answer in answers:
        await answer.read()


class EventStream:
    """Response that sends a stream, and cancels its generation if the client disconnects."""

    def __init__(self, first: str, events: AsyncIterator[str], generation: Generation) -> None:
        self._first = first
        self._events = events
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request."""
        try:
            await _unless_disconnected(receive, self._send(send))
        except ClientDisconnect:
            pass  # No client is left to answer.
        finally:
            self._generation.cancel()

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send_event(send, self._first)
        try:
            async for event in self._events:
                await self._send_event(send, event)
        except (TidekvError, TimeoutError) as error:
            # The status was sent already, so the error is sent as an event, as OpenAI's service does.
            answer = {"error": {"message": str(error), "type": "server_error"}}
            await self._send_event(send, f"data: {msgspec.json.encode(answer).decode()}\n\n")
        await send({"type": "http.response.body", "body": b""})

    async def _send_event(self, send: Send, event: str) -> None:
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})


async def _unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`. If the client disconnects first, cancel it and raise ClientDisconnect."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _as_response(error: Exception) -> Response:
    if isinstance(error, CapacityError):
        return _refusal(429, f"too many requests: {error}", "rate_limit_error")
    if isinstance(error, InvalidRequest | InvalidConfig | msgspec.MsgspecError):
        return _refusal(400, str(error), "invalid_request_error")
    if isinstance(error, EngineClosed | TimeoutError | RequestFailed | StorageFailed):
        return _refusal(503, str(error) or "the request took too long", "unavailable")
    return _refusal(500, str(error), "server_error")


def _refusal(status: int, message: str, kind: str) -> Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    answer = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    return JSONResponse(answer, status_code=status, headers=headers)


def _fetch(url: str) -> str:
    with urlopen(url, timeout=5) as response:
        return str(response.read().decode())
