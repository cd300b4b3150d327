"""Dense bf16 FLOP/s of GPUs, for the MFU. A run on CPUs does not load this file."""

import re

# Dense bf16 FLOP/s of one device, without sparsity (the vendors' data sheets). The first match
# counts. A device that is not listed has no MFU, rather than a wrong MFU (\b keeps GB200 from
# passing for a B200, MIG slices are no whole device).
PEAK_FLOPS = [
    (r"\bMIG\b", None),
    (r"\bA100\b", 312e12),
    (r"\bH100\b.*\bPCIe\b", 756e12),
    (r"\bH[12]00\b.*\bNVL\b", 835e12),
    (r"\bH[12]00\b", 989e12),
    (r"\bB200\b", 2250e12),
    (r"\bMI300X\b", 1307e12),
]


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one device by the name that the driver reports; None if unknown."""
    for pattern, peak in PEAK_FLOPS:
        if re.search(pattern, device_name):
            return peak
    return None
