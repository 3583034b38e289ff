"""A Python-based backend for models of NVIDIA's backend; it runs inference.backend.encoder_backend.

tritonserver uses it for `backend: "fastertransformer"` if its backend directory contains this
folder, or a link to it.
"""

import sys
from pathlib import Path

# Finds the checkout behind a link, if the interpreter does not have this project installed.
_ROOT = Path(__file__).resolve().parents[4]
if (_ROOT / "inference" / "backend").is_dir():
    sys.path.append(str(_ROOT))

from inference.backend.encoder_backend import (  # noqa: E402
    FasterTransformerModel as TritonPythonModel,  # noqa: F401
)
