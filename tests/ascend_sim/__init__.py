"""torch-npu over a simulated CANN: no NPU was at hand to run `kvpp_core.device` on."""
