"""An encoder as one ONNX graph: backbone, pooling and, if wanted, the division by the length."""

from __future__ import annotations

import copy
import json
import logging
import platform
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from embedlab.config.read import read_values
from embedlab.console import quiet
from embedlab.errors import UserError
from embedlab.pooling.squeeze import FrequencySelection, as_float

if TYPE_CHECKING:
    from embedlab.encoders.base import Encoder

FILE = "model.onnx"
OUTPUT = "sentence_embedding"
_OF_GRAPH = ("normalize", "dim", "output", "usage", "precision")
"""Settings that are not the tokenization's."""


class _Graph(nn.Module):
    def __init__(self, encoder: Encoder, normalize: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.normalize = normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        vectors: Tensor = self.encoder(input_ids, attention_mask)[:, : self.encoder.dim]
        return nn.functional.normalize(vectors, dim=-1) if self.normalize else vectors


def export_onnx(encoder: Encoder, folder: Path, normalize: bool = True) -> None:
    """Writes model.onnx (inputs input_ids and attention_mask, int64 [B, L]; output sentence_embedding,
    float32 [B, D]), the tokenizer and embedlab.json (template, length limit, normalize, prompts) into the existing
    `folder`.

    Weights are exported in float32. Needs the extra `onnx`.

    Raises:
        UserError: an encoder whose pooling leaves prompts out, or whose towers read text differently.
    """
    if not encoder.usage.include_prompt:
        fix = "to=sentence-transformers or to=hf"
        raise UserError("a graph's pooling reads the prompt", key="include_prompt", value=False, fix=fix)
    if encoder.mixed:
        raise UserError(
            "ONNX has one set of token ids, and these towers read text differently", key="to", fix="to=hf"
        )
    import onnxscript  # noqa: F401  torch.onnx needs it, and would name it only deep inside

    graph = _Graph(copy.deepcopy(encoder), normalize).eval().to(device="cpu", dtype=torch.float32)
    for module in graph.modules():
        if isinstance(module, FrequencySelection):
            module.mix = as_float(module.mix)
    rows = encoder.tokenization.ids(["an example", "another example, which is longer"])
    example = encoder.tokenization.pad(rows)
    longest = encoder.tokenization.model_limit or 1 << 16
    shape = {
        0: torch.export.Dim("batch", min=1, max=1 << 16),
        1: torch.export.Dim("length", min=1, max=longest),
    }
    with torch.no_grad(), quiet("torch.onnx"), warnings.catch_warnings():
        # The exporter warns of its own internals, of example sizes that coincide, of torchvision's absence.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            (example["input_ids"], example["attention_mask"]),
            str(folder / FILE),
            dynamo=True,
            input_names=["input_ids", "attention_mask"],
            output_names=[OUTPUT],
            dynamic_shapes=(shape, shape),
            external_data=False,
            verbose=False,
        )
    tokenizer = copy.deepcopy(encoder.tokenizer)
    if encoder.tokenization.template is None and encoder.tokenization.row_limit is not None:
        # For whoever runs the graph without this package: `truncation=True` then cuts a text where the encoder does.
        tokenizer.model_max_length = encoder.tokenization.row_limit
    tokenizer.save_pretrained(folder)
    settings = encoder.tokenization.to_dict() | {"normalize": normalize, "dim": encoder.dim, "output": OUTPUT}
    settings |= {"usage": encoder.usage.to_dict()}
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "embedlab.json").write_text(text, encoding="utf-8")


def quantize_onnx(folder: Path) -> None:
    """Puts int8 weights in the place of the fp32 ones of an exported graph; activations are quantised as it runs.

    Without VNNI the sum of two products of 8 bits each can exceed 16 bits and saturates (onnxruntime's issue 14642), so
    that weights get 7 bits there.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = (folder / FILE).rename(folder / "float.onnx")
    with quiet("root", level=logging.ERROR):  # which recommends a pass over the shapes of images
        quantize_dynamic(
            plain, folder / FILE, weight_type=QuantType.QInt8, per_channel=True, reduce_range=_saturates()
        )
    plain.unlink()
    settings = folder / "embedlab.json"
    content = read_values(settings) | {"precision": "int8"}
    settings.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _saturates() -> bool:
    """Whether this machine multiplies 8-bit numbers by the instructions of x86 before VNNI."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True  # not known


def load_onnx(
    folder: Path, batch_size: int = 32, threads: int | None = None
) -> Callable[[Sequence[str]], np.ndarray[Any, Any]]:
    """The exported encoder as a function: texts -> float32 [n, D], by onnxruntime on the CPU.

    Tokenises with what lies in the folder, nothing of the encoder that was exported.

    Args:
        folder: of `export_onnx`.
        batch_size: texts of a run of the graph.
        threads: of a run; None: as many as onnxruntime chooses.
    """
    import onnxruntime
    from transformers import AutoTokenizer

    from embedlab.encoders.tokenization import Tokenization
    from embedlab.encoders.usage import Usage

    settings = read_values(folder / "embedlab.json")
    tokenization = Tokenization.from_dict(
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        {key: value for key, value in settings.items() if key not in _OF_GRAPH},
    )
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(folder / FILE), options, providers=["CPUExecutionProvider"])

    before = Usage.from_dict(settings.get("usage", {})).text()

    def encode(texts: Sequence[str]) -> np.ndarray[Any, Any]:
        rows = tokenization.ids([before + text for text in texts])
        parts = [np.empty((0, session.get_outputs()[0].shape[1]), np.float32)]
        for start in range(0, len(rows), batch_size):
            batch = tokenization.pad(rows[start : start + batch_size])
            parts.append(session.run([OUTPUT], {name: tensor.numpy() for name, tensor in batch.items()})[0])
        return np.concatenate(parts)

    return encode
