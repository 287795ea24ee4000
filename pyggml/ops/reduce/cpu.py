"""CPU kernels of the reductions: one item is one row of the result, or one line along `dim`."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyggml.cpu.simd import STORE, Helper, at, helper, ld_f32, narrow, st_f32, wide
from pyggml.dtypes import F64
from pyggml.registry import kernel
from pyggml.tensor import Node
