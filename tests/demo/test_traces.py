"""Recordings are read in both formats, keep their prefix structure when scaled, and bad lines are named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.blocks import TraceOptions, TraceRequest
from demo.phase import reusable_tokens
from demo.traces import read_trace, trace_format
from tests.support.thorough import examples
from tidekv.states.errors import InvalidConfig, InvalidRequest

Json = dict[str, Any]  # Records as they are written to a file.


def mooncake(at_ms: float = 0, tokens: int = 1030, output: int = 5, ids: Sequence[int] = (1, 2, 3)) -> Json:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": list(ids)}


def step(t: float, tokens: int, ids: Sequence[int], **more: Any) -> Json:
    return {"t": t, "type": "n", "model": "m", "in": tokens, "out": 7, "hash_ids": list(ids), **more}


def session(name: str, *requests: Json, tools: int = 128, system: int = 70) -> Json:
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "tool_tokens": tools,
        "system_tokens": system,
        "requests": list(requests),
    }


def write(path: Path, *records: Json | str, packed: bool = False) -> Path:
    text = "".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def tokens_of(request: TraceRequest) -> list[int]:
    return np.frombuffer(request.prompt.packed(), dtype="<u4").tolist()


def shared_length(one: TraceRequest, two: TraceRequest) -> int:
    pairs = zip(tokens_of(one), tokens_of(two), strict=False)
    return next(
        (position for position, (a, b) in enumerate(pairs) if a != b), min(map(len, map(tokens_of, (one, two))))
    )


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake_lines_become_requests(tmp_path: Path, packed: bool) -> None:
    path = write(tmp_path / "trace", mooncake(), mooncake(2500, 1536, 0, (1, 2, 9)), "", packed=packed)
    assert trace_format(path) == "mooncake"
    one, two = read_trace(path)
    assert (one.request_id, one.at_s, one.session, one.output_length) == ("request-1", 0.0, "", 5)
    # An output is never empty: each request yields its first token.
    assert (two.request_id, two.at_s, two.output_length) == ("request-2", 2.5, 1)
    assert [len(tokens_of(request)) for request in (one, two)] == [1030, 1536]
    assert len(two.output()) == 4
    assert shared_length(one, two) == 1024


def test_scaling_keeps_the_prefix_structure(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", mooncake(), mooncake(1000, 1536, 80, (1, 2, 9)), mooncake(1000, 3, 1, (4,)))
    one, two, three = read_trace(path, TraceOptions(length_scale=1 / 8, time_scale=0.5))
    assert [request.prompt.token_count for request in (one, two, three)] == [129, 192, 1]
    assert shared_length(one, two) == 128
    assert (two.at_s, two.output_length) == (0.5, 10)
    tiny = list(read_trace(path, TraceOptions(length_scale=1e-6)))
    assert [request.prompt.token_count for request in tiny] == [3, 3, 1]


def test_limits_leave_out_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", *(mooncake(n, 100 * (n + 1), ids=(n,)) for n in range(5)))
    kept = [request.request_id for request in read_trace(path, TraceOptions(prompt_tokens_max=300))]
    assert kept == ["request-1", "request-2", "request-3"]
    assert len(list(read_trace(path, TraceOptions(requests_max=2)))) == 2


AGENT = session(
    "s1",
    step(0.0, 330, range(1, 6)),
    {
        "t": 10.0,
        "type": "subagent",
        "agent_id": "a",
        "tool_tokens": 64,
        "system_tokens": 64,
        "requests": [step(0.0, 192, (50, 51, 52)), step(3.0, 256, (50, 51, 53, 54), type="s")],
    },
    step(11.0, 400, (1, 2, 3, 4, 6, 7)),
)


def test_agent_sessions_merge_sub_agents_by_time(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", AGENT)
    assert trace_format(path) == "agent sessions"
    requests = list(read_trace(path))
    assert [(request.request_id, request.at_s) for request in requests] == [
        ("s1/0", 0.0),
        ("s1/1", 10.0),
        ("s1/2", 11.0),
        ("s1/3", 13.0),
    ]
    assert [len(tokens_of(request)) for request in requests] == [330, 192, 400, 256]
    assert shared_length(requests[0], requests[2]) == 4 * 64
    assert shared_length(requests[1], requests[3]) == 2 * 64
    assert shared_length(requests[0], requests[1]) == 0


def test_shared_beginnings_join_sessions_and_change_nothing_within_one(tmp_path: Path) -> None:
    other = session("s2", step(0.0, 330, range(1, 6)), step(5.0, 400, (1, 2, 3, 4, 6, 7)))
    stranger = session("s3", step(0.0, 330, range(1, 6)), tools=129)
    path = write(tmp_path / "trace", AGENT, other, stranger)
    options = TraceOptions(sessions_at_once=1)
    found = {request.request_id: request for request in read_trace(path, options)}
    # (128 + 70) // 64 blocks: ids mean nothing across sessions, but tools and system prompt are the same.
    assert shared_length(found["s1/0"], found["s2/0"]) == 3 * 64
    assert shared_length(found["s1/0"], found["s3/0"]) == 0
    assert shared_length(found["s2/0"], found["s2/1"]) == 4 * 64
    # s1 lasts 13 s, s2 begins when it ends.
    assert [found[name].at_s for name in ("s1/3", "s2/0", "s2/1", "s3/0")] == [13.0, 13.0, 18.0, 18.0]
    apart = {
        request.request_id: request
        for request in read_trace(path, TraceOptions(sessions_at_once=1, shared_beginnings=False))
    }
    assert shared_length(apart["s1/0"], apart["s2/0"]) == 0
    assert shared_length(apart["s1/0"], apart["s1/2"]) == 4 * 64


def test_shared_beginnings_never_make_different_blocks_equal(tmp_path: Path) -> None:
    """Two sub-agents of one kind with prompts that differ from the first block on, though their lengths are equal."""
    kind = {"t": 1.0, "type": "subagent", "tool_tokens": 64, "system_tokens": 64}
    whole = session(
        "s1",
        step(0.0, 64, (1,)),
        {**kind, "requests": [step(0.0, 128, (10, 11))]},
        {**kind, "requests": [step(0.0, 192, (10, 12, 13))]},
        {**kind, "requests": [step(0.0, 128, (20, 21))]},
    )
    _, one, two, three = read_trace(write(tmp_path / "trace.json", whole))
    assert shared_length(one, two) == 64
    assert shared_length(one, three) == 0
    blocks = {block for request in (one, two, three) for block in request.prompt.ids.tolist()}
    assert len(blocks) == 6


def test_sessions_at_once_and_sessions_max(tmp_path: Path) -> None:
    sessions = [session(f"s{n}", *(step(10.0 * k, 64, (k + 1,)) for k in range(2))) for n in range(5)]
    path = write(tmp_path / "trace", session("empty"), *sessions)
    order = [(request.request_id, request.at_s) for request in read_trace(path, TraceOptions(sessions_at_once=2))]
    assert order[:5] == [("s0/0", 0.0), ("s1/0", 0.0), ("s0/1", 10.0), ("s1/1", 10.0), ("s2/0", 10.0)]
    assert [at_s for _, at_s in order] == sorted(at_s for _, at_s in order)
    assert order[-1] == ("s4/1", 30.0)
    wanted = TraceOptions(sessions_max=3, sessions_at_once=9)
    assert {request.session for request in read_trace(path, wanted)} == {"s0", "s1"}


@st.composite
def agent_sessions(draw: st.DrawFn) -> Json:
    """Sessions in which each request keeps a random part of the one before."""
    requests, ids, following = [], list[int](), 1
    for position in range(draw(st.integers(1, 8))):
        ids = ids[: draw(st.integers(0, len(ids)))]
        added = draw(st.integers(0, 5)) + (not ids)
        ids = [*ids, *range(following, following + added)]
        following += added + draw(st.integers(0, 3))
        requests.append(step(float(position), len(ids) * 64 + draw(st.integers(0, 63)), ids))
    return session("s", *requests, tools=draw(st.integers(0, 300)), system=draw(st.integers(0, 300)))


def recoded(whole: Json) -> Json:
    """Write each hash_ids as runs, as the one-line-a-session form has them."""
    before: list[int] = []
    requests = []
    for request in whole["requests"]:
        ids = request["hash_ids"]
        kept = next(
            (n for n, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
        runs: list[list[int]] = []
        for block in ids[kept:]:
            if runs and sum(runs[-1]) == block:
                runs[-1][1] += 1
            else:
                runs.append([block, 1])
        short = {key: value for key, value in request.items() if key != "hash_ids"}
        requests.append({**short, "h": [kept, *(number for run in runs for number in run)]})
        before = ids
    return {**whole, "requests": requests}


@examples(60)
@given(whole=agent_sessions(), scale=st.sampled_from([1.0, 0.5, 1 / 8, 1 / 64]), beginnings=st.booleans())
def test_both_forms_and_any_scale_keep_equal_blocks_equal(
    tmp_path_factory: pytest.TempPathFactory, whole: Json, scale: float, beginnings: bool
) -> None:
    folder = tmp_path_factory.mktemp("trace")
    options = TraceOptions(length_scale=scale, shared_beginnings=beginnings)
    one = list(read_trace(write(folder / "raw.json.gz", whole, packed=True), options))
    two = list(read_trace(write(folder / "short.jsonl", recoded(whole)), options))
    pretty = folder / "pretty.json"
    pretty.write_text(json.dumps(whole, indent=1))
    three = list(read_trace(pretty, options))
    assert [tokens_of(request) for request in one] == [tokens_of(request) for request in two]
    assert [tokens_of(request) for request in one] == [tokens_of(request) for request in three]
    made: dict[int, int] = {}
    for request, recorded in zip(one, whole["requests"], strict=True):
        ids = recorded["hash_ids"]
        assert len(request.prompt.ids) == len(ids)
        for own, block in zip(ids, request.prompt.ids.tolist(), strict=True):
            assert made.setdefault(own, block) == block
    assert len(set(made.values())) == len(made)


BAD_LINES: list[tuple[Callable[[], Json | str], str]] = [
    (lambda: "{not json", r"line 2: not valid JSON .*expected a Mooncake request"),
    (lambda: '"text"', r"line 2: Expected `object`, got `str`"),
    (lambda: {"timestamp": 1, "input_length": 5, "output_length": 1}, r"line 2: .*missing required field `hash_ids`"),
    (lambda: mooncake(tokens="many"), r"line 2: Expected `int`, got `str` - at `\$.input_length`"),  # type: ignore[arg-type]
    (lambda: mooncake(ids=[1, 2, "x"]), r"line 2: Expected `int`, got `str` - at `\$.hash_ids\[2\]`"),  # type: ignore[list-item]
    (lambda: mooncake(tokens=-4), r"line 2: Expected `int` >= 1 - at `\$.input_length`"),
    (lambda: mooncake(tokens=0, ids=()), r"line 2: Expected `int` >= 1 - at `\$.input_length`"),
    (lambda: mooncake(tokens=1 << 40), r"line 2: Expected `int` <= 16777216 - at `\$.input_length`"),
    (lambda: mooncake(output=-1), r"line 2: Expected `int` >= 0 - at `\$.output_length`"),
    (lambda: mooncake(ids=(-1, 2, 3)), r"line 2: Expected `int` >= 0 - at `\$.hash_ids\[0\]`"),
    (lambda: mooncake(ids=(1,)), r"line 2: hash_ids has 1 ids, but 1030 tokens have 3 blocks of 512"),
    (lambda: mooncake(ids=(1, 2, 3, 4)), r"line 2: hash_ids has 4 ids, but 1030 tokens have 3 blocks"),
    (lambda: mooncake(at_ms=4), r"line 2: timestamp 4 ms is earlier than that of the previous request, 5 ms"),
    (lambda: session("s"), r"line 2: .*missing required field `timestamp`; expected a Mooncake request"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_mooncake_line_is_named(
    tmp_path: Path, bad: Callable[[], Json | str], message: str, packed: bool
) -> None:
    requests = read_trace(write(tmp_path / "trace.jsonl", mooncake(5), bad(), mooncake(9), packed=packed))
    assert next(requests).request_id == "request-1"
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl, " + message):
        next(requests)


def short_form(*runs: int, tokens: int) -> Json:
    return {"t": 1.0, "type": "n", "in": tokens, "out": 1, "h": list(runs)}


BAD_SESSIONS: list[tuple[Json, str]] = [
    (session("s1", step(0.0, 64, (1,))), "session 's1' occurs twice in the file"),
    (session("b", {**step(0.0, 64, (1,)), "type": "other"}), r"Invalid value 'other' - at `\$.requests\[0\].type`"),
    (session("b", {**step(0.0, 64, (1,)), "in": -64}), r"Expected `int` >= 1 - at `\$.requests\[0\].in`"),
    (session("b", step(-1.0, 64, (1,))), r"Expected `float` >= 0.0 - at `\$.requests\[0\].t`"),
    (session("b", step(0.0, 200, (1, 2))), "request 0 has ids of 2 blocks, but 200 tokens have 3 full blocks of 64"),
    (session("b", step(0.0, 64, (1,), h=[0, 1, 1])), "request 0 must have either h or hash_ids"),
    (
        session("b", step(3.0, 64, (1,)), step(2.0, 64, (1,))),
        "request 1 at 2.0 s is earlier than the previous one at 3.0 s",
    ),
    (session("b", short_form(0, 1, tokens=64)), "request 0: h must be .*, not 2 numbers"),
    (session("b", short_form(2, tokens=128)), "request 0 keeps 2 blocks of the previous one, which has 0"),
    # A length that exceeds any memory is refused before it is allocated.
    (session("b", short_form(0, 1, 1 << 60, tokens=64)), "request 0 has ids of 1152921504606846976 blocks"),
    ({"id": "b", "block_size": 64}, "missing required field `requests`"),
    ({**session("b"), "block_size": 0}, r"Expected `int` >= 1 - at `\$.block_size`"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SESSIONS, ids=range(len(BAD_SESSIONS)))
def test_a_bad_session_is_named(tmp_path: Path, bad: Json, message: str) -> None:
    path = write(tmp_path / "trace.jsonl", AGENT, bad)
    with pytest.raises(InvalidRequest, match=r"trace\.jsonl, line 2: .*" + message):
        list(read_trace(path, TraceOptions(sessions_at_once=1)))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"trace .*none\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "empty").write_bytes(b"\n\n")
    with pytest.raises(InvalidRequest, match=r"is empty; expected a Mooncake request.* or an agent session"):
        read_trace(tmp_path / "empty")
    with pytest.raises(InvalidRequest, match="line 1: has the fields a; expected"):
        read_trace(write(tmp_path / "foreign", {"a": 1}))
    with pytest.raises(InvalidRequest, match="line 1: not valid JSON"):
        read_trace(write(tmp_path / "nested", '{"requests":' + "[" * 100_000))


@pytest.mark.parametrize("damage", ["cut", "flipped", "not deflate"])
def test_a_damaged_gzip_file_is_named_with_the_line_reached(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "trace.gz", *(mooncake(n, ids=(n, n + 1, n * n)) for n in range(3000)), packed=True)
    whole = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        whole[-6] ^= 0xFF  # The checksum at the end.
        path.write_bytes(whole)
    else:
        path.write_bytes(whole[:10] + b"\xff" * 40)
    with pytest.raises(InvalidRequest, match=r"trace\.gz, line \d+: the gzip stream is damaged or cut off"):
        list(read_trace(path))


def test_a_line_of_any_length_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.traces.LINE_BYTES_MAX", 1000)
    path = write(tmp_path / "trace.gz", "0" * 100_000, packed=True)
    with pytest.raises(InvalidRequest, match="line 1: the line is longer than 1000 bytes"):
        read_trace(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_scale": 0.0}, "length_scale must be above 0 and at most 1, not 0.0"),
        ({"length_scale": 2.0}, "length_scale must be"),
        ({"time_scale": -1.0}, "time_scale must be a finite number of at least 0"),
        ({"time_scale": float("nan")}, "time_scale must be"),
        ({"requests_max": -1}, "requests_max must be an int from 0, not -1"),
        ({"sessions_at_once": 0}, "sessions_at_once must be an int from 1, not 0"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        TraceOptions(**options)  # type: ignore[arg-type]  # Wrong values are the point.


def test_reuse_counts_full_pages_of_prompts_and_kept_output() -> None:
    def packed(*tokens: int) -> bytes:
        return np.array(tokens, dtype="<u4").tobytes()

    first = (packed(1, 2, 3), packed(4, 5))
    again = (packed(1, 2, 3, 4, 9), packed(7))
    assert list(reusable_tokens([first, again, first], 2)) == [0, 4, 2]
    assert list(reusable_tokens([first, again], 2, keep_output=False)) == [0, 2]
    # The last output token has no KV: it cannot fill a page.
    assert list(reusable_tokens([first, (packed(1, 2, 3, 4, 5), b"")], 5)) == [0, 0]


def test_multi_turn_acceptance_rates() -> None:
    """Prompts of 64, 256, …, 1,024 tokens at page 64: the hit rates that are known exactly."""
    stream = iter(range(10**6))
    prompt = [next(stream) for _ in range(64)]
    rounds = []
    for _ in range(6):
        output = [next(stream) for _ in range(129)]
        rounds.append((np.array(prompt, "<u4").tobytes(), np.array(output, "<u4").tobytes()))
        prompt = [*prompt, *output, *(next(stream) for _ in range(63))]
    lengths = [len(tokens) // 4 for tokens, _ in rounds]
    assert lengths == [64, 256, 448, 640, 832, 1024]
    for keep_output, rates, total in (
        (True, [0, 0.750, 0.857, 0.900, 0.923, 0.9375], 0.882),
        (False, [0, 0.250, 0.571, 0.700, 0.769, 0.8125], 0.686),
    ):
        hits = list(reusable_tokens(rounds, 64, keep_output=keep_output))
        assert [hit / length for hit, length in zip(hits, lengths, strict=True)] == pytest.approx(rates, abs=5e-4)
        assert sum(hits) / sum(lengths) == pytest.approx(total, abs=5e-4)
