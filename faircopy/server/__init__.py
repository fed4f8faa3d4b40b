"""An OpenAI-compatible server: one thread owns the engine, an asynchronous front end talks to clients."""
