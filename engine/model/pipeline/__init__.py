"""Pipeline stages: where a model is cut, what stays on a rank, and how whole windows run through it.

Read cut.py first (what becomes of the model), then schedule_runner.py (what a window does).
"""
