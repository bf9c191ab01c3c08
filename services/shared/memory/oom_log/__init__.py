"""Reading logs: out-of-memory messages, tracebacks and what else they state."""
