"""Worker processes, fixtures and models that only tests use."""
