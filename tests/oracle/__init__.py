"""An event-driven reference for jaxserve, written from `jaxserve/engine/SEMANTICS.md` alone; it shares no code with the engine."""
