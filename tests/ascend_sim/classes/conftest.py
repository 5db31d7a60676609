"""Collected only where vllm-ascend can be imported; makes the import work without CANN's Python.

`acl` is CANN's Python package, of which vllm-ascend names one function that these tests never call.
torchvision from PyPI has no CPU operators, for which it would register fakes. vllm-ascend's worker
comes first: its modules import one another in a circle.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

collect_ignore_glob = [] if find_spec("vllm_ascend") else ["test_*.py"]


def _stand_in_for_acl() -> None:
    acl, runtime = ModuleType("acl"), ModuleType("acl.rt")
    vars(acl)["rt"], vars(runtime)["memcpy"] = runtime, None
    sys.modules |= {"acl": acl, "acl.rt": runtime}


def _leave_out_torchvisions_fakes() -> None:
    register = torch.library.register_fake

    def register_fake(op: Any, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if str(op).startswith("torchvision::"):
            return lambda function: function
        registered: Callable[..., Any] = register(op, *args, **kwargs)
        return registered

    torch.library.register_fake = register_fake


if find_spec("vllm_ascend"):
    _stand_in_for_acl()
    _leave_out_torchvisions_fakes()
    importlib.import_module("vllm_ascend.worker.worker")
