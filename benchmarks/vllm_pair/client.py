"""A client of vLLM's OpenAI API: one completion of a prompt of token ids, with the time to its first token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from benchmarks.servers.answers import Answer, HttpClient, Stopwatch
from benchmarks.vllm_pair.server import MODEL


class Client(HttpClient):
    """Sends requests over its own connections until `close`."""

    async def complete(
        self,
        url: str,
        prompt: list[int],
        *,
        count: int,
        request_id: str,
        transfer: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return `count` greedy tokens, read as a stream. Raises RequestLost.

        Cancellation closes the connection, upon which vLLM aborts the request.
        """
        watch = Stopwatch()
        found = self.tokens(url, prompt, count=count, request_id=request_id, transfer=transfer)
        async with aclosing(found) as arriving:
            async for tokens in arriving:
                watch.set([*watch.tokens, *tokens])
        return watch.answer(url, count)

    async def tokens(
        self,
        url: str,
        prompt: list[int],
        *,
        count: int,
        request_id: str,
        transfer: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[list[int], None]:
        """Yield greedy tokens as they arrive. Raises RequestLost."""
        body = {**_body(prompt, count, transfer), "stream": True}
        async with aclosing(self.stream(f"{url}/v1/completions", body, {"X-Request-Id": request_id})) as events:
            async for event in events:
                for choice in event["choices"]:
                    if tokens := choice.get("token_ids"):
                        yield tokens

    async def prefill(
        self, url: str, prompt: list[int], *, request_id: str, transfer: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        """Run a prompt and return the `kv_transfer_params` of the response, which are for decode.

        vLLM returns them only if the response is not a stream. Raises RequestLost.
        """
        body = _body(prompt, 1, transfer)
        response = await self.post(f"{url}/v1/completions", body, {"X-Request-Id": request_id})
        returned: Mapping[str, Any] | None = response.get("kv_transfer_params")
        return returned


def _body(prompt: list[int], count: int, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body if transfer is None else {**body, "kv_transfer_params": dict(transfer)}
