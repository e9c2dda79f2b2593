"""`tidekv doctor --events`: subscribe to a running engine, and compare what its events say with what it has.

The check subscribes as a router does, reads the fence that each newcomer is sent and what follows, asks for a replay,
and asks the engine's status server about the prompts that the stream names. A page that moves meanwhile makes the two
differ for a moment: only a difference that stays is a finding.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidekv.engine.doctor.event_stream import EXAMPLES_MAX, FENCE, EventIndex, Fault, PublishedPrompt
from tidekv.engine.doctor.finding import Finding
from tidekv.states.errors import InvalidConfig

if TYPE_CHECKING:
    import zmq

PROMPTS_MAX: Final = 200
"""Prompts that are compared: the longest ones of the stream."""
FENCE_S: Final = 5.0
SILENCE_S: Final = 3.0
"""Seconds without a batch after which the stream counts as dead; engines send an empty one each second."""
SETTLE_S: Final = 5.0
"""Seconds that a difference may last: a page that moves is published a moment later."""
REPLAY_S: Final = 10.0
CALL_S: Final = 10.0
ADVICE: Final[dict[Fault, str]] = {
    "unreadable": "Update tidekv: routers drop these batches. Report the batch.",
    "fields": "Update tidekv: routers drop these batches. Report the batch.",
    "signed hash": "Update tidekv: vllm-router drops every batch with a negative hash.",
    "orphan": "Update tidekv: routers lose pages whose parent they do not know. Report the journal.",
    "stored twice": "Update tidekv: llm-d counts, and would keep the page after its removal. Report the journal.",
    "not stored": "Update tidekv. Report the journal.",
    "gap": "Batches are lost on the way: look at the network, and at slow subscribers in the log of the engine.",
    "limits": "Update tidekv: vllm-router drops larger batches.",
    "no fence": "Nothing tells a router that starts now what there is: see that --events names the engine's endpoint.",
    "silence": "See that the engine runs, and that its process is not stopped.",
    "replay": "A router that misses a batch stays wrong: see kv_events.replay and kv_events.kept_bytes.",
    "probe": "Routers decide by wrong contents. Report the journal.",
}


@dataclass(frozen=True)
class EventSource:
    """Where an engine publishes, and where it is asked. Without `status` only the rules of the stream are checked."""

    events: str
    replay: str | None = None
    status: str | None = None
    token: str = ""


def check_events(source: EventSource, *, listen_s: float = 3.0) -> list[Finding]:
    """Check a running engine; blocks for `listen_s` and a few seconds more. Raises InvalidConfig without pyzmq, and for
    endpoints that are none.
    """
    try:
        import zmq
    except ImportError as error:
        raise InvalidConfig("--events needs pyzmq: pip install 'tidekv[events]'") from error
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0
    try:
        with context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as asker:
            for each in (sub, asker):
                each.rcvhwm = 0
            sub.subscribe(b"")
            sub.connect(source.events)
            if source.replay is not None:
                asker.connect(source.replay)
            return _EventCheck(source, sub, asker).run(listen_s)
    except zmq.ZMQError as error:
        raise InvalidConfig(f"{source.events} or {source.replay} is no endpoint: {error}") from error
    finally:
        context.destroy(linger=0)


class _EventCheck:
    def __init__(self, source: EventSource, sub: zmq.Socket[bytes], asker: zmq.Socket[bytes]) -> None:
        self._source, self._sub, self._asker = source, sub, asker
        self._index = EventIndex()
        self._batches = 0
        self._last_s = time.monotonic()
        self._after: list[tuple[int, bytes]] = []
        """Live batches with a number."""

    def run(self, listen_s: float) -> list[Finding]:
        """Return the findings."""
        if not self._wait_fence():
            self._index.note("no fence", f"within {FENCE_S:g} s of the subscription")
        self._listen(listen_s)
        found = "no status server was named"
        if self._source.status is not None:
            found = self._compare(self._index.prompts(PROMPTS_MAX))
        if self._source.replay is not None:
            self._check_replay()
        return self._findings(found)

    # --- The stream ---

    def _receive(self, within_s: float) -> tuple[int, bytes] | None:
        if not self._sub.poll(int(within_s * 1000)):
            return None
        frames = self._sub.recv_multipart()
        self._last_s = time.monotonic()
        if len(frames) != 3 or len(frames[1]) != 8:
            self._index.note("unreadable", f"a message of {len(frames)} frames")
            return FENCE, b"\x92\x00\x90"
        self._batches += 1
        number = int.from_bytes(frames[1], "big")
        return number, frames[2]

    def _wait_fence(self) -> bool:
        ends_s = time.monotonic() + FENCE_S
        while (left_s := ends_s - time.monotonic()) > 0:
            got = self._receive(left_s)
            if got is not None and got[0] == FENCE:
                self._index.take(*got)
                return True
        return False

    def _listen(self, seconds: float) -> None:
        """Apply what comes in the next seconds."""
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            got = self._receive(left_s)
            if got is not None:
                self._index.take(*got)
                if got[0] != FENCE:
                    self._after.append(got)
            elif time.monotonic() - self._last_s > SILENCE_S:
                self._index.note("silence", f"no batch for {SILENCE_S:g} s")
                return

    # --- The engine's own answer ---

    def _compare(self, prompts: Sequence[PublishedPrompt]) -> str:
        """Note prompts whose reach differs for longer than a page takes to move. Returns a sentence for the finding."""
        ends_s = time.monotonic() + SETTLE_S
        differing: list[str] = []
        left = [prompt for prompt in prompts if not _is_digest(prompt.salt)]
        hidden = len(prompts) - len(left)
        while left:
            wrong = []
            for prompt, said, truth in zip(left, map(self._index.reach, left), self._truth(left), strict=True):
                # None: it is gone from the stream, so it should be gone here, too. Storage may have more than it says:
                # pages that were there before the engine started.
                published = said or (0, 0, 0)
                if published[:2] != truth[:2] or published[2] > truth[2]:
                    wrong.append((prompt, f"{len(prompt.tokens)} tokens: published {published}, there are {truth}"))
            left, differing = [prompt for prompt, _ in wrong], [text for _, text in wrong]
            if not wrong or time.monotonic() > ends_s:
                break
            self._listen(0.3)
        for text in differing:
            self._index.note("probe", text)
        compared = f"{len(prompts) - hidden} prompts compared by tier"
        return f"{compared}; {hidden} have salts that are published as digests" if hidden else compared

    def _truth(self, prompts: Sequence[PublishedPrompt]) -> list[tuple[int, int, int]]:
        """Ask the engine: reach on the device, in memory, and in any tier, in tokens of full pages."""
        by_names: dict[tuple[str, str], list[int]] = {}
        for at, prompt in enumerate(prompts):
            by_names.setdefault((prompt.salt, prompt.lora_name), []).append(at)
        found: list[tuple[int, int, int]] = [(0, 0, 0)] * len(prompts)
        for (salt, lora_name), places in by_names.items():
            asked = {
                "prompts": [prompts[at].tokens for at in places],
                "namespace": salt,
                "lora_name": lora_name,
                "timeout_s": 1.0,
            }
            for at, answer in zip(places, self._call("/look_up", asked), strict=True):
                device, memory = answer["l1"], answer["l1"] + answer["l2"]
                found[at] = device, memory, memory + answer["l3"]
        return found

    def _call(self, path: str, body: object) -> Any:
        assert self._source.status is not None
        connection = http.client.HTTPConnection(self._source.status, timeout=CALL_S)
        headers = {"Authorization": f"Bearer {self._source.token}"} if self._source.token else {}
        try:
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        except OSError as error:
            raise InvalidConfig(f"the status server {self._source.status} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise InvalidConfig(f"the status server answered {answer.status} to {path}: {text[:200]!r}")
        return json.loads(text)

    # --- Replay ---

    def _check_replay(self) -> None:
        """Build an index from a replay of everything, and compare it with that of the live stream."""
        asker = self._asker
        asker.send_multipart([b"", bytes(8)])
        replayed, expected = EventIndex(), 0
        while True:
            if not asker.poll(int(REPLAY_S * 1000)):
                self._index.note("replay", f"no answer within {REPLAY_S:g} s")
                return
            frames = asker.recv_multipart()
            if len(frames) != 4 or len(frames[2]) != 8:
                self._index.note("replay", f"a message of {len(frames)} frames")
                return
            if frames[2] == b"\xff" * 8:
                break
            number = int.from_bytes(frames[2], "big")
            if number != expected:
                self._index.note("replay", f"asked from 0, batch {number} came in the place of {expected}")
                return
            replayed.take(number, frames[3])
            expected += 1
        for fault, examples in replayed.faults.items():
            self._index.note("replay", f"{fault}: {examples[0]}")
        # Both must say the same once each knows every batch that the other knows.
        self._listen(0.3)
        while self._index.last is not None and self._index.last < expected - 1 and not self._index.faults["silence"]:
            self._listen(0.3)
        for number, payload in self._after:
            if number >= expected:
                replayed.take(number, payload)
        if not self._index.same_as(replayed):
            self._index.note("replay", "what a replay from 0 says differs from the live stream")

    # --- Result ---

    def _findings(self, compared: str) -> list[Finding]:
        found = []
        for fault, examples in self._index.faults.items():
            if examples:
                shown = "; ".join(examples[:EXAMPLES_MAX])
                found.append(Finding(f"events: {fault}", "bad", f"{len(examples)} times: {shown}", ADVICE[fault]))
        if found:
            return found
        pages = sum(bool(page.media) for page in self._index.pages.values())
        advice = ""
        if self._source.status is None:
            advice = "Set status.listen, and name it by --status, to compare the events with the engine."
        elif pages and not any(page.tokens for page in self._index.pages.values()):
            advice = "Nothing could be compared: set kv_events.tokens."
        said = f"{self._batches} batches, {pages} pages; {compared}"
        return [Finding("events", "warn" if advice else "ok", said, advice)]


def _is_digest(salt: str) -> bool:
    """Whether a salt is one that is published as a digest only."""
    return len(salt) == 32 and set(salt) <= set("0123456789abcdef")
