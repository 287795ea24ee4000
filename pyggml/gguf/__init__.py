"""GGUF files: `read_gguf`, `GGUFWriter`, `write_gguf`, `check_gguf`. Knows nothing of the engine."""

from pyggml.gguf.check import check_gguf
from pyggml.gguf.format import GGUFValueType, KeyType, TensorInfo
from pyggml.gguf.reader import GGUFFile, read_gguf
from pyggml.gguf.values import StringArray
from pyggml.gguf.writer import GGUFWriter, write_gguf

__all__ = ["GGUFFile", "GGUFValueType", "GGUFWriter", "KeyType", "StringArray", "TensorInfo", "check_gguf", "read_gguf", "write_gguf"]
