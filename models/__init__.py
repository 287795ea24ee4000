"""Model architectures, one file for each GGUF `general.architecture`, and the layers they share."""

if __name__ == "models":
    raise ImportError("this folder is the package pyggml.models: write `import pyggml.models`, not `import models`")

from pyggml.models.loader import Model, demo_path, load_model

__all__ = ["Model", "demo_path", "load_model"]
