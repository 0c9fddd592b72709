"""Options of the tasks on digits: the classifier and the autoencoder."""

from collections.abc import Mapping
from typing import Annotated, Any

from hpcrun.config.engine import after, after_others
from hpcrun.config.fields import BelowOne, Count, ShellText, Shrinking
from hpcrun.config.section import Section, field
from hpcrun.tasks.options.checks import from_here


def _leaves_some_to_train_on(fraction: float, others: Mapping[str, Any]) -> float:
    kept = others.get("validation_fraction", 0.0)
    if fraction + kept >= 1:
        raise ValueError(
            f"{fraction:g} and data.validation_fraction={kept:g} leave nothing to train on; "
            "together they should be less than 1"
        )
    return fraction


class DigitsData(Section):
    """The ``data`` keys of the tasks on digits: the fractions of the splits."""

    validation_fraction: Shrinking = field(
        default=0.15, description="Fraction of the images for validation."
    )
    test_fraction: Annotated[Shrinking, after_others(_leaves_some_to_train_on)] = field(
        default=0.15, description="Fraction of the images for the report at the end."
    )


class ClassifierShape(Section):
    """The ``model`` section of the classifier: a small convolutional network."""

    blocks: Count = field(default=2, description="Residual convolutions.")
    channels: Count = field(default=16, description="Channels of each convolution.")
    dropout: BelowOne = field(
        default=0.1,
        description="Fraction of features set to zero in training before the last layer.",
    )


class AutoencoderShape(Section):
    """The ``model`` section of the variational autoencoder."""

    hidden: Count = field(
        default=128, description="Units of the encoder's and the decoder's hidden layer."
    )
    latent: Count = field(default=8, description="Length of an image's code.")


class AutoencoderData(DigitsData):
    """The ``data`` keys of the autoencoder."""

    reconstructions: Annotated[ShellText | None, after(from_here)] = field(
        default=None,
        description="HDF5 file for test images, reconstructions and codes; null: none.",
    )


CLASSIFIER = (ClassifierShape, DigitsData)
AUTOENCODER = (AutoencoderShape, AutoencoderData)
