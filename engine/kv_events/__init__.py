"""KV events: telling prefix-aware routers what is cached here, in the format of vLLM, which SGLang and Dynamo share."""
