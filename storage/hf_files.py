"""Opens the safetensors files of a Hugging Face folder."""

import os
from typing import Any

from distributed.agree import reason
from flags.files import hf_file


def open_safetensors(folder: str, file: str) -> Any:
    from safetensors import SafetensorError, safe_open

    real = hf_file(folder, file)
    try:
        return safe_open(real, "pt")  # checks all sizes and offsets, and refuses absurd headers
    except (OSError, SafetensorError) as error:
        path = os.path.join(folder, file)
        raise ValueError(
            f"{path} is no safetensors file that can be read: {reason(error)}"
        ) from None
