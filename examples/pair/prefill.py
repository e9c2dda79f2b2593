"""A prefill worker: computes the KV of prompts and hands it over. `python prefill.py [HOST:PORT]`"""

import asyncio
import signal
import sys

import tidekv

LAYOUT = tidekv.KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", page_size=16)
pool = tidekv.DevicePool.allocate(LAYOUT, num_pages=256)
turn = asyncio.Lock()


def compute(pages: list[int]) -> None:
    for buffer in (*pool.k, *pool.v):
        buffer[pages] = 1.0  # Stand-in for a model, which writes the KV of room.tokens to these pages.


async def serve(room: tidekv.Room) -> None:
    async with turn:  # One hand-over at a time, on the same pages; a real worker has a page allocator.
        pages = list(range(-(-room.prompt_tokens // LAYOUT.page_size)))
        await asyncio.to_thread(compute, pages)  # On the loop it would delay the links: decode would see silence.
        await room.send(pages, start_token=0)  # Writes only what decode does not have.
        await room.finish(first_token=7, aux={})
        print(f"{room.request_id}: {await room.received()}; decode had {room.decode_prefix_len} tokens", flush=True)


async def main(listen: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)  # Before others learn the address.
    transport = tidekv.NixlTransport(name="prefill-0")
    async with tidekv.PrefillPeer(
        tidekv.PrefillConfig(listen=listen), device=pool, transport=transport, on_room=serve
    ) as peer:
        print("listening on", peer.address, flush=True)
        await stopped.wait()


try:
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000"))
except tidekv.TidekvError as error:
    sys.exit(f"prefill.py: {error}")
except KeyboardInterrupt:
    print("ended")
