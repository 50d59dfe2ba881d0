"""Policies: where each request goes. A new one is one small file and one line in `registry.py`."""
