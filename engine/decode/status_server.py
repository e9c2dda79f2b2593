"""What routers and orchestrators ask of a running engine, over HTTP: health, load, where a prompt is, and KV hints.

| path | answer |
|---|---|
| GET /health | 200 while the engine runs and its loop answers |
| GET /ready | 200 while it takes new requests: it runs, and does not drain |
| GET /load | `EngineLoad` as JSON |
| GET /metrics | the load under the names of vLLM's metrics, which vllm-router and llm-d read |
| POST /probe | tokens of each prompt in device and host memory |
| POST /look_up | tokens of each prompt by tier, storage asked, tokens that prefill would send, and seconds to READY |
| POST /hints | an outcome for each action of an envelope of KV hints |
| POST /store | what storage lacked is stored, for a worker that is about to be stopped: `DrainOutcome`, at its end |
| POST /hand_over | the same to the host memory of another worker, which is named |

The server's thread parses and packs; the engine's loop only looks up, a few prompts at a time.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidekv.backends.keys.chain import pack_tokens
from tidekv.backends.keys.namespaces import join_namespaces, split_namespace
from tidekv.engine.decode.load import EngineLoad, LoadReader
from tidekv.engine.decode.look_up import look_up
from tidekv.engine.http_server import HttpRequest, HttpResponse, HttpServer
from tidekv.engine.metrics.server import exposition
from tidekv.states.errors import EngineClosed, InvalidConfig, InvalidRequest, cause_of
from tidekv.states.validation import PlainText, Seconds

if TYPE_CHECKING:
    from tidekv.engine.decode.hints import HintOutcome
    from tidekv.engine.decode.runtime import Runtime
    from tidekv.engine.decode.values import DrainOutcome

T = TypeVar("T")
PROMPTS_MAX: Final = 256
BODY_BYTES_MAX: Final = 32 << 20
AT_ONCE: Final = 16
"""Prompts that are looked up before the engine's loop may do something else."""
LOOP_S: Final = 2.0
"""Maximum wait for the engine's loop; one that does not answer by then is not healthy."""
STORE_S_MAX: Final = 3600.0
OPEN_PATHS: Final = ("/health", "/ready")
"""Asked without a token: they say nothing of prompts, and orchestrators have no token."""


class ProbeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts as token ids, all of one namespace and adapter; or, for a probe, as lists of their pages' hashes in KV
    events, which name both.
    """

    prompts: Annotated[list[list[int]], Meta(max_length=PROMPTS_MAX)] = []
    block_hashes: Annotated[list[list[int]], Meta(max_length=PROMPTS_MAX)] = []
    namespace: PlainText = ""
    lora_name: PlainText = ""


class LookUpRequest(ProbeRequest, frozen=True, forbid_unknown_fields=True):
    """As ProbeRequest; storage is asked for at most `timeout_s`."""

    timeout_s: Seconds = 0.05


class StoreAllRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds within which storage gets what it lacks."""

    within_s: Annotated[float, Meta(gt=0, le=STORE_S_MAX)]


class HandOverRequest(StoreAllRequest, frozen=True, forbid_unknown_fields=True):
    """The address at which the other worker's host memory is read, and the seconds for it."""

    to: PlainText


