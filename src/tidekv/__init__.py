"""tidekv: a tiered decode-side KV cache for prefill/decode disaggregated LLM serving."""
