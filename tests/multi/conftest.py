"""The models of the launch tests."""

from tests.contract.conftest import mla_model

__all__ = ["mla_model"]
