"""A Python-based backend for models made for NVIDIA's; it runs inference.backend.encoder_backend.

tritonserver takes it for `backend: "fastertransformer"` where this folder lies in its backend
directory, or a link to it.
"""

import sys
from pathlib import Path

# Through a link into a checkout, for an interpreter in which this project is not installed.
_ROOT = Path(__file__).resolve().parents[4]
if (_ROOT / "inference" / "backend").is_dir():
    sys.path.append(str(_ROOT))

from inference.backend.encoder_backend import (  # noqa: E402
    FasterTransformerModel as TritonPythonModel,  # noqa: F401
)
