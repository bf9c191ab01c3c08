"""ONNX Runtime in 8 bits for the benchmark of the engines, in the peers' environment.

    python onnx_int8.py export ARTIFACT DIRECTORY     once; minutes
    python onnx_int8.py run DIRECTORY                 batches by line (JSON lists of tokens); answers
                                                      with CPU seconds and logits

Dynamic quantization as in its documentation: weights per output channel, activations per tensor.
Texts are padded on the right and read at their last token, so that causal attention needs no mask.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def export(artifact: Path, directory: Path) -> None:
    """Write <directory>/int8.onnx from an artifact, unless it exists already."""
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from torch import Tensor

    from services.shared.model.artifact import load_classifier

    if (directory / "int8.onnx").exists():
        return
    classifier = load_classifier(artifact, dtype=torch.float32).eval()

    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def forward(self, input_ids: Tensor, last: Tensor) -> Tensor:
            states = self.classifier.backbone(input_ids=input_ids, use_cache=False)[0]
            pooled = states[torch.arange(input_ids.shape[0]), last]
            return torch.cat([head(pooled) for head in self.classifier.heads.values()], dim=-1)

    building = directory / "building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    batch, length = torch.export.Dim("batch", min=1, max=512), torch.export.Dim("length", max=512)
    example = (torch.ones(3, 17, dtype=torch.int64), torch.tensor([3, 5, 16]))
    torch.onnx.export(
        Heads(),
        example,
        building / "float32.onnx",
        input_names=["input_ids", "last"],
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "last": {0: batch}},
        dynamo=True,
        external_data=True,
    )
    print("exported", flush=True)
    quantize_dynamic(
        building / "float32.onnx",
        building / "int8.onnx",
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
    )
    for file in building.iterdir():
        if not file.name.startswith("float32"):
            file.rename(directory / file.name)
    shutil.rmtree(building)


def run(directory: Path) -> None:
    """Answer batches from standard input, with the CPU seconds that they took."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    session = ort.InferenceSession(directory / "int8.onnx", options, ["CPUExecutionProvider"])
    for line in sys.stdin:
        batches = [_padded(texts) for texts in json.loads(line)]
        started = time.process_time()
        answers = [session.run(None, batch)[0] for batch in batches]
        seconds = time.process_time() - started
        print(
            json.dumps({"seconds": seconds, "logits": np.concatenate(answers).tolist()}), flush=True
        )


def _padded(texts: list[list[int]]) -> dict[str, NDArray[np.int64]]:
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), lengths.max()), np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return {"input_ids": tokens, "last": lengths - 1}


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        run(Path(sys.argv[2]))
