"""Settings of a vLLM connector, and the translation of vLLM's configuration into tidekv's terms.

A configuration that cannot be shared is refused here, by name, before anything is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar  # vLLM's configuration is not typed here: tests and type checks go without vLLM.

import msgspec

from tidekv.backends.keys.page_keys import PageKeys
from tidekv.backends.layout import DTYPES, KVLayout
from tidekv.backends.storage.options import parse_size
from tidekv.backends.storage.uri import split_uri
from tidekv.engine.integrations.vllm.drafts import depends_on_next_token, model_of
from tidekv.states.errors import InvalidConfig
from tidekv.states.validation import unknown

T = TypeVar("T")
KINDS: Final = {"FullAttentionSpec": "mha", "MLAAttentionSpec": "mla"}
"""The kind of a page layout by vLLM's name of what a group of layers keeps."""
HINT: Final = "kv_connector_extra_config"
# Backends of full-attention layers whose element row is K and V of one token and head, and of layers with a latent
# vector. Others pack a block in an order of their own, which is known of CPU_ATTN only (module cpu_attn).
MHA_BACKENDS: Final = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
CPU_BACKEND: Final = "CPU_ATTN"
MLA_BACKENDS: Final = ("FLASHMLA", "TRITON_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "AMX_MLA")
UNSCALED: Final = (0, 1)  # KVQuantMode NONE and FP8_PER_TENSOR: no scales within a block.


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `kv_connector_extra_config`."""

    uri: str
    """URI of the storage, such as "file:/var/lib/tidekv?capacity=200GB"."""
    options: dict[str, object] | str | None = None
    """Further options of the storage engine."""
    model: str | None = None
    """`EngineConfig(model=…)` of the decode engines. None uses vLLM's name of the model."""
    page_size: int | None = None
    """Tokens per page, a multiple of vLLM's block size. None uses the block size."""
    host: int | str = "4GB"
    """Bytes of host memory of each worker, for pages under way and those last used (L2)."""
    threshold_tokens: int = 0
    """Minimum number of tokens for which a load is worthwhile."""
    lookup_timeout_s: float = 0.5
    """Maximum seconds that a request waits for its look-up."""
    load_timeout_s: float = 10.0
    """Maximum seconds of a load. Pages not loaded by then are recomputed."""
    save_timeout_s: float = 30.0
    """Maximum seconds for which one batch of writes may start work."""

    def __post_init__(self) -> None:
        for name in ("lookup_timeout_s", "load_timeout_s", "save_timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{HINT}: {name} must be more than 0, not {getattr(self, name)!r}")
        if self.threshold_tokens < 0:
            raise InvalidConfig(f"{HINT}: threshold_tokens must be at least 0, not {self.threshold_tokens!r}")
        if (parse_size(self.host) or 0) <= 0:
            raise InvalidConfig(f"{HINT}: host must be a size such as 4GB or 512MiB, not {self.host!r}")
        if split_uri(self.uri).scheme == "memory":
            raise InvalidConfig(
                f"{HINT}: memory: is local to one process, but vLLM's scheduler and workers are several"
            )

    @property
    def host_bytes(self) -> int:
        """`host` in bytes."""
        return parse_size(self.host) or 0


def read_settings(given: Mapping[str, object]) -> ConnectorSettings:
    """Parse the settings. Raises InvalidConfig, which names the wrong option."""
    names = ConnectorSettings.__struct_fields__
    for name in sorted(set(given) - set(names)):
        raise InvalidConfig(f"{HINT}: {unknown(name, names, 'option')}")
    if not isinstance(given.get("uri"), str):
        raise InvalidConfig(f'{HINT} needs "uri", such as "file:/var/lib/tidekv?capacity=200GB"')
    try:
        return msgspec.convert(dict(given), ConnectorSettings)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InvalidConfig):
            raise error.__cause__ from None
        raise InvalidConfig(f"{HINT}: {error}") from error


@dataclass(frozen=True, slots=True)
class Shared:
    """The common part of both sides of a connector: page layout, namespace, and the directions that are enabled.

    `ranks` counts the namespaces that pages are in: 1 if all ranks hold the same latent vectors. `bigram_keys`: pages
    have the KV of a draft, too, which depends on the token after it.
    """

    settings: ConnectorSettings
    layout: KVLayout
    model: str
    block_size: int
    num_blocks: int
    layer_names: tuple[str, ...]
    rank: int
    ranks: int
    is_writer: bool
    loads: bool
    saves: bool
    bigram_keys: bool = False

    @property
    def page_keys(self) -> PageKeys:
        """What makes the keys of pages."""
        return PageKeys(self.layout.page_size, bigrams=self.bigram_keys)

    @property
    def blocks_per_page(self) -> int:
        """Number of vLLM blocks per page."""
        return self.layout.page_size // self.block_size


