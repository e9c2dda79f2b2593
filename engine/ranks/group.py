"""Rank of an engine in a decode instance, and its connection to the others: `DecodeEngine(ranks=RankGroup(...))`.

With tensor parallelism each rank has an engine over its slice of the KV. Callers make the same calls on every rank, at
their own pace: restore, finish and retract of the same request ids with the same tokens. The order is that of rank 0.
An operation that one rank cannot do is done by none; if one rank fails, all fall back the same way.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tidekv.states.errors import InvalidConfig
from tidekv.states.handover.rank_place import SOLE, RankPlace
from tidekv.states.ranks.votes import RANKS_MAX
from tidekv.states.validation import Count, PositiveCount, Seconds, Text, check_fields, host_and_port
from tidekv.transports.ranks.channel import ChannelOptions, RankChannel
from tidekv.transports.slices import check_stages

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tidekv.states.settings import CoreSettings
    from tidekv.states.types import Identity
    from tidekv.transports.ranks.channel import RankOwner
else:
    ProcessGroup = Any  # Made by torch, which is imported only if a group is given.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Place of one rank among the ranks of an instance. Raises InvalidConfig for invalid values.

    Votes and the rank channel are not encrypted: the address belongs to a network that only the ranks can reach.
    """

    rank: Count
    ranks: PositiveCount
    address: Text
    """host:port at which rank 0 listens; the others dial it. The port is not 0: all ranks know it beforehand."""
    kv_heads_total: Count = 0
    """KV heads of the whole model; 0: as many as all ranks hold together. Required if there are more ranks than heads,
    so that some ranks hold copies; prefill must set the same.
    """
    stages: PositiveCount = 1
    """Pipeline stages: ranks are counted stage by stage, and those of a stage hold the KV of its layers. All ranks
    vote, and the first of the first stage leads. If prefill has another number of stages, all stages of each end must
    have equally many layers.
    """
    secret: Text = ""
    """Secret of the ranks; a rank with another one is refused, and so is a leader. Needed unless `address` is on
    loopback.
    """
    silence_s: Seconds = 5.0
    """Maximum seconds of silence; a rank that is silent for longer is lost."""
    vote_timeout_s: Seconds = 10.0
    """Maximum seconds of a vote; after that it has failed, and ranks that did not vote are lost."""
    hold_s: Seconds = 10.0
    """Maximum seconds that a call waits for the callers of all ranks; then all ranks refuse it. A request waits no
    longer than until its deadline.
    """
    form_timeout_s: Seconds = 60.0
    """Maximum seconds that entering the engine waits for the other ranks."""
    group: ProcessGroup | None = None
    """A gloo group of the same ranks for votes. None: the engine makes one, and a new one after a loss. An embedder's
    group cannot be made again, so the instance stops serving after a loss.
    """

    def __post_init__(self) -> None:
        check_fields(self, InvalidConfig)
        if self.ranks > RANKS_MAX or self.rank >= self.ranks:
            raise InvalidConfig(f"rank {self.rank} of {self.ranks}: there are 1 to {RANKS_MAX} ranks, counted from 0")
        check_stages(ranks=self.ranks, stages=self.stages)
        # All ranks know the port beforehand, so that it cannot be chosen by the system.
        host_and_port(self.address, "address", InvalidConfig)


def open_channel(group: RankGroup, owner: RankOwner, *, settings: bytes) -> RankChannel:
    """Return the channel of this rank to the others, not opened yet."""
    return RankChannel(
        owner,
        rank=group.rank,
        ranks=group.ranks,
        settings=settings,
        options=ChannelOptions(
            address=group.address,
            secret=group.secret,
            silence_s=group.silence_s,
            vote_timeout_s=group.vote_timeout_s,
            group=group.group,
        ),
    )


def place_of(group: RankGroup | None) -> RankPlace:
    """Return the place of a rank; without a group, that of a single rank."""
    if group is None:
        return SOLE
    return RankPlace(rank=group.rank, ranks=group.ranks, stages=group.stages, kv_heads_total=group.kv_heads_total)


def settings_digest(settings: CoreSettings, identity: Identity, *, stages: int = 1) -> bytes:
    """Return a digest of the options that must be equal on all ranks; stages have different layers."""
    if stages > 1:
        identity = msgspec.structs.replace(
            identity, **dict.fromkeys(("layers", "page_bytes"), 0), piece_bytes=(), components=()
        )
    return hashlib.sha256(msgspec.msgpack.encode((settings, identity))).digest()