class StatusServer:
    """Serves one engine, from construction until `close`. Make it on the engine's loop."""

    def __init__(
        self,
        runtime: Runtime,
        hint: Callable[[object], Coroutine[Any, Any, list[HintOutcome]]],
        store: Callable[[float, str | None], Coroutine[Any, Any, DrainOutcome]],
    ) -> None:
        """`hint` acts on an envelope, and `store` stores all within so many seconds, or hands it over to an address;
        both on the engine's loop. Raises InvalidConfig for an address that cannot be served, and a token file that
        cannot be read.
        """
        options = runtime.config.status
        assert options.listen is not None, "without it there is no server"
        self._runtime = runtime
        self._hint = hint
        self._store_all = store
        self._token = b"" if options.token_file is None else read_token(options.token_file)
        self._loop = asyncio.get_running_loop()
        self._reader = LoadReader()
        self._server = HttpServer(
            options.listen,
            self._answer,
            option="status.listen",
            what="status",
            body_bytes_max=BODY_BYTES_MAX,
            refuse=self._refused,
        )
        self.address = self._server.address
        """Address of the listening socket, with the port that the system chose."""

    def close(self) -> None:
        """Stop serving, and wait for the thread. Raises TidekvError if it does not end."""
        self._server.close()

    def load(self) -> EngineLoad:
        """Return the present load. Call it on the engine's loop."""
        return self._reader.read(self._runtime.core)

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        routes: dict[str, tuple[str, Callable[[HttpRequest], Awaitable[HttpResponse]]]] = {
            "/health": ("GET", self._health),
            "/ready": ("GET", self._ready),
            "/load": ("GET", self._load),
            "/metrics": ("GET", self._metrics),
            "/probe": ("POST", self._probe),
            "/look_up": ("POST", self._look_up),
            "/hints": ("POST", self._hints),
            "/store": ("POST", self._store),
            "/hand_over": ("POST", self._hand_over),
        }
        if request.path not in routes:
            return HttpResponse(HTTPStatus.NOT_FOUND, f"paths are {', '.join(routes)}\n".encode())
        method, handler = routes[request.path]
        if request.method != method:
            return HttpResponse(
                HTTPStatus.METHOD_NOT_ALLOWED, f"use {method}\n".encode(), headers=(f"Allow: {method}",)
            )
        try:
            return await handler(request)
        except TimeoutError:
            text = f"the engine's loop did not answer within {LOOP_S:g} s\n"
            return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        except EngineClosed as error:
            return HttpResponse(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode())
        except (msgspec.DecodeError, InvalidRequest) as error:
            return HttpResponse(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())

    def _refused(self, request: HttpRequest) -> HttpResponse | None:
        # A browser names the site of a page that posts, even to loopback, where no token need be set.
        if request.method == "POST" and "origin" in request.headers:
            return HttpResponse(HTTPStatus.FORBIDDEN, b"pages in a browser may not ask for this\n")
        # Open paths have no body: that of a POST would be read.
        is_open = request.path in OPEN_PATHS and request.method != "POST"
        if not self._token or is_open or self._is_allowed(request):
            return None
        text = "give the token of status.token_file: Authorization: Bearer TOKEN\n"
        return HttpResponse(HTTPStatus.UNAUTHORIZED, text.encode(), headers=("WWW-Authenticate: Bearer",))

    def _is_allowed(self, request: HttpRequest) -> bool:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(token.encode("latin-1"), self._token)

    async def _on_loop(self, work: Coroutine[Any, Any, T], *, within_s: float = LOOP_S) -> T:
        """Run a coroutine on the engine's loop. Raises TimeoutError."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()  # The loop is closed, and the server about to be.
            raise TimeoutError from None
        async with asyncio.timeout(within_s):
            return await asyncio.wrap_future(future)

    # --- State ---

    async def _health(self, request: HttpRequest) -> HttpResponse:
        async def state() -> str:
            return "" if self._runtime.is_open else "the engine was closed, or broke"

        return _state(await self._on_loop(state()))

    async def _ready(self, request: HttpRequest) -> HttpResponse:
        async def state() -> str:
            if not self._runtime.is_open:
                return "the engine was closed, or broke"
            return "the engine drains: it takes no new requests" if self._runtime.is_draining else ""

        return _state(await self._on_loop(state()))

    async def _load_now(self) -> tuple[EngineLoad, dict[str, int], dict[str, int]]:
        """The load, and running and waiting requests by adapter."""
        adapters: tuple[dict[str, int], dict[str, int]] = {}, {}
        for request in self._runtime.core.state.requests.values():
            if name := split_namespace(request.namespace).lora_name:
                counts = adapters[request.waits_for_admission]
                counts[name] = counts.get(name, 0) + 1
        return self.load(), *adapters

    async def _load(self, request: HttpRequest) -> HttpResponse:
        load, _, _ = await self._on_loop(self._load_now())
        return _json({**msgspec.to_builtins(load), "usage": load.usage})

    async def _metrics(self, request: HttpRequest) -> HttpResponse:
        load, running, waiting = await self._on_loop(self._load_now())
        registry = CollectorRegistry()
        registry.register(_VllmNames(load, running, waiting, self._runtime))
        return exposition(registry, request)

    # --- Prompts ---

    async def _probe(self, request: HttpRequest) -> HttpResponse:
        asked = msgspec.json.decode(request.body, type=ProbeRequest)
        if bool(asked.prompts) == bool(asked.block_hashes):
            raise InvalidRequest("give one of prompts and block_hashes")
        namespace, prompts = self._packed(asked)
        targets = [(namespace, self._runtime.prompt_keys.page_keys.of(packed)) for packed in prompts]

        async def probe() -> list[tuple[int, int]]:
            found = []
            for at, (namespace, each) in enumerate(targets or await self._of_hashes(asked.block_hashes)):
                if at % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
                found.append(self._runtime.core.state.index.probe_prefix(namespace, each, with_pending=False))
            return found

        page_size = self._runtime.core.settings.page_size
        found = await self._on_loop(probe())
        return _json([{"l1": device * page_size, "l2": host * page_size} for device, host in found])

    async def _of_hashes(self, prompts: list[list[int]]) -> list[tuple[str, bytes]]:
        """Return namespace and keys of prompts by their hashes. Raises InvalidRequest. Call it on the engine's loop."""
        watcher = self._runtime.kv_event_watcher
        if watcher is None:
            raise InvalidRequest("block_hashes are those of KV events, which are disabled: set kv_events.endpoint")
        return await watcher.keys_of(prompts)

    async def _look_up(self, request: HttpRequest) -> HttpResponse:
        asked = msgspec.json.decode(request.body, type=LookUpRequest)
        if not asked.prompts or asked.block_hashes:
            raise InvalidRequest("give prompts, as token ids")
        namespace, prompts = self._packed(asked)
        timeout_s = min(asked.timeout_s, LOOP_S / 2)

        async def all_of_them() -> list[Any]:
            async with asyncio.TaskGroup() as tasks:
                asking = [
                    tasks.create_task(look_up(self._runtime, packed, namespace, timeout_s=timeout_s))
                    for packed in prompts
                ]
            return [task.result() for task in asking]

        return _json(await self._on_loop(all_of_them()))

    async def _hints(self, request: HttpRequest) -> HttpResponse:
        envelope = msgspec.json.decode(request.body)
        return _json([asdict(each) for each in await self._on_loop(self._hint(envelope))])

    async def _store(self, request: HttpRequest) -> HttpResponse:
        asked = msgspec.json.decode(request.body, type=StoreAllRequest)
        return await self._all(asked, None)

    async def _hand_over(self, request: HttpRequest) -> HttpResponse:
        asked = msgspec.json.decode(request.body, type=HandOverRequest)
        return await self._all(asked, asked.to)

    async def _all(self, asked: StoreAllRequest, to: str | None) -> HttpResponse:
        work = self._store_all(asked.within_s, to)
        return _json(asdict(await self._on_loop(work, within_s=asked.within_s + LOOP_S)))

    def _packed(self, asked: ProbeRequest) -> tuple[str, list[bytes]]:
        """Return the joined namespace and the packed prompts. Raises InvalidRequest."""
        config = self._runtime.config
        namespace = join_namespaces(config.namespace, asked.namespace, asked.lora_name)
        return namespace, [pack_tokens(tokens, vocabulary=config.vocabulary or None) for tokens in asked.prompts]


