"""The precision for a loop of the user, with the names that PyTorch programs use for loss scaling."""

from typing import Literal

from hpcrun.config.training import AMPConfig


def create_default_amp_config(
    use_dynamic_scaling: bool = True,
    dynamic_history_size: int = 2000,
    initial_scale: float = 2.0**16,
    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = "fp16",
) -> AMPConfig:
    """Return an AMPConfig for mixed precision with loss scaling, as ``torch.amp.GradScaler`` does it.

    Args:
        use_dynamic_scaling: adapt the loss scale; False: keep ``initial_scale``.
        dynamic_history_size: steps without an overflow before the scale grows (``amp.growth_interval``).
        initial_scale: loss scale at the start.
        dtype: precision of autocast. Only fp16 needs a loss scale; bf16 has the range of float32.

    Raises:
        pydantic.ValidationError: a value is out of its range.
    """
    return AMPConfig(
        dtype=dtype,
        dynamic=use_dynamic_scaling,
        growth_interval=dynamic_history_size,
        init_scale=initial_scale,
    )
