"""Limits of control links, as they are given to a NIXL transport. No agent is needed for them."""

from __future__ import annotations

import asyncio

import pytest

from tidekv.states.errors import InvalidConfig, TransferFailed
from tidekv.transports.base import Link
from tidekv.transports.control.peer_backoff import BackoffLimits
from tidekv.transports.nixl.transport import ListenOptions, NixlTransport


async def stay(link: Link) -> None:
    await asyncio.Event().wait()


async def test_as_many_links_are_taken_as_was_said() -> None:
    listening = NixlTransport("prefill", listening=ListenOptions(links_max=2))
    listener = await listening.listen("127.0.0.1:0", stay)
    dialling = NixlTransport("decode", dials=["127.0.0.1:*"])
    links = [await dialling.dial(listener.address) for _ in range(2)]
    with pytest.raises(TransferFailed):
        await dialling.dial(listener.address)
    assert listener.statistics()["links_over_limit"] == 1
    for link in links:
        await link.close()
    await listener.close()


async def test_whoever_offends_more_often_than_was_said_is_kept_away() -> None:
    limits = BackoffLimits(forgiven=0, pause_s=100.0, pause_s_max=100.0)
    listening = NixlTransport("prefill", secret="right", listening=ListenOptions(violations=limits))
    listener = await listening.listen("127.0.0.1:0", stay)
    for secret in ("wrong", "right"):
        with pytest.raises(TransferFailed):
            await NixlTransport("decode", dials=["127.0.0.1:*"], secret=secret).dial(listener.address)
    assert listener.statistics()["links_in_pause"] == 1
    await listener.close()


def test_no_links_at_all_are_refused_at_once() -> None:
    for limit in ("links_max", "links_per_address_max"):
        with pytest.raises(InvalidConfig, match=limit):
            ListenOptions(**{limit: 0})


async def test_one_address_has_as_many_links_as_was_said() -> None:
    listener = await NixlTransport("prefill", listening=ListenOptions(links_per_address_max=1)).listen(
        "127.0.0.1:0", stay
    )
    dialling = NixlTransport("decode", dials=["127.0.0.1:*"])
    link = await dialling.dial(listener.address)
    with pytest.raises(TransferFailed):
        await dialling.dial(listener.address)
    assert listener.statistics()["links_over_quota"] == 1
    await link.close()
    await listener.close()
