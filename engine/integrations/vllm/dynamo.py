"""A plugin of vLLM that makes Dynamo's worker know `TidekvConnector`: entry point `vllm.general_plugins`.

Dynamo's vLLM worker asks a table of its own which `kv_transfer_params` a connector takes from the router and gives to
decode, and a prefill worker refuses requests for a connector that is not there. Those of `TidekvConnector` are those of
`NixlConnector`. vLLM calls plugins in every process before it reads its configuration. Without Dynamo the plugin does
nothing.
"""

from __future__ import annotations

import sys
from typing import Final

from tidekv.engine.log import engine_log

LOG = engine_log("tidekv.vllm")
TABLE: Final = "dynamo.vllm.kv_connector_protocols"
"""The module of Dynamo's worker that has the table."""
CONNECTOR: Final = "TidekvConnector"


def register() -> None:
    """Add the connector to the table, if Dynamo's worker has been imported."""
    module = sys.modules.get(TABLE)
    if module is None:
        return
    try:
        module.KV_CONNECTOR_PROTOCOLS.setdefault(CONNECTOR, module.NixlConnectorProtocol)
    except AttributeError as error:
        # Another version of Dynamo: its worker says by itself if it does not know the connector.
        LOG.warning("Dynamo's table of connectors is not the one that is known here", module=TABLE, cause=str(error))
