"""Tensors travel between ranks whatever their layout is on each rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcrun.checkpoint.sharded import copies


@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_travels_between_ranks_with_other_layouts(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    wire: list[torch.Tensor] = []
    # 15 bytes: no multiple of the alignment.
    rows = [torch.arange(15, dtype=torch.int8).view(3, 5) + 1 for _ in range(count)]
    columns = [torch.zeros(5, 3, dtype=torch.int8).T for _ in rows]

    def bucket(parts: list[torch.Tensor]) -> Any:
        return copies.Bucket(tuple("ab"[:count]), tuple(parts), 0, None)

    for source, target in ((rows, columns), (columns, rows)):
        monkeypatch.setattr(dist, "broadcast", lambda chunk, *_, **__: wire.append(chunk.clone()))
        copies.broadcast(bucket(source), sends=True)
        for value in target:
            value.zero_()
        monkeypatch.setattr(dist, "broadcast", lambda chunk, *_, **__: chunk.copy_(wire.pop(0)))
        copies.broadcast(bucket(target), sends=False)
        assert all(map(torch.equal, source, target))
        assert source[0].sum() == 120
