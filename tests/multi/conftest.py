"""The models of the launch tests."""

from tests.contract.conftest import memcache_settings, mla_model

__all__ = ["memcache_settings", "mla_model"]
