"""Import this before attnlens.kernels: without a GPU, Triton then interprets its kernels."""

from __future__ import annotations

import os
import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads this when it is imported, which transformers may have done already in this
    # process; a Triton imported afresh interprets. The compiled extension stays.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        if not name.startswith("triton._C"):
            del sys.modules[name]
