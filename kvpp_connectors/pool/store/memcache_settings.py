"""Where MemCache's own settings are: a file that MMC_LOCAL_CONFIG_PATH names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvpp_connectors.connector.options import Complaint, OptionsError

__all__ = ["CONFIG_VARIABLE", "memcache_config_file"]

CONFIG_VARIABLE = "MMC_LOCAL_CONFIG_PATH"


def memcache_config_file(environment: Mapping[str, str]) -> str:
    """The path of mmc-local.conf.

    Raises:
        OptionsError: the variable is not set, or names no file.
    """
    path = environment.get(CONFIG_VARIABLE)
    remedy = "Name mmc-local.conf there, which says where the MetaService is."
    if not path:
        reason = "backend=memcache needs this variable in the environment of every process."
        raise OptionsError([Complaint(CONFIG_VARIABLE, "nothing", reason, remedy)])
    if not Path(path).is_file():
        raise OptionsError([Complaint(CONFIG_VARIABLE, path, "There is no such file.", remedy)])
    return path
