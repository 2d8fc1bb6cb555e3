"""A platform plugin with which SGLang runs on a plain CPU, without its compiled kernels.

SGLang's own CPU platform needs a kernel package that no index offers. This one is SGLang's platform
for unknown hardware: it selects torch's own operators and changes nothing else, so the scheduler,
prefix cache, sampler, HTTP server and weight loader are SGLang's.
"""

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang_cpu_torchvision import declare


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without Triton, graphs or kernels."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False


def activate() -> str:
    """Entry point: the class that SGLang is to load, in every one of its processes."""
    declare()
    return f"{__name__}.{PlainCpuPlatform.__name__}"
