"""An engine of vLLM 0.23 in a process of its own, which a test asks by a pipe."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["Engine"]

_SPAWN = multiprocessing.get_context("spawn")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine steps when it is asked
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # some of vLLM's functions would be compiled even in eager mode
    "PYTHONHASHSEED": "0",
    "PYTHONFAULTHANDLER": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "60",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "60",
}
_START_S, _ANSWER_S, _END_S = 240.0, 120.0, 30.0


class Engine:
    """The test's end. Every answer has a bound; the log is shown where one does not come."""

    def __init__(
        self, model: Path, log: Path, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        self._log = log
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=_serve, args=(theirs, str(model), str(log), environment or {}, options)
        )
        self._process.start()
        theirs.close()
        assert self._answer(_START_S) == "ready"

    def generate(
        self, prompts: list[list[int]], max_tokens: int, params: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Run requests to their end: tokens, logprobs, cached tokens and kv_transfer_params."""
        self._pipe.send(("generate", (prompts, max_tokens, params)))
        answers: list[dict[str, Any]] = self._answer()
        return answers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker."""
        self._pipe.send(("call", (method, arguments)))
        answers: list[Any] = self._answer()
        return answers

    def facts(self) -> dict[str, Any]:
        """Blocks, block size, worker class."""
        self._pipe.send(("facts", ()))
        found: dict[str, Any] = self._answer()
        return found

    def log(self) -> str:
        """What the engine has said."""
        return self._log.read_text(errors="replace")

    def _answer(self, seconds: float = _ANSWER_S) -> Any:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            problem = f"no answer within {seconds:g} s"
        except EOFError:
            problem = "the engine's process ended"
        raise AssertionError(f"{problem}; its log ends:\n{self.log()[-4000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)


def _serve(
    pipe: Connection, model: str, log: str, environment: dict[str, str], options: dict[str, Any]
) -> None:
    os.environ.update(_ENVIRONMENT | environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()
    from vllm import LLM

    from tests.v023.reference import install

    install()
    served = _Served(
        LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_batched_tokens=192,
            **options,
        )
    )
    pipe.send("ready")
    while True:
        try:
            do, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(served, do)(*arguments))


class _Served:
    """The engine's end: a command is a method."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(
        self, prompts: list[list[int]], max_tokens: int, params: dict[str, Any] | None
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=1,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self._llm.generate(inputs, sampling, use_tqdm=False)
        return [self._answer(result) for result in results]

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return self._llm.collective_rpc(method, args=arguments)

    def facts(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "worker": config.parallel_config.worker_cls,
        }

    @staticmethod
    def _answer(result: Any) -> dict[str, Any]:
        (completion,) = result.outputs
        tokens = list(completion.token_ids)
        return {
            "tokens": tokens,
            "logprobs": [
                entry[token].logprob
                for token, entry in zip(tokens, completion.logprobs, strict=True)
            ],
            "cached": result.num_cached_tokens,
            "params": result.kv_transfer_params,
        }
