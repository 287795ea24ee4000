"""Op families: one folder each with declarations (defs.py) and kernels (cpu.py)."""
