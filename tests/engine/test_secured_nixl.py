"""Hand-over over NIXL between ends that are configured with a secret and TLS, through the public parameters alone."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tidekv import DecodeEngine, DecodeRequest, DevicePool, EngineConfig, KVLayout, NixlTransport, PrefillPeer
from tidekv.backends.keys.chain import pack_tokens
from tidekv.engine.synthetic.kv import SyntheticKV, prompt_digests
from tidekv.engine.synthetic.prefill import SyntheticPrefill
from tidekv.states.errors import PrefillCause, RequestFailed

pytestmark = pytest.mark.nixl

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
CERTIFICATE = Path(__file__).parent.parent / "transports" / "localhost.pem"
PROMPT = list(range(40))


def listening() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def with_certificate(context: ssl.SSLContext) -> ssl.SSLContext:
    context.load_cert_chain(CERTIFICATE)
    return context


def only_with_certificate(context: ssl.SSLContext) -> ssl.SSLContext:
    context.load_verify_locations(CERTIFICATE)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@asynccontextmanager
async def workers(prefill_transport: NixlTransport, decode_transport: NixlTransport) -> AsyncIterator[object]:
    pool, device = DevicePool.allocate(LAYOUT, 32), DevicePool.allocate(LAYOUT, 32)
    async with (
        PrefillPeer(device=pool, transport=prefill_transport, on_room=SyntheticPrefill(pool).serve) as peer,
        DecodeEngine(EngineConfig(), device=device, host=None, transport=decode_transport) as engine,
    ):

        async def restore(request_id: str) -> list[int]:
            """Restore the prompt, and return the wrong pages."""
            ready = await engine.restore(
                DecodeRequest(request_id=request_id, tokens=PROMPT, prefill=peer.address, send_prompt=True)
            )
            assert ready.sources["transfer"] == len(PROMPT)
            return SyntheticKV(device).verify(ready.pages.tolist(), prompt_digests(pack_tokens(PROMPT), 4))

        yield restore


async def test_a_prompt_is_handed_over_under_tls_and_a_secret() -> None:
    prefill = NixlTransport("prefill-0", secret="s3cret", listen_tls=only_with_certificate(listening()))
    decode = NixlTransport("decode-0", dials=["127.0.0.1:*"], secret="s3cret", dial_tls=with_certificate(trusting()))
    async with workers(prefill, decode) as restore:
        assert await restore("r1") == []


@pytest.mark.parametrize(
    ("decode_options", "words", "cause"),
    [
        ({"secret": "s3cret"}, "closed|cannot reach|did not answer", PrefillCause.UNREACHABLE),
        ({"secret": "s3cret", "dial_tls": "untrusting"}, "certificate verify failed", PrefillCause.MISCONFIGURED),
        ({"secret": "wrong", "dial_tls": "trusting"}, "secrets differ", PrefillCause.WRONG_SECRET),
    ],
    ids=["no TLS", "certificate unknown", "another secret"],
)
async def test_whoever_is_configured_in_another_way_fails_its_requests_in_words(
    decode_options, words: str, cause: PrefillCause
) -> None:
    contexts = {"untrusting": ssl.create_default_context, "trusting": trusting}
    if (kind := decode_options.get("dial_tls")) is not None:
        decode_options = decode_options | {"dial_tls": contexts[kind]()}
    prefill = NixlTransport("prefill-0", secret="s3cret", listen_tls=listening())
    async with workers(prefill, NixlTransport("decode-0", dials=["127.0.0.1:*"], **decode_options)) as restore:
        with pytest.raises(RequestFailed, match=words) as failed:
            await restore("r1")
        assert failed.value.cause == cause


async def test_prefill_takes_no_decode_worker_without_a_certificate_where_it_asks_for_one() -> None:
    prefill = NixlTransport("prefill-0", secret="s3cret", listen_tls=only_with_certificate(listening()))
    async with workers(
        prefill, NixlTransport("decode-0", dials=["127.0.0.1:*"], secret="s3cret", dial_tls=trusting())
    ) as restore:
        with pytest.raises(RequestFailed, match=r"127\.0\.0\.1"):
            await restore("r1")
