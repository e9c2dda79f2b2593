"""Requests and responses of OpenAI's completions and chat API, whole or token by token."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Literal, Protocol

import msgspec

from examples.service.decode import DecodeWorker, Generation
from tidekv import InvalidRequest


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both kinds of requests have. `cache_salt`, `cache` and `kv_hints` are this service's own."""

    model: str = ""
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    cache_salt: str = ""
    """Requests with different salts share no cache."""
    cache: bool = True
    """False keeps nothing of this request in the cache."""
    kv_hints: dict[str, object] | None = None
    """An envelope of KV hints, such as `kv.fetch` with the address of a service that has the prompt."""

    def check(self, model: str, unsupported: tuple[str, ...]) -> None:
        """Raises InvalidRequest for an option that would otherwise be ignored silently and change the answer."""
        if self.model and self.model != model:
            raise InvalidRequest(f"the model {self.model!r} does not exist; this service has {model!r}")
        unknown = [name for name in (*unsupported, "stop") if getattr(self, name)]
        unknown += ["n"] * (self.n not in (None, 1)) + ["temperature"] * bool(self.temperature)
        if unknown:
            raise InvalidRequest(
                f"this service decodes greedily, one answer per prompt; unsupported: {', '.join(unknown)}"
            )


class CompletionBody(Body, frozen=True, kw_only=True):
    """A completion request: prompts as text or tokens."""

    prompt: str | list[int | str | list[int]]
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None

    def start(self, worker: DecodeWorker, default_max_tokens: int) -> Iterator[Generation]:
        """Start one generation per prompt. Raises InvalidRequest; those started before it go on."""
        self.check(worker.model.name, ("best_of", "echo", "logprobs", "suffix"))
        prompts = self.prompts(worker)
        if self.stream and len(prompts) > 1:
            raise InvalidRequest("a stream has one prompt")
        limit = default_max_tokens if self.max_tokens is None else self.max_tokens
        for prompt in prompts:
            yield worker.start(prompt, limit, cache=self.cache, namespace=self.cache_salt, kv_hints=self.kv_hints)

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


class TextPart(msgspec.Struct, frozen=True):
    """Part of a message. Only text is supported."""

    text: str
    type: Literal["text"] = "text"


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def text(self) -> str:
        """Return the whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body, frozen=True, kw_only=True):
    """A chat request: a conversation that ends in a message to answer."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: list[object] | None = None
    response_format: object | None = None

    def start(self, worker: DecodeWorker, default_max_tokens: int) -> Iterator[Generation]:
        """Start the one generation. Raises InvalidRequest."""
        self.check(worker.model.name, ("logprobs", "tools", "response_format"))
        if not self.messages or self.messages[-1].role == "assistant":
            raise InvalidRequest("messages must end in a message to answer: add one with the role user")
        prompt = worker.model.tokenizer.encode_chat([(message.role, message.text()) for message in self.messages])
        # Without a limit the answer may fill what the conversation leaves of the worker's memory, as in OpenAI's API.
        default = min(default_max_tokens, worker.output_max(prompt))
        limits = (self.max_completion_tokens, self.max_tokens, default)
        limit = next(limit for limit in limits if limit is not None)
        phrases = worker.model.chat_phrases()
        yield worker.start(
            prompt, limit, cache=self.cache, namespace=self.cache_salt, phrases=phrases, kv_hints=self.kv_hints
        )


class Form(Protocol):
    """How one kind of request has its text back."""

    whole_kind: str
    part_kind: str

    def clean(self, text: str) -> str:
        """Return the text as the client gets it."""
        ...

    def whole(self, text: str) -> dict[str, object]:
        """Return the text's fields of a whole response."""
        ...

    def part(self, text: str, *, is_first: bool) -> dict[str, object]:
        """Return the text's fields of one event of a stream."""
        ...


class CompletionForm:
    """Text as the completions API has it."""

    whole_kind = part_kind = "text_completion"

    def clean(self, text: str) -> str:
        """See `Form`."""
        return text

    def whole(self, text: str) -> dict[str, object]:
        """See `Form`."""
        return {"text": text}

    def part(self, text: str, *, is_first: bool) -> dict[str, object]:
        """See `Form`."""
        return {"text": text}


class ChatForm:
    """Text as the chat API has it."""

    whole_kind, part_kind = "chat.completion", "chat.completion.chunk"

    def clean(self, text: str) -> str:
        """See `Form`. The space after the name of the speaker is part of the template."""
        return text.lstrip()

    def whole(self, text: str) -> dict[str, object]:
        """See `Form`."""
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str, *, is_first: bool) -> dict[str, object]:
        """See `Form`."""
        return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}


class Answer:
    """The response to one prompt, in the format of OpenAI's API."""

    def __init__(self, generation: Generation, worker: DecodeWorker, form: Form, index: int) -> None:
        self.generation = generation
        self._form = form
        self._tokenizer = worker.model.tokenizer
        self._worker = worker.name
        self._index = index
        self._told = ""
        self._head = {"created": int(time.time()), "model": worker.model.name}

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
            part = self._form.part(self._new_text(seen, is_last=is_last), is_first=len(seen) == 1)
            yield self._event([self._choice(part, [token], is_last=is_last)])
        if with_usage:
            yield self._event([], usage=self.usage())
        yield "data: [DONE]\n\n"

    def whole(self) -> dict[str, object]:
        """Return the whole output as one choice."""
        output = self.generation.output
        text = self._form.clean(self._tokenizer.decode(output))
        return self._choice(self._form.whole(text), output, is_last=True)

    def usage(self) -> dict[str, object]:
        """Return token counts; `sources` lists where the prompt's KV came from, `first_token_s` how long that took, and
        `prefill_cached` what prefill did not compute.
        """
        generation = self.generation
        sources = generation.sources
        return {
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": len(generation.output),
            "total_tokens": len(generation.prompt) + len(generation.output),
            "prompt_tokens_details": {"cached_tokens": sum(sources.values()) - sources.get("transfer", 0)},
            "worker": self._worker,
            "sources": sources,
            "prefill_cached": generation.prefill_cached,
            "first_token_s": round(generation.first_token_s, 6),
            "retractions": generation.retractions,
        }

    def head(self) -> dict[str, object]:
        """Return the fields that every whole response has."""
        return {"id": self.generation.request_id, "object": self._form.whole_kind, **self._head}

    def _event(self, choices: list[dict[str, object]], **more: object) -> str:
        event = {**self.head(), "object": self._form.part_kind, "choices": choices, **more}
        return f"data: {msgspec.json.encode(event).decode()}\n\n"

    def _choice(self, text: dict[str, object], token_ids: list[int], *, is_last: bool) -> dict[str, object]:
        reason = self.generation.finish_reason if is_last else None
        return {"index": self._index, **text, "token_ids": token_ids, "logprobs": None, "finish_reason": reason}

    def _new_text(self, seen: list[int], *, is_last: bool) -> str:
        """Return the text that the last token added. An incomplete character is held back until it is complete."""
        text = self._form.clean(self._tokenizer.decode(seen))
        if not is_last:
            text = text.rstrip("\ufffd")
        new, self._told = text[len(self._told) :], max(self._told, text, key=len)
        return new


def whole_answer(answers: list[Answer]) -> dict[str, object]:
    usages = [answer.usage() for answer in answers]
    total = {name: sum(int(str(usage[name])) for usage in usages) for name in usages[0] if name.endswith("_tokens")}
    usage = usages[0] if len(usages) == 1 else total
    return {**answers[0].head(), "choices": [answer.whole() for answer in answers], "usage": usage}
