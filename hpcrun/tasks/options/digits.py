"""Options of the tasks on digits: the classifier and the autoencoder."""

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from hpcrun.config.fields import BelowOne, Count, ShellText, Shrinking
from hpcrun.tasks.options.checks import from_here


class DigitsData(BaseModel):
    """The ``data`` keys of the tasks on digits: the fractions of the splits."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    validation_fraction: Shrinking = Field(
        default=0.15, description="Fraction of the images for validation."
    )
    test_fraction: Shrinking = Field(
        default=0.15, description="Fraction of the images for the report at the end."
    )

    @field_validator("test_fraction")
    @classmethod
    def _leaves_some_to_train_on(cls, fraction: float, others: ValidationInfo) -> float:
        kept = others.data.get("validation_fraction", 0.0)
        if fraction + kept >= 1:
            raise ValueError(
                f"{fraction:g} and data.validation_fraction={kept:g} leave nothing to train on; "
                "together they should be less than 1"
            )
        return fraction


class ClassifierShape(BaseModel):
    """The ``model`` section of the classifier: a small convolutional network."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    blocks: Count = Field(default=2, description="Residual convolutions.")
    channels: Count = Field(default=16, description="Channels of each convolution.")
    dropout: BelowOne = Field(
        default=0.1,
        description="Fraction of features set to zero in training before the last layer.",
    )


class AutoencoderShape(BaseModel):
    """The ``model`` section of the variational autoencoder."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    hidden: Count = Field(
        default=128, description="Units of the encoder's and the decoder's hidden layer."
    )
    latent: Count = Field(default=8, description="Length of an image's code.")


class AutoencoderData(DigitsData):
    """The ``data`` keys of the autoencoder."""

    reconstructions: ShellText | None = Field(
        default=None,
        description="HDF5 file for test images, reconstructions and codes; null: none.",
    )

    @field_validator("reconstructions")
    @classmethod
    def _path_from_here(cls, path: str | None) -> str | None:
        return from_here(path)


CLASSIFIER = (ClassifierShape, DigitsData)
AUTOENCODER = (AutoencoderShape, AutoencoderData)
