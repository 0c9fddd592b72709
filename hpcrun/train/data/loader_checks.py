"""The refusal of a user's loader that no resume can repeat."""

from typing import Any

from torch.utils.data import DataLoader, IterDataPipe

from hpcrun.errors import UserError

_OF_FABRIC = (
    "with Fabric, leave this loader out of setup_dataloaders(), and make it with "
    "sampler=DistributedSampler(dataset)"
)
_OF_LIBRARY = {
    "timm": "start timm's train.py with --no-prefetcher (create_loader(use_prefetcher=False))",
    "lightning": _OF_FABRIC,
    "lightning_fabric": _OF_FABRIC,
}


def require_exact(loader: Any, name: str) -> None:
    """Raise UserError if ``loader``, with this name, cannot be exact; the text has the remedy."""
    if not isinstance(loader, DataLoader):
        library = type(loader).__module__.partition(".")[0]
        remedy = _OF_LIBRARY.get(library) or (
            "pass the DataLoader, or remove loader= if the loop makes its own batches from the global "
            "generators"
        )
        raise UserError(
            f"{name}: is a {type(loader).__name__}, not a torch.utils.data.DataLoader; {remedy}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"{name}: {type(loader).__name__} iterates in its own way, which a resume cannot repeat; pass a "
            "plain torch.utils.data.DataLoader"
        )
    if not getattr(loader, "in_order", True):
        raise UserError(
            f"{name}: in_order=False gives batches in the order in which workers end; remove it"
        )
    if isinstance(loader.dataset, IterDataPipe):
        raise UserError(
            f"{name}: {type(loader.dataset).__name__} is a DataPipe, and its position cannot be saved; use a "
            "map-style dataset, or an IterableDataset"
        )
