"""SGLang's four classes of a transfer backend, over `DecodeEnd` and `PrefillEnd`.

They derive from SGLang's common classes, whose bootstrap service and topology they use: prefill's ranks register the
addresses at which they listen, and decode asks for them. Everything after that goes over tidekv's own links. All calls
come from the scheduler's thread.
"""

from __future__ import annotations

from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from tidekv.engine.integrations.sglang.handover.manager import TidekvManager
from tidekv.engine.integrations.sglang.handover.receiver import TidekvReceiver
from tidekv.engine.integrations.sglang.handover.sender import TidekvSender


class TidekvBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]  # SGLang has no types.
    """SGLang's bootstrap service, at which prefill's ranks register their addresses."""


CLASSES = {
    "manager": TidekvManager,
    "sender": TidekvSender,
    "receiver": TidekvReceiver,
    "bootstrap_server": TidekvBootstrapServer,
}
"""By the names of SGLang's `KVClassType`."""
