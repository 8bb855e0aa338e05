"""All that knows vLLM: what runs inside its workers while weights arrive."""
