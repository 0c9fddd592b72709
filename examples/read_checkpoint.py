"""Write the model of a checkpoint as .npz, with numpy only.

python examples/read_checkpoint.py runs/gpt/checkpoints/step-000001000 gpt.npz
"""

import json
import sys
from pathlib import Path

import numpy as np

folder, output = Path(sys.argv[1]), sys.argv[2]
index = json.loads((folder / "index.json").read_text())
files = [np.memmap(folder / name, np.uint8, "r") for name in index["files"]]
model = {}
for name, (dtype, shape, *parts) in index["tensors"].items():
    if not name.startswith("model/"):
        continue
    kind = "uint16" if dtype == "bfloat16" else "uint8" if "float8" in dtype else dtype
    tensor = np.empty(shape, kind)
    for offsets, sizes, file, position, length, _ in parts:
        content = files[file][position : position + length]
        # The last entry is the content's hash: xxhash.xxh3_128_hexdigest(content).
        box = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        tensor[box] = content.view(kind).reshape(sizes)
    if dtype == "bfloat16":  # the upper half of a float32
        tensor = (tensor.astype("uint32") << 16).view("float32")
    model[name.removeprefix("model/")] = tensor
np.savez(output, **model)
print(len(model), "tensors")
