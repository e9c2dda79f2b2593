"""SGLang's own cache controller and host pool, from its wheel, over tidekv's storage: a program of its own.

    python -m tests.support.sglang_controller write|read URI FIRST_TOKEN FILE

"write" fills a host pool with noise, lets the controller back 4 pages up, and writes their bytes to FILE. "read" lets
the controller prefetch the pages of the same tokens, and writes what came. Both in tidekv's order of a page.

TIDEKV_TEST_SGLANG names an unpacked wheel of sglang 0.5.23, TIDEKV_TEST_SGLANG_PACKAGES a directory with what it
imports and tests do not have:

    pip install --no-deps --target DIR psutil orjson pybase64 triton dill apache-tvm-ffi==0.1.11

What is only imported and never used here is replaced by nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import types
from pathlib import Path

from tests.support.stand_ins import Nothing, make_importable

UNUSED = {"torchvision", "IPython", "sentencepiece", "compressed_tensors", "gguf"}
LAYERS, HEADS, DIM, SIZE, PAGES = 3, 2, 4, 8, 4


def prepare() -> None:
    """Make SGLang importable, without what its own __init__ starts."""
    make_importable(
        "sglang", wheel=os.environ["TIDEKV_TEST_SGLANG"], packages=os.environ["TIDEKV_TEST_SGLANG_PACKAGES"]
    )
    sys.meta_path.append(Nothing(UNUSED))


def main(what: str, uri: str, first_token: int, file: Path) -> None:
    prepare()
    import torch
    import torch.distributed as dist
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.runtime_context import get_parallel

    from tests.support.waits import LIMIT_S
    from tidekv.engine.integrations.sglang import storage_thread

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
    device = MHATokenToKVPool(
        size=128,
        page_size=SIZE,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    host = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        2.0,
        0,
        SIZE,
        "page_first",
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=128,
        start_layer=0,
        end_layer=LAYERS,
    )
    storage_thread.LOOK_UP_S = LIMIT_S  # A busy machine has as long as it takes.
    extra = {
        "backend_name": "tidekv",
        "module_path": "tidekv.engine.integrations.sglang.hicache",
        "class_name": "TidekvHiCacheStorage",
        "interface_v1": 1,
        "uri": uri,
        "model": "m",
    }
    tokens = list(range(first_token, first_token + PAGES * SIZE))
    one_rank = dict.fromkeys(("attn_dcp_size", "tp_size", "pp_size", "attn_tp_size"), 1)
    first_rank = dict.fromkeys(("attn_dcp_rank", "tp_rank", "pp_rank", "attn_tp_rank"), 0)
    with get_parallel().override(**one_rank, **first_rank):
        controller = HiCacheController(
            types.SimpleNamespace(get_kvcache=lambda: device, device="cpu"),
            host,
            SIZE,
            dist.group.WORLD,
            threading.Event(),
            storage_backend="dynamic",
            prefetch_threshold=SIZE,
            model_name="x",
            storage_backend_extra_config=extra,
            io_backend="direct",
            write_policy="write_through",
        )
        if what == "write":
            host.kv_buffer.normal_(generator=torch.Generator().manual_seed(first_token))
            rows = host.alloc(len(tokens))
            hashes = get_storage_hash_str(tokens, None, page_size=SIZE)
            controller.write_storage(rows, tokens, hash_value=hashes)
            done = controller.ack_backup_queue.get(timeout=60)
            assert done.completed_tokens == len(tokens), done.completed_tokens
        else:
            controller.prefetch("r1", tokens)
            # What its scheduler does between the query and the reads.
            operation = controller.prefetch_hit_queue.get(timeout=60)
            assert operation.storage_hit_count == len(tokens), operation.storage_hit_count
            rows = operation.host_indices = host.alloc(operation.storage_hit_count)
            controller.prefetch_buffer.put(operation)
            completed = 0
            while not (ack := controller.ack_prefetch_queue.get(timeout=60)).completed_req:
                completed = ack.completed_tokens
            assert completed == len(tokens), completed
        controller.detach_storage_backend()
    pages = [host.kv_buffer[:, start : start + SIZE] for start in rows[::SIZE].tolist()]
    # From [K or V, token, layer, head, element] to [layer, K or V, token, head, element].
    file.write_bytes(b"".join(page.numpy().transpose(2, 0, 1, 3, 4).tobytes() for page in pages))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
