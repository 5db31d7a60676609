"""KVPP with vLLM's offline API on CPU: python examples/offline_cpu.py [MODEL]

Without an argument it writes the tiny model of `kvpp demo` into a temporary folder and serves that.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from vllm import LLM, SamplingParams

from kvpp_connectors.demo.model import write_checkpoint


def main() -> None:
    """Answer one prompt twice; the second time its prefix is cached."""
    with tempfile.TemporaryDirectory() as folder:
        model = sys.argv[1] if len(sys.argv) > 1 else str(write_checkpoint(Path(folder)))
        llm = LLM(
            model,
            tensor_parallel_size=2,
            kv_cache_memory_bytes=64 << 20,
            max_num_batched_tokens=64,
            max_model_len=512,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            attention_backend="CPU_MLA",
            additional_config={"enable_kvpp": True},
        )
        prompt = {"prompt_token_ids": list(range(2, 152))}
        sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        for _ in range(2):
            answer = llm.generate([prompt], sampling, use_tqdm=False)[0]
            tokens = list(answer.outputs[0].token_ids)
            print(f"{answer.num_cached_tokens} of 150 prompt tokens cached; answer {tokens}")
        for layout, stats in zip(
            llm.collective_rpc("kvpp_layout"), llm.collective_rpc("kvpp_stats"), strict=True
        ):
            print(f"rank {layout['rank']} owns layers {layout['owned_layers']}; {stats}")


if __name__ == "__main__":
    main()
