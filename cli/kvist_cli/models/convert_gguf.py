"""Worker: `python -m kvist_cli.models.convert_gguf FILE.gguf TARGET`, a GGUF as a bfloat16 model folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

# Left on a model that was read from a quantized file; they would make it be saved as one.
_QUANTIZED_ATTRIBUTES = ("hf_quantizer", "quantization_method")


def convert(source: Path, target: Path) -> None:
    """Write weights, config and tokenizer of `source` into the folder `target`."""
    folder = str(source.parent)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=source.name, dtype="bfloat16").bfloat16()
    for attribute in _QUANTIZED_ATTRIBUTES:
        if hasattr(model, attribute):
            delattr(model, attribute)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps({"path": sys.argv[2]}))
