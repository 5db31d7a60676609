"""A prefill/decode proxy for vLLM's NIXL-style connectors, MooncakeConnectorV2 among them.

Per request: prefill on a node P, which answers with ``kv_transfer_params``; these go verbatim to a
node D, whose answer goes to the client. Needs aiohttp and prometheus-client, which come with vLLM;
imports neither vLLM nor torch.
"""
