"""Requests and responses of OpenAI's completions API, whole or token by token."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec

from examples.service.decode import DecodeWorker, Generation
from tidekv import InvalidRequest


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool = False


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a completion request that this service supports. `cache_salt` and `cache` are its own."""

    prompt: str | list[int | str | list[int]]
    model: str = ""
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    n: int | None = 1
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    stop: str | list[str] | None = None
    suffix: str | None = None
    cache_salt: str = ""
    """Requests with different salts share no cache."""
    cache: bool = True
    """False keeps nothing of this request in the cache."""

    def check(self, model: str) -> None:
        """Raises InvalidRequest for an option that would otherwise be ignored silently and change the answer."""
        if self.model and self.model != model:
            raise InvalidRequest(f"the model {self.model!r} does not exist; this service has {model!r}")
        unknown = [name for name in ("best_of", "echo", "logprobs", "stop", "suffix") if getattr(self, name)]
        unknown += ["n"] * (self.n not in (None, 1)) + ["temperature"] * bool(self.temperature)
        if unknown:
            raise InvalidRequest(
                f"this service decodes greedily, one answer per prompt; unsupported: {', '.join(unknown)}"
            )

    def prompts(self, worker: DecodeWorker) -> list[list[int]]:
        """Return each prompt as tokens. The field is text, tokens, or a list of either."""
        encode = worker.model.tokenizer.encode
        if isinstance(self.prompt, str):
            return [encode(self.prompt)]
        tokens = [item for item in self.prompt if isinstance(item, int)]
        if len(tokens) == len(self.prompt):
            return [tokens]
        if tokens:
            raise InvalidRequest("a prompt must be text, a list of tokens, or a list of such prompts, not a mixture")
        return [
            encode(item) if isinstance(item, str) else list(item) for item in self.prompt if not isinstance(item, int)
        ]


class Answer:
    """The response to one prompt, in the format of OpenAI's API."""

    def __init__(self, generation: Generation, worker: DecodeWorker, index: int) -> None:
        self.generation = generation
        self._tokenizer = worker.model.tokenizer
        self._index = index
        self._told = ""
        self._head = {"object": "text_completion", "created": int(time.time()), "model": worker.model.name}

    async def read(self) -> None:
        """Wait for the end of the generation. Raises its error."""
        async for _ in self.generation:
            pass

    async def events(self, *, with_usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events: one per token, the usage if requested, and the end mark."""
        seen: list[int] = []
        async for token in self.generation:
            seen.append(token)
            # The generation may be ahead of the stream, so its end is not yet the end of the stream.
            is_last = bool(self.generation.finish_reason) and len(seen) == len(self.generation.output)
            yield self._event([self._choice(self._new_text(seen, is_last=is_last), [token], is_last=is_last)])
        if with_usage:
            yield self._event([], usage=self.usage())
        yield "data: [DONE]\n\n"

    def whole(self) -> dict[str, object]:
        """Return the whole output as one choice."""
        output = self.generation.output
        return self._choice(self._tokenizer.decode(output), output, is_last=True)

    def usage(self) -> dict[str, object]:
        """Return token counts; `sources` lists where the prompt's KV came from."""
        generation = self.generation
        sources = generation.sources
        return {
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": len(generation.output),
            "total_tokens": len(generation.prompt) + len(generation.output),
            "prompt_tokens_details": {"cached_tokens": sum(sources.values()) - sources.get("transfer", 0)},
            "sources": sources,
            "retractions": generation.retractions,
        }

    def head(self) -> dict[str, object]:
        """Return the fields that every message has."""
        return {"id": self.generation.request_id, **self._head}

    def _event(self, choices: list[dict[str, object]], **more: object) -> str:
        return f"data: {msgspec.json.encode({**self.head(), 'choices': choices, **more}).decode()}\n\n"

    def _choice(self, text: str, token_ids: list[int], *, is_last: bool) -> dict[str, object]:
        reason = self.generation.finish_reason if is_last else None
        return {"index": self._index, "text": text, "token_ids": token_ids, "logprobs": None, "finish_reason": reason}

    def _new_text(self, seen: list[int], *, is_last: bool) -> str:
        """Return the text that the last token added. An incomplete character is held back until it is complete."""
        text = self._tokenizer.decode(seen)
        if not is_last:
            text = text.rstrip("\ufffd")
        new, self._told = text[len(self._told) :], max(self._told, text, key=len)
        return new


def whole_answer(answers: list[Answer]) -> dict[str, object]:
    usages = [answer.usage() for answer in answers]
    total = {name: sum(int(str(usage[name])) for usage in usages) for name in usages[0] if name.endswith("_tokens")}
    usage = usages[0] if len(usages) == 1 else total
    return {**answers[0].head(), "choices": [answer.whole() for answer in answers], "usage": usage}