class _VllmNames(Collector):
    """The load under the names of vLLM's metrics: a mapping for routers that know no others."""

    def __init__(self, load: EngineLoad, running: dict[str, int], waiting: dict[str, int], runtime: Runtime) -> None:
        self._load, self._running, self._waiting, self._runtime = load, running, waiting, runtime

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        model, load = self._runtime.config.model, self._load
        for name, text, value in (
            ("vllm:num_requests_running", "Requests that have pages.", load.requests_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", load.requests_waiting),
            ("vllm:kv_cache_usage_perc", "Share of device pages that no request can have at once.", load.usage),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([model], value)
            yield gauge
        gauge = GaugeMetricFamily(
            "vllm:cache_config_info", "Sizes of the device cache.", labels=["block_size", "num_gpu_blocks"]
        )
        gauge.add_metric([str(self._runtime.core.settings.page_size), str(load.device.total)], 1.0)
        yield gauge
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters of live requests.",
            labels=["running_lora_adapters", "waiting_lora_adapters"],
        )  # fmt: skip
        gauge.add_metric([",".join(sorted(self._running)), ",".join(sorted(self._waiting))], 1.0)
        yield gauge


def read_token(path: str) -> bytes:
    """Return the token in a file. Raises InvalidConfig."""
    try:
        with open(path, "rb") as file:
            token = file.read().strip()
    except OSError as error:
        raise InvalidConfig(f"status.token_file {path} cannot be read: {cause_of(error)}") from error
    if not token or len(token) > 4096:
        raise InvalidConfig(f"status.token_file {path} has {len(token)} bytes; a token has 1 to 4096")
    return token


def _state(cause: str) -> HttpResponse:
    if cause:
        return _json({"status": cause}, HTTPStatus.SERVICE_UNAVAILABLE)
    return _json({"status": "ok"})


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(status, msgspec.json.encode(value), "application/json")
