"""The engine: stacked arrays of all engines, advanced by jit-compiled scan steps. No files, no tables, no concrete policy."""
