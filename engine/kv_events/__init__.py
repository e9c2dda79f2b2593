"""KV events: publish to prefix-aware routers what is cached here, in the format that vLLM, SGLang and Dynamo share."""
