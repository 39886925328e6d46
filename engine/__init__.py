"""A declarative, config-driven training engine for PyTorch."""
