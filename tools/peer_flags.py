"""Flags of SGLang with the equivalent options of tidekv, for docs/configuration.md."""

from __future__ import annotations

from typing import Final

FLAGS: Final[tuple[tuple[str, str, str], ...]] = (
    ("--page-size", "cache.page_size", "The same."),
    ("--enable-hierarchical-cache", "cache.l2", "A host pool exists unless its size is 0."),
    ("--hicache-ratio 2", "cache.l2", '`l2 = "2x"`.'),
    ("--hicache-size 100", "cache.l2", '`l2 = "100GB"`; for the whole worker.'),
    ("--hicache-host-memory-fraction 0.8", "cache.l2", '`l2 = "80 %"` of what is free.'),
    ("--mem-fraction-static 0.8", "cache.l1", '`l1 = "80 %"` of what is free on the device when the pool is created.'),
    (
        "--hicache-write-policy write_through",
        "engine.storage.write",
        '`write = "through"`: pages go to L2 and storage when a request is finished.',
    ),
    (
        "--hicache-write-policy write_through_selective",
        "engine.storage.write",
        '`write = "selective"` with `write_hits_min`; all pages go to the host, pages with enough hits to storage.',
    ),
    (
        "--hicache-write-policy write_back",
        "engine.storage.write",
        '`write = "back"` with `write_back_ahead`: pages are written shortly before they are evicted.',
    ),
    ("--hicache-io-backend, --hicache-mem-layout", "", "No equivalent: L2 is page-first, with one kind of copy."),
    (
        "--hicache-storage-backend file",
        "storage.uri",
        '`uri = "file:/path?capacity=200GB"`; also redis:, s3:, mooncake:.',
    ),
    ("--hicache-storage-backend-extra-config", "storage.options", "A table; in variables a JSON object."),
    (
        "--hicache-storage-prefetch-policy",
        "engine.storage.prefetch",
        "The same three names: best_effort, wait_complete, timeout.",
    ),
    ("--disaggregation-mode prefill", "prefill.listen", "`tidekv prefill`, or embed `PrefillPeer`."),
    ("--disaggregation-mode decode", "decode.prefill", "`tidekv decode`, or embed `DecodeEngine`."),
    ("--disaggregation-transfer-backend nixl", "transport.backends", "Always NIXL; the table names its plugins."),
    ("--disaggregation-bootstrap-port", "prefill.listen", "The port of `listen`; decode dials it."),
    ("--disaggregation-ib-device", "", "UCX_NET_DEVICES in the environment."),
    ("--disaggregation-decode-enable-radix-cache", "", "Always enabled."),
    (
        "--num-reserved-decode-tokens",
        "engine.admission.growth_reserve_pages",
        "In pages; refilled as it is used.",
    ),
    (
        "--kv-events-config",
        "engine.kv_events.endpoint",
        "And `replay`, `topic`, `kept_batches` beside it; see [KV events](kv-events.md).",
    ),
)
"""Flag, path of the option (empty if there is none), and a note."""
