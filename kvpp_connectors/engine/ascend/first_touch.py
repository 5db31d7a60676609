"""Where an attention layer of vllm-ascend 0.23 first touches its cache: KVPP waits there.

`wait_for_kv_layer_from_connector` is no such place: it is left out of decode-only batches, and the
fused paths write before it. So the methods that write are wrapped, on each layer's implementation;
`forward` is the backstop. It waits at its start where the methods of a class are not known, and
fails where they are and none of them ran.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from kvpp_connectors.vllm_api.names_ascend023 import FIRST_TOUCH, ONLY_DECODE
from kvpp_core.errors import KvppError

__all__ = ["hook_fused_decode", "hook_implementation"]

_TOUCH = "kvpp_touch"  # on an implementation: what the fused decode path calls
_MARK = "__kvpp_wrapped__"


def hook_implementation(name: str, impl: Any, acquire: Callable[[str], None]) -> None:
    """Let the layer's implementation call ``acquire(name)`` before it touches its cache.

    Raises:
        KvppError: a method that should be hooked is missing; names it.
    """
    kind = type(impl).__name__
    methods = FIRST_TOUCH.get(kind, ())
    if missing := [method for method in methods if not callable(getattr(impl, method, None))]:
        raise KvppError(
            f"{name}: {kind}.{', '.join(missing)} is missing; KVPP would not wait there"
        )
    backstop = _Backstop(name, kind, methods, acquire)
    setattr(impl, _TOUCH, backstop.touch)
    for method in methods:
        setattr(impl, method, _touching(getattr(impl, method), backstop.touch))
    impl.forward = backstop.around(impl.forward)


def hook_fused_decode(adaptor: Any) -> None:
    """Wrap the function of the fused decode path, which is given the implementation. Once only."""
    original = getattr(adaptor, ONLY_DECODE)
    if getattr(original, _MARK, False):
        return

    @wraps(original)
    def only_decode(atten_obj: Any, *args: Any, **kwargs: Any) -> Any:
        touch = getattr(atten_obj, _TOUCH, None)  # drafts have none
        if touch is not None:
            touch()
        return original(atten_obj, *args, **kwargs)

    setattr(only_decode, _MARK, True)
    setattr(adaptor, ONLY_DECODE, staticmethod(only_decode))


def _touching(original: Callable[..., Any], touch: Callable[[], None]) -> Callable[..., Any]:
    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        touch()
        return original(*args, **kwargs)

    return method


class _Backstop:
    """Whether one layer was acquired in the forward that runs."""

    def __init__(
        self, name: str, kind: str, methods: tuple[str, ...], acquire: Callable[[str], None]
    ) -> None:
        self._name = name
        self._kind = kind
        self._methods = methods
        self._acquire = acquire
        self._touched = False

    def touch(self) -> None:
        """The cache is about to be touched; again in the same forward is legal."""
        if not self._touched:
            self._acquire(self._name)
            self._touched = True

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``impl.forward`` with the backstop; without metadata (profiling) it touches nothing."""

        @wraps(original)
        def forward(
            layer_name: str,
            hidden_states: Any,
            kv_cache: Any,
            attn_metadata: Any,
            *rest: Any,
            **kw: Any,
        ) -> Any:
            self._touched = False
            if attn_metadata is not None and not self._methods:
                self.touch()
            result = original(layer_name, hidden_states, kv_cache, attn_metadata, *rest, **kw)
            if attn_metadata is not None and not self._touched:
                raise KvppError(
                    f"{self._name}: {self._kind}.forward ran without "
                    f"{', '.join((*self._methods, ONLY_DECODE))}, where KVPP waits for the layer; "
                    "this vllm-ascend is another one than KVPP is made for. Its answer is not valid"
                )
            return result

        return forward
