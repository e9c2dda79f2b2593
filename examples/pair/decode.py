"""A decode worker: restores prompts from its cache and from prefill. `python decode.py [HOST:PORT]`"""

import asyncio
import sys

import tidekv

LAYOUT = tidekv.KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32", page_size=16)


async def main(prefill: str) -> None:
    device = tidekv.DevicePool.allocate(LAYOUT, num_pages=256)
    host = tidekv.HostPool.allocate(LAYOUT, num_pages=512)
    transport = tidekv.NixlTransport(name="decode-0")
    async with tidekv.DecodeEngine(tidekv.EngineConfig(), device=device, host=host, transport=transport) as engine:
        prompt = list(range(1000, 1200))
        for turn in ("turn-1", "turn-2"):
            request = tidekv.DecodeRequest(request_id=turn, tokens=prompt, prefill=prefill, send_prompt=True)
            ready = await engine.restore(request)
            print(turn, ready.sources)
            output = [ready.first_token]
            for token in range(40):  # Stand in for decoding: read and append KV in ready.pages.
                engine.grow(ready)
                output.append(token)
            await engine.finish(ready, output)
            prompt += [*output, 5, 6, 7]  # The next turn begins with all of this one.


try:
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7000"))
except tidekv.TidekvError as error:
    sys.exit(f"decode.py: {error}")
