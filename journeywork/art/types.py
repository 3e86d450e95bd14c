"""Types of messages, of training configurations and of training results.

Names and fields are those of ART, so that its programs find them here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

import pydantic
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.chat.chat_completion import Choice
from pydantic_core import core_schema

# Messages are those of the client library and the agent. To build pydantic's schema of them takes 0.1 s at import.
_AS_IT_IS = pydantic.GetPydanticSchema(lambda _source, _handler: core_schema.any_schema())

Messages: TypeAlias = list[Annotated[ChatCompletionMessageParam, _AS_IT_IS]]
MessagesAndChoices: TypeAlias = list[Annotated[ChatCompletionMessageParam | Choice, _AS_IT_IS]]
"""A conversation. A `Choice` is a reply of the model that is trained, as the client library returned it. A dictionary
is a message that is not trained."""
Tools: TypeAlias = list[Annotated[ChatCompletionToolParam, _AS_IT_IS]]
MetadataValue: TypeAlias = float | int | str | bool | None


class TrainConfig(pydantic.BaseModel):
    """How a step is trained. A field that is not given is the installation's setting."""

    learning_rate: float = 5e-6
    kl_penalty_coef: float = 0.0


class TrainSFTConfig(pydantic.BaseModel):
    """How supervised fine-tuning is done. See `journeywork.art.TrainableModel.train_sft`."""

    learning_rate: float | list[float] = 5e-5
    batch_size: int | Literal["auto"] = "auto"


@dataclass
class TrainResult:
    """What a training step did."""

    step: int
    """Step of the newest served version."""
    metrics: dict[str, float] = field(default_factory=dict)
    version: str | None = None
    """Policy version of the step, such as `support@12`; `None` if no step was trained."""
