"""Lets the PyPI (CUDA) wheels of SGLang run with a CPU build of torch; comes first on the server's PYTHONPATH.

PyPI's torchvision is a CUDA build, so its C++ operators cannot load beside CPU torch. Declaring the schemas that its
Python side insists on is enough to import it.
"""

import importlib.abc
import sys
from typing import Any


class _TorchvisionOperators(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _TorchvisionOperators.library = library  # Definitions last as long as it does.


sys.meta_path.insert(0, _TorchvisionOperators())
