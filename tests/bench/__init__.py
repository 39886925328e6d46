"""Our own measurements, run by hand: engines side by side (run.py) and start-up (startup.py)."""
