"""The `pyggml` program: one file for each sub-command."""

if __name__ == "tools":
    raise ImportError("this folder is the package pyggml.tools: write `import pyggml.tools`, not `import tools`")
