"""`python -m pyggml`: the same program as `pyggml`."""

import sys

from pyggml.tools import main

sys.exit(main())