def read_shared(vllm_config: Any, kv_cache_config: Any) -> Shared:
    """Derive the common part from vLLM's configuration. Raises InvalidConfig for what tidekv cannot share."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    settings = read_settings(transfer.kv_connector_extra_config)
    check_shareable(vllm_config)
    bigram_keys = depends_on_next_token(vllm_config.speculative_config)
    check_one_group(kv_cache_config)
    group = kv_cache_config.kv_cache_groups[0]
    layout = _layout_of(group.kv_cache_spec, len(group.layer_names), settings.page_size)
    is_mla = layout.kind == "mla"
    tp_rank, tp_size = parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size
    return Shared(
        settings=settings,
        layout=layout,
        model=settings.model or model_of(vllm_config),
        block_size=int(group.kv_cache_spec.block_size),
        num_blocks=int(kv_cache_config.num_blocks),
        layer_names=tuple(group.layer_names),
        rank=0 if is_mla else tp_rank,
        ranks=1 if is_mla else tp_size,
        is_writer=not is_mla or tp_rank == 0,
        loads=bool(transfer.is_kv_consumer),
        saves=bool(transfer.is_kv_producer),
        bigram_keys=bigram_keys,
    )


def check_shareable(vllm_config: Any) -> None:
    """Raise InvalidConfig, which names the option, if the KV of this vLLM cannot leave it or enter it."""
    if vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise InvalidConfig(
            'set "kv_load_failure_policy": "recompute" in the KV transfer config: by vLLM\'s default a page that '
            "cannot be loaded fails its request, and a cache must never do that"
        )
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(vllm_config.parallel_config, name, 1) != 1:
            raise InvalidConfig(
                f"pages of {name} {getattr(vllm_config.parallel_config, name)} cannot be shared; it must be 1"
            )


def check_one_group(kv_cache_config: Any) -> None:
    """Raise InvalidConfig, which names what they keep, unless all layers have one group of blocks, for all tokens."""
    specs = [" and ".join(kinds_of(group.kv_cache_spec)) for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1:
        raise InvalidConfig(
            f"KV in {len(specs)} groups ({', '.join(specs) or 'none'}) cannot be shared in the storage role; that of "
            "one group can. With --disable-hybrid-kv-cache-manager vLLM keeps full attention and sliding windows in "
            'one group; the hand-over role ("handover") takes windows with blocks of their own'
        )
    if len(layer_specs(kv_cache_config.kv_cache_groups[0].kv_cache_spec)) > 1:
        raise InvalidConfig(
            "KV of layers with other heads than the first one, as those of a draft may have, cannot be shared in the "
            'storage role; the hand-over role ("handover") takes it'
        )
    if specs[0] not in KINDS:
        # Behind a window vLLM gives blocks to other requests while a prompt is still computed.
        raise InvalidConfig(
            f"KV of {specs[0]} cannot be shared, that of {' and '.join(KINDS)} can: serve this model without this "
            "connector"
        )


def layer_specs(spec: Any) -> list[Any]:
    """Return the descriptions of a group's layers: several if they differ, as those of a draft may; otherwise one."""
    layers = getattr(spec, "kv_cache_specs", None)
    return [spec] if layers is None else list(layers.values())


def kinds_of(spec: Any) -> list[str]:
    """Return vLLM's names of what the layers of a group keep."""
    return sorted({type(each).__name__ for each in layer_specs(spec)})


def backends_of(vllm_config: Any, layer_names: tuple[str, ...]) -> set[str]:
    """Return the names of the attention backends of these layers."""
    layers = vllm_config.compilation_config.static_forward_context
    return {layers[name].get_attn_backend().get_name() for name in layer_names if name in layers}


def in_order(by_layer: Mapping[str, T]) -> list[T]:
    """Return what layers have, by the numbers in their names: "layers.10.attn" comes after "layers.9.attn"."""
    return [by_layer[name] for name in sorted(by_layer, key=_numbers)]


def _numbers(name: str) -> tuple[tuple[int, ...], str]:
    return tuple(int(part) for part in name.split(".") if part.isdigit()), name


def check_backends(names: set[str], layout: KVLayout) -> None:
    """Raise InvalidConfig for attention backends whose order of a block is unknown, or differs between layers."""
    known = MLA_BACKENDS if layout.kind == "mla" else (*MHA_BACKENDS, CPU_BACKEND)
    unknown = sorted(names - set(known))
    if unknown:
        raise InvalidConfig(
            f"blocks of attention backend {unknown[0]} cannot be shared; those of {', '.join(known)} can"
        )
    if CPU_BACKEND in names and len(names) > 1:
        raise InvalidConfig(f"layers of {CPU_BACKEND} and of {', '.join(sorted(names - {CPU_BACKEND}))} in one model")


def _layout_of(spec: Any, num_layers: int, page_size: int | None) -> KVLayout:
    kind = KINDS[type(spec).__name__]
    block_size = int(spec.block_size)
    page_size = block_size if page_size is None else page_size
    if page_size < 1 or page_size % block_size:
        raise InvalidConfig(f"{HINT}: page_size must be a multiple of vLLM's block size, {block_size}, not {page_size}")
    dense = {"num_head_slots": None, "state_content_bytes": None, "page_size_padded": None, "tokens_per_state": 1}
    for name, plain in dense.items():
        if getattr(spec, name) != plain:
            raise InvalidConfig(f"KV blocks with {name} {getattr(spec, name)!r} cannot be shared: they are packed")
    if int(spec.kv_quant_mode) not in UNSCALED:
        raise InvalidConfig(
            f"KV quantized as {spec.kv_quant_mode!r} cannot be shared: its scales are within the blocks"
        )
    if spec.head_size_v != (spec.head_size if kind == "mha" else 0):
        raise InvalidConfig(
            f"K of {spec.head_size} and V of {spec.head_size_v} elements cannot be shared; equal ones can"
        )
    dtype = next((name for name, known in DTYPES.items() if known == spec.dtype), None)
    if dtype is None:
        raise InvalidConfig(f"KV of {spec.dtype} cannot be shared; tidekv knows {', '.join(DTYPES)}")
    return KVLayout(
        num_layers=num_layers,
        num_kv_heads=int(spec.num_kv_heads),
        head_dim=int(spec.head_size),
        dtype=dtype,
        page_size=page_size,
        kind=kind,
    )
