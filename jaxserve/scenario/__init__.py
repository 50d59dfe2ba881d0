"""From a scenario file to what the engine takes. Host only; `compile.py` alone imports the engine."""
