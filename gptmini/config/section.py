"""The base class of every group of settings, and the checked types of their values."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator
from pydantic.functional_validators import BeforeValidator, WrapValidator
from pydantic_core import PydanticCustomError

from gptmini.errors import ConfigError

PLAIN_WORDS = {
    r"^\w+ should (.*?)((, (not|unable|got)| after) .*)?$": r"must \1",
    r"valid dictionary( or instance of \w+)?": "section of key: value",
    "a valid boolean": "true or false",
    "a valid string": "text in quotes",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    r"\b0\.00000001\b": "1e-8",
    r"'(\w+)'": r"\1",
    "^Extra inputs are not permitted": "no such setting",
}


def _check_path(path: Any, check: Callable[[Any], str]) -> str:
    path = str(path) if isinstance(path, Path) else path
    return path if path and isinstance(path, str) else check(path)


def describe_mistake(sentence: str) -> str:
    """Say in plain words what pydantic says of a wrong value, without naming the value."""
    for pattern, plain in PLAIN_WORDS.items():
        sentence = re.sub(pattern, plain, sentence)
    return sentence


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str | Path) else value


Count = Annotated[int, Field(ge=1, le=1_000_000)]
Steps = Annotated[int, Field(ge=1, le=1_000_000_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Rate = Annotated[float, Field(ge=1e-8, le=1e9)]  # lower ones leave float32's normal numbers
Penalty = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Contradiction = tuple[str, str]  # the key to change, and what is wrong with it
# A path may hold surrogates, which stand for bytes that are not UTF-8; pydantic's str refuses them.
PathText = Annotated[str, Field(min_length=1), WrapValidator(_check_path)]
# A single text will do for a list of one.
_wrap_in_list = BeforeValidator(_to_list)
_text_or_list = WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}})
Paths = Annotated[list[PathText], Field(min_length=1), _wrap_in_list, _text_or_list]
# Long lists and long texts would cost a server, and so its other clients, too much.
_ShortText = Annotated[str, Field(min_length=1, max_length=1000)]
StopTexts = Annotated[list[_ShortText], Field(max_length=16), _wrap_in_list, _text_or_list]
TokenTexts = Annotated[list[_ShortText], Field(max_length=1024), _wrap_in_list, _text_or_list]
TokenBiases = Annotated[dict[_ShortText, Penalty], Field(max_length=1024)]
OnOrOff = Literal["auto", "on", "off"]
Trackers = Annotated[list[Literal["tensorboard", "wandb"]], _wrap_in_list]


class Section(BaseModel):
    """A group of settings: frozen, strict about types, without unknown names."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    if not TYPE_CHECKING:  # where each section has its own settings as arguments

        def __init__(self, **settings: Any) -> None:
            """Raise ConfigError with a line for each setting that is wrong."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                lines = []
                for each in error.errors():
                    place = ".".join([type(self).__name__, *map(str, each["loc"])])
                    if each["type"] != "default_factory_not_called":  # its cause has its own line
                        lines.append(f"{place}: {describe_mistake(each['msg'])}")
                raise ConfigError(*lines) from None

        # Sections inside others are checked with them, without this.
        __init__.__pydantic_base_init__ = True

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield the settings that are valid one by one but not together."""
        return iter(())

    def leaves_open(self, name: str) -> bool:
        """Return whether a setting is left to be chosen: null or auto, if that is its default."""
        value = getattr(self, name)
        return value in (None, "auto") and value == type(self).model_fields[name].default

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if found := list(self.contradictions()):
            text = "; ".join(f"{key}: {problem}" for key, problem in found)
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "found": found})
        return self
