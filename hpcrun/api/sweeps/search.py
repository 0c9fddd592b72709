"""The block ``search`` of a sweep file, and the Optuna study that it describes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from hpcrun.config import ConfigError, Problem
from hpcrun.config.problems import words
from hpcrun.errors import UserError
from hpcrun.run.directory import RunError

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

JOURNAL = "study.journal"
"""The file of Optuna's storage in the folder of a sweep with a search."""

# They end Optuna's own loop, which is not here, or need a sampler or a pruner as an object.
_NOT_HERE = ("GridSampler", "BruteForceSampler", "PartialFixedSampler", "PatientPruner")


class Search(BaseModel):
    """The block ``search``: how Optuna chooses the values of each run.

    ``trials``: runs of the whole study. ``metric``: a key of metrics.jsonl. ``space``: for each dotted key a
    list of choices, or ``float`` or ``int`` with the arguments of Optuna's distribution. ``sampler`` and
    ``pruner``: a class of Optuna, or the class with its arguments. ``place``: returns file and line of a key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    trials: PositiveInt
    metric: str
    space: dict[str, Any] = Field(min_length=1)
    direction: Literal["minimize", "maximize"] = "minimize"
    sampler: Any = "TPESampler"
    pruner: Any = "NopPruner"
    place: Callable[[str], str]

    def objects(self) -> tuple[Any, Any, dict[str, Any]]:
        """Return the sampler, the pruner, and the distribution of each key.

        Raises:
            UserError: Optuna is not installed, or a name or an argument is wrong.
        """
        try:
            from optuna import distributions, pruners, samplers
        except ImportError as error:
            text = "search: Optuna is not installed; `pip install 'hpcrun[search]'`, or write grid:"
            raise UserError(text) from error
        names = ("FloatDistribution", "IntDistribution", "CategoricalDistribution")
        kinds = zip(("float", "int", "choices"), names, strict=True)
        ranges = {kind: getattr(distributions, name) for kind, name in kinds}
        space = {}
        for key, given in self.space.items():
            full = {"choices": {"choices": given}} if isinstance(given, list) else given
            space[key] = self._made(f"search.space.{key}", ranges, full)
        sampler = self._made("search.sampler", _classes(samplers, "Sampler"), self.sampler)
        return sampler, self._made("search.pruner", _classes(pruners, "Pruner"), self.pruner), space

    def open_study(self, folder: Path) -> "tuple[Study, Callable[[int], Trial]]":
        """Return the study in ``folder``, made if it is missing, and the function for a trial by its number.

        Raises:
            UserError: the file is damaged, or the study has another aim.
            OSError: the file cannot be read or written.

        Source: https://optuna.readthedocs.io/en/stable/reference/storages.html (a journal works on NFS).
        """
        sampler, pruner, _ = self.objects()
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        path = folder / JOURNAL
        _cut_torn_line(path)
        try:
            backend = JournalFileBackend(str(path), JournalFileOpenLock(str(path)))
            storage = JournalStorage(backend)
            study = optuna.create_study(
                study_name=folder.name, storage=storage, sampler=sampler, pruner=pruner,
                direction=self.direction, load_if_exists=True,
            )  # fmt: skip
        except (ValueError, KeyError) as error:
            raise RunError(f"{path}: is damaged ({error}); restore it from a backup") from error
        aim = study.direction.name.lower(), study.user_attrs.get("metric", self.metric)
        if aim != (self.direction, self.metric):
            text = f"the search in {folder} has {' '.join(aim)}; choose another --name"
            raise ConfigError([Problem(self.place("search"), "search", text)])
        if study.trials:
            # A sampler with a seed would repeat the values of the first trials.
            sampler.reseed_rng()
        number_of_study = storage.get_study_id_from_name(folder.name)

        def trial(number: int) -> "Trial":
            found = storage.get_trial_id_from_study_id_trial_number(number_of_study, number)
            return optuna.trial.Trial(study, found)

        return study, trial

    def _made(self, key: str, classes: Mapping[str, Callable[..., Any]], given: Any) -> Any:
        """Return the object of the class, or of the one class with its arguments, in ``given``."""
        one = {given: {}} if isinstance(given, str) else given
        name = next(iter(one), "") if isinstance(one, dict) else ""
        text = (
            f"should be one of {', '.join(classes)}, with arguments: {{NAME: {{argument: value}}}}"
        )
        if isinstance(one, dict) and len(one) == 1 and name in classes:
            try:
                return classes[name](**one[name])
            except (TypeError, ValueError, ImportError) as error:
                text = f"{' '.join(str(error).split())}; see Optuna's documentation"
        raise ConfigError([Problem(self.place(key), key, text)])


def read_search(content: Any, place: Callable[[str], str]) -> Search:
    """Return the block ``content`` of a sweep file; ``place``: returns file and line of a dotted key.

    Raises:
        ConfigError: a key is unknown, missing or wrong.
    """
    known = [f"search.{name}" for name in Search.model_fields if name != "place"]
    given = content if isinstance(content, dict) else {}
    try:
        return Search(**{**given, "place": place})
    except ValidationError as error:
        found = [words({**one, "loc": ("search", *one["loc"])}, known) for one in error.errors()]
        raise ConfigError([Problem(place(key), key, text) for key, text in found]) from error


def suggested(trial: "Trial", space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``trial`` in the distributions ``space``; Optuna chooses the missing ones.

    Raises:
        UserError: the choices of a key differ from those of the study, or the sampler needs a package.
    """
    values: dict[str, Any] = {}
    for key, given in space.items():
        try:
            if hasattr(given, "choices"):
                values[key] = trial.suggest_categorical(key, given.choices)
                continue
            suggest: Any = trial.suggest_int if type(given.low) is int else trial.suggest_float
            values[key] = suggest(key, given.low, given.high, step=given.step, log=given.log)
        except (ValueError, ImportError) as error:
            words = "choose another sampler, or another --name"
            raise UserError(f"search.space: {key}: {error}; {words}") from error
    return values


def _classes(module: Any, end: str) -> dict[str, Callable[..., Any]]:
    names = [name for name in module.__all__ if name.endswith(end) and not name.startswith("Base")]
    return {name: getattr(module, name) for name in names if name not in _NOT_HERE}


def _cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, which a full disk leaves: Optuna would append to it."""
    if path.exists():
        with path.open("rb+") as journal:
            journal.truncate(journal.read().rfind(b"\n") + 1)
