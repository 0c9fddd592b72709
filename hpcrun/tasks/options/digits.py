"""Options of the tasks on digits: the classifier and the autoencoder."""

from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo

from hpcrun.config.fields import BelowOne, Count, ShellText, Shrinking
from hpcrun.config.section import Section
from hpcrun.tasks.options.checks import from_here


def _leaves_some_to_train_on(fraction: float, others: ValidationInfo) -> float:
    kept = others.data.get("validation_fraction", 0.0)
    if fraction + kept >= 1:
        raise ValueError(
            f"{fraction:g} and data.validation_fraction={kept:g} leave nothing to train on; "
            "together they should be less than 1"
        )
    return fraction


class DigitsData(Section):
    """The ``data`` keys of the tasks on digits: the fractions of the splits."""

    validation_fraction: Shrinking = Field(
        default=0.15, description="Fraction of the images for validation."
    )
    test_fraction: Annotated[Shrinking, AfterValidator(_leaves_some_to_train_on)] = Field(
        default=0.15, description="Fraction of the images for the report at the end."
    )


class ClassifierShape(Section):
    """The ``model`` section of the classifier: a small convolutional network."""

    blocks: Count = Field(default=2, description="Residual convolutions.")
    channels: Count = Field(default=16, description="Channels of each convolution.")
    dropout: BelowOne = Field(
        default=0.1,
        description="Fraction of features set to zero in training before the last layer.",
    )


class AutoencoderShape(Section):
    """The ``model`` section of the variational autoencoder."""

    hidden: Count = Field(
        default=128, description="Units of the encoder's and the decoder's hidden layer."
    )
    latent: Count = Field(default=8, description="Length of an image's code.")


class AutoencoderData(DigitsData):
    """The ``data`` keys of the autoencoder."""

    reconstructions: Annotated[ShellText | None, AfterValidator(from_here)] = Field(
        default=None,
        description="HDF5 file for test images, reconstructions and codes; null: none.",
    )


CLASSIFIER = (ClassifierShape, DigitsData)
AUTOENCODER = (AutoencoderShape, AutoencoderData)
