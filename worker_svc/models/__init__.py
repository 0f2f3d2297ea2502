"""Models in plain PyTorch, and the loading of their published checkpoints."""
