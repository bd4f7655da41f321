"""Block-scaled FP8 (e4m3, 128x128 weight blocks) copies of a checkpoint, and their exact twins.

The format is that of the published DeepSeek-V3 and MiniMax-M2: with each quantized `X.weight` comes
`X.weight_scale_inv`, one fp32 factor per block, and a weight is `fp8 * scale`.
"""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_expertplex.checkpoints.folder import CONFIG, written_whole
from vllm_expertplex.quantization import BLOCK, dequantise

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_QUANTIZED = re.compile(r"(self_attn\.\w+_proj|experts\.\d+\.\w+)\.weight$")
_QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "float8_e4m3fn",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise `weight` [out, in] to e4m3 [out, in] and fp32 scales [out/128, in/128].

    Scales keep four significant bits. An e4m3 value has four too, so `dequantise` is exact even in
    bf16, whose significand has eight. Raises ValueError when a dimension is no multiple of 128.
    """
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"weight is {rows}x{columns}: both must be multiples of {BLOCK}")
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    mantissa, exponent = torch.frexp(blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / FP8_MAX)
    scale = torch.ldexp(torch.ceil(mantissa * 16) / 16, exponent)  # rounded up: nothing overflows
    quantized = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return quantized.view(rows, columns), scale


def write_fp8_pair(source: Path, fp8: Path, twin: Path) -> None:
    """From the single-file checkpoint `source` write its FP8 form to `fp8` and, to `twin`, a
    checkpoint in `source`'s dtype whose weights equal the FP8 ones exactly.
    """
    quantized: dict[str, torch.Tensor] = {}
    dequantized: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if _QUANTIZED.search(name):
            values, scale = quantize(weight)
            quantized[name], quantized[f"{name}_scale_inv"] = values, scale
            dequantized[name] = dequantise(values, scale).to(weight.dtype)
        else:
            quantized[name] = dequantized[name] = weight
    config = json.loads((source / CONFIG).read_text())
    fp8_config = {**config, "quantization_config": _QUANTIZATION_CONFIG}
    for out, tensors, described in ((twin, dequantized, config), (fp8, quantized, fp8_config)):
        with written_whole(out) as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n")
